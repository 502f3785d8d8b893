"""Admits, holds and hands out: owns the staleness bound.

Let B be ``groups_per_step``, u the optimizer updates a step makes at most, eta ``max_staleness``
and S = `num_batches_within` (eta, u), or the pipeline's depth if that is less. There are S * B
slots. A group holds one from `reserve` until the step that trained on it was published and
`release` was called, or until it is dropped. One that is reserved once the slots of t steps were
freed is trained on in step t + S - 1 at the latest (the first step is 0): that is its deadline, and
`order` hands out no batch that would break one. So at most S - 1 steps of u updates are made in
between, and u - 1 more happen inside its own step: (S - 1) u + u - 1 <= eta. How many batches were
taken by then does not matter: a step may be made while the one before it is published. Taking
whichever groups finish first would break this bound, since a slow group could be overtaken for
ever. docs/STALENESS.md has the proof.

``max_staleness = 0`` leaves one batch of slots: generation and learning take turns. ``surplus``
groups have slots of their own beside those; what a batch leaves behind past its deadline is late,
and is given up by whoever generates it.

The proof needs every token to be sampled after its group's reservation. A rollout that went on from
tokens of before (`GenerationRequest.begun`) has no such excuse: it is as stale as its first token,
and the check at consumption, which asks each token, refuses what is too old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from headrace.buffer.order import Order, StrictOrder, Ticket, WindowedOrder
from headrace.buffer.staleness import tokens_by_version
from headrace.errors import RunError
from headrace.types import Late, RolloutGroup, num_batches_within


class RolloutBuffer:
    """Used from one event loop. Every wait here is unblocked by a call of the other side."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        updates_per_step: int = 1,
        depth: int | None = None,
        late: Late = "wait",
        surplus: int = 0,
    ) -> None:
        """``depth``: batches under way at most; None takes as many as the bound allows."""
        assert max_staleness >= updates_per_step - 1
        assert surplus == 0 or late == "cancel"
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._updates_per_step = updates_per_step
        within = num_batches_within(max_staleness, updates_per_step)
        self.num_batches = within if depth is None else min(depth, within)
        self.wave_size = groups_per_step + surplus
        """Groups that it takes to have a batch of the first ones that are complete."""
        self.num_slots = self.num_batches * groups_per_step + surplus
        self._order: Order = (
            StrictOrder()
            if late == "wait"
            else WindowedOrder(groups_per_step=groups_per_step, surplus=surplus)
        )
        self._num_free = self.num_slots
        self._next_ticket: Ticket = 0
        self._num_taken = 0
        """Batches that were taken: the number of the step whose batch is next."""
        self._num_freed = 0
        """Steps that were published and whose slots were freed."""
        self._groups: dict[Ticket, RolloutGroup | None] = {}
        """None while the group is being generated or scored."""
        self._late: dict[Ticket, RolloutGroup | None] = {}
        """Of no later batch; each holds its slot until it is dropped."""
        self._untold: list[Ticket] = []
        """Late ones that `take_late` has not told yet."""
        self._closed = False
        self._has_room = asyncio.Event()
        self._has_news = asyncio.Event()

    @property
    def num_under_way(self) -> int:
        """Groups that hold a slot and are of no batch yet, complete or not."""
        return len(self._groups) + len(self._late)

    async def reserve(self, at_most: int) -> list[Ticket]:
        """Wait for a free slot and take up to ``at_most``; unblocked by `release` and `drop`."""
        while self._num_free == 0 or not self._is_in_time():
            self._has_room.clear()
            await self._has_room.wait()
        count = min(at_most, self._num_free)
        self._num_free -= count
        tickets = list(range(self._next_ticket, self._next_ticket + count))
        self._next_ticket += count
        self._groups.update(dict.fromkeys(tickets))
        for ticket in tickets:
            self._order.admit(ticket, self._deadline)
        return tickets

    async def deliver(self, ticket: Ticket, group: RolloutGroup) -> bool:
        """Hand in the scored group that ``ticket`` was reserved for.

        Return whether it will be trained on: one that is late will not be, and is to be dropped.
        """
        if ticket in self._late:
            return False
        assert self._groups.get(ticket, group) is None, f"ticket {ticket} delivered twice"
        self._groups[ticket] = group
        self._order.complete(ticket)
        self._has_news.set()
        return True

    async def drop(self, ticket: Ticket) -> None:
        """Give a slot back unused: its group could not be generated or scored, or is late."""
        if ticket in self._late:
            del self._late[ticket]
        else:
            del self._groups[ticket]
            self._order.remove(ticket)
        self._free(1)
        self._has_news.set()

    async def close_admission(self) -> None:
        """Say that nothing will be reserved again; the last batch may then be short."""
        self._closed = True
        self._has_news.set()

    async def take_batch(self, policy_version: Callable[[], int]) -> tuple[RolloutGroup, ...]:
        """Wait for the next whole batch, in order of reservation; unblocked by `deliver`.

        Empty after the last batch. What it leaves behind for good, `take_late` returns. Raises
        RunError if a token is staler than allowed, which the pacing above excludes.
        """
        while (tickets := self._next_tickets()) is None:
            self._has_news.clear()
            await self._has_news.wait()
        step, self._num_taken = self._num_taken, self._num_taken + bool(tickets)
        groups = tuple(group for t in tickets if (group := self._groups.pop(t)) is not None)
        for ticket in self._order.overdue(step):
            self._late[ticket] = self._groups.pop(ticket)
            self._untold.append(ticket)
        for group in groups:
            self._check_staleness(group, policy_version())
        return groups

    def take_late(self) -> Mapping[Ticket, RolloutGroup | None]:
        """Return what the last batch left behind for good, each once; whoever asks drops it.

        None for a group that is not whole yet.
        """
        untold, self._untold = self._untold, []
        return {ticket: self._late[ticket] for ticket in untold}

    async def release(self, count: int) -> None:
        """Free the ``count`` slots of a step that was published, in order of steps."""
        self._num_freed += bool(count)
        self._free(count)

    @property
    def _deadline(self) -> int:
        """Of a group that is reserved now: the last step that may train on it."""
        return self._num_freed + self.num_batches - 1

    def _is_in_time(self) -> bool:
        """Whether a group reserved now can be of a batch that was not taken yet.

        Only the slots of a surplus are ever free while there is none.
        """
        return self._deadline >= self._num_taken

    def _free(self, count: int) -> None:
        self._num_free += count
        assert self._num_free <= self.num_slots
        if count:
            self._has_room.set()

    def _next_tickets(self) -> tuple[Ticket, ...] | None:
        """Return those of the next batch, none after the last; None while it must wait."""
        size = min(self._groups_per_step, self._order.num_held)
        if size < self._groups_per_step and not self._closed:
            return None
        if size == 0 and self._late:
            return None  # the last steps' late groups are settled before the run ends
        tickets = self._order.take(self._num_taken, size)
        return None if tickets is None else tuple(tickets)

    def _check_staleness(self, group: RolloutGroup, policy_version: int) -> None:
        versions = tokens_by_version([group])
        if not versions:
            return
        oldest, newest = min(versions), max(versions)
        if newest > policy_version:
            # Its staleness would be negative and pass: a rollout that another run has begun.
            msg = (
                f"group {group.group_id} holds a token of version {newest}, and the policy is at "
                f"version {policy_version}: the token was sampled by another run"
            )
            raise RunError(msg)
        # The last update of the step that takes it is the one that sees it stalest.
        staleness = policy_version + self._updates_per_step - 1 - oldest
        if staleness > self._max_staleness:
            msg = (
                f"group {group.group_id} holds a token of version {oldest} and would be trained on "
                f"at staleness {staleness}, above max_staleness = {self._max_staleness}"
            )
            raise RunError(msg)
