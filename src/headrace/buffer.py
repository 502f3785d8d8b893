"""The rollout buffer: a bounded FIFO of scored groups that owns the staleness bound.

Let B be ``groups_per_step``, u the optimizer updates a step makes at most, and eta
``max_staleness``. There are S * B slots, with S = (eta - (u - 1)) // u + 1. A group holds a slot
from `reserve` until the step that trained on it was published and `release` was called, or until
it is dropped. Batches leave in the order of reservation. A group reserved now is therefore trained
on by the S-th step from now at the latest, so at most S - 1 steps of u updates are published in
between, and u - 1 more happen inside its own step: (S - 1) u + u - 1 <= eta. Taking whichever
groups finish first would be faster and would break this bound, since a slow group could be
overtaken for ever.

``max_staleness = 0`` leaves one batch of slots: generation and learning take turns.

The proof needs every token to be sampled after its group's reservation. A rollout that went on from
tokens of before (`GenerationRequest.begun`) has no such excuse: it is as stale as its first token,
and the check at consumption, which asks each token, refuses what is too old.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from headrace.errors import RunError
from headrace.types import RolloutGroup

Ticket = int
"""Place in the order of reservation."""


class RolloutBuffer:
    """Used from one event loop. Every wait here is unblocked by a call of the other side."""

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, updates_per_step: int = 1
    ) -> None:
        assert max_staleness >= updates_per_step - 1
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._updates_per_step = updates_per_step
        steps = (max_staleness - (updates_per_step - 1)) // updates_per_step + 1
        self.num_slots = steps * groups_per_step
        self._num_free = self.num_slots
        self._next_ticket: Ticket = 0
        # In order of reservation; None while the group is being generated or scored.
        self._reserved: deque[Ticket] = deque()
        self._groups: dict[Ticket, RolloutGroup | None] = {}
        self._closed = False
        self._changed = asyncio.Condition()

    async def reserve(self, at_most: int) -> list[Ticket]:
        """Wait for a free slot and take up to ``at_most``; unblocked by `release` and `drop`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_free > 0)
            count = min(at_most, self._num_free)
            self._num_free -= count
            tickets = list(range(self._next_ticket, self._next_ticket + count))
            self._next_ticket += count
            self._reserved.extend(tickets)
            self._groups.update(dict.fromkeys(tickets))
            return tickets

    async def deliver(self, ticket: Ticket, group: RolloutGroup) -> None:
        """Hand in the scored group that ``ticket`` was reserved for."""
        async with self._changed:
            assert self._groups.get(ticket, group) is None, f"ticket {ticket} delivered twice"
            self._groups[ticket] = group
            self._changed.notify_all()

    async def drop(self, ticket: Ticket) -> None:
        """Give a slot back unused: its group could not be generated or scored."""
        async with self._changed:
            self._reserved.remove(ticket)
            del self._groups[ticket]
            self._num_free += 1
            self._changed.notify_all()

    async def close_admission(self) -> None:
        """Say that nothing will be reserved again; the last batch may then be short."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take_batch(self, policy_version: Callable[[], int]) -> tuple[RolloutGroup, ...]:
        """Wait for the next whole batch, in order of reservation; unblocked by `deliver`.

        Empty after the last batch. Raises RunError if a token is staler than allowed, which the
        pacing above excludes.
        """
        async with self._changed:
            await self._changed.wait_for(self._batch_is_ready)
            tickets = [self._reserved.popleft() for _ in range(self._batch_size())]
            groups = tuple(group for t in tickets if (group := self._groups.pop(t)) is not None)
        for group in groups:
            self._check_staleness(group, policy_version())
        return groups

    async def release(self, count: int) -> None:
        """Free the slots of ``count`` groups whose step was published."""
        async with self._changed:
            self._num_free += count
            assert self._num_free <= self.num_slots
            self._changed.notify_all()

    def _batch_size(self) -> int:
        return min(self._groups_per_step, len(self._reserved))

    def _batch_is_ready(self) -> bool:
        size = self._batch_size()
        if size < self._groups_per_step and not self._closed:
            return False
        return all(self._groups[self._reserved[index]] is not None for index in range(size))

    def _check_staleness(self, group: RolloutGroup, policy_version: int) -> None:
        oldest, newest = group.oldest_version, group.newest_version
        if oldest is None or newest is None:
            return
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
