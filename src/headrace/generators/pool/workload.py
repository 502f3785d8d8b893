"""The groups that are under way in a pool: which member has which, and where they go.

    _run      waits for the groups that one member was given; ended by them, by a failure, or by
              the member's loss

Owns: every group comes to its call exactly once, and stays whole on one member, since its rollouts
share a prompt; what a lost member had told of it, another one goes on from (`saving`). Which
members there are is the roster's business, which weights they have the pool's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.errors import GeneratorFailure, HeadraceError
from headrace.generators.pool.flights import Call, Flight, batches
from headrace.generators.pool.member import Member
from headrace.generators.pool.proxy import Delivery, GeneratorProxy, MemberLostError
from headrace.generators.pool.roster import Roster
from headrace.generators.pool.saving import Saving
from headrace.types import GenerationRequest, OnUpdate, RolloutGroup

MAX_NAMED = 5
"""Groups that an error names."""
_END_SECONDS = 60.0
"""For tasks to end that were cancelled."""


@dataclass(slots=True, kw_only=True)
class WorkCounts:
    """What happened to groups since somebody asked."""

    num_reissued: int = 0
    """Groups of lost members that others were given."""
    num_fenced: int = 0
    """Answers of incarnations that were over."""


class Workload:
    """Used from one event loop."""

    def __init__(
        self, roster: Roster, *, max_losses: int, save_seconds: float, on_update: OnUpdate
    ) -> None:
        """``max_losses``: members that may be lost with one group before its call fails.

        ``save_seconds``: see `Saving`. ``on_update``: what members do with unfinished rollouts.
        """
        self._roster = roster
        self._max_losses = max_losses
        self._on_update: OnUpdate = on_update
        self.saving = Saving(roster, save_seconds)
        self._numbers = itertools.count()
        self._waiting: list[Flight] = []
        """Flights that no member has, in the order in which they were asked for."""
        self._open: set[Flight] = set()
        """Flights that a call waits for."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: HeadraceError | None = None
        """Why nothing is sampled any more."""
        self._settled_version: int | None = None
        self.counts = WorkCounts()

    def admit(self, requests: Sequence[GenerationRequest]) -> Call:
        """Have ``requests`` sampled. Raises GeneratorFailure for two of one id."""
        _refuse_twins(requests)
        call = Call()
        flights = [
            Flight(number=next(self._numbers), request=request, call=call) for request in requests
        ]
        self._open.update(flights)
        self._waiting += flights
        self.dispatch()
        return call

    def take_back(self, call: Call) -> None:
        """Forget what nobody waits for any more, and have members stop with it."""
        left = [flight for flight in self._open if flight.call is call]
        for flight in left:
            flight.is_wanted = False
        self._open.difference_update(left)
        self._waiting = [flight for flight in self._waiting if flight in self._open]
        if left and self.failure is None:
            self._start(self.abort_at_members(left))

    def await_version(self, version: int) -> None:
        """Note that members are given the weights of ``version``; no token has a later one."""
        self.saving.newest_version, self._settled_version = version, None

    def settle_version(self) -> None:
        """Note that every member has them."""
        self._settled_version = self.saving.newest_version

    def join(self, member: Member, proxy: GeneratorProxy) -> None:
        """Give work to ``member``, and have it tell how far that is."""
        self._start(self.saving.keep_saving(member, proxy))
        self.dispatch()

    def dispatch(self) -> None:
        """Give waiting groups to members, each to the one with the least left to compute."""
        chosen: dict[Member, list[Flight]] = defaultdict(list)
        while self._waiting:
            flight = self._waiting[0]
            free = [member for member in self._roster.members if member.has_room(flight)]
            if not free:
                break
            member = min(free, key=lambda member: member.load)
            member.take(flight)
            chosen[member].append(self._waiting.pop(0))
        for member, flights in chosen.items():
            assert member.proxy is not None, "who has room serves"
            for batch in batches(flights):
                self._start(self._run(member, member.proxy, batch))

    def reissue(self, member: Member) -> None:
        """Have what a lost member was busy with sampled elsewhere."""
        again = []
        for flight in sorted(member.flights, key=lambda flight: flight.number):
            member.let_go(flight)
            flight.note_loss()
            if flight not in self._open:
                continue
            if flight.is_aborted:
                self._hand_back(flight)
            elif flight.num_losses > self._max_losses:
                flight.call.arrivals.put_nowait(self._lost_too_often(flight))
            else:
                if 1 < flight.num_losses == self._max_losses:
                    # The last time: what was saved may be what ends them.
                    flight.start_over()
                again.append(flight)
        self.counts.num_reissued += len(again)
        member.reissued = [flight.group_id for flight in again]
        self._queue(again)
        self.dispatch()

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `Interruptible`. What no member has yet comes back as it was asked for."""
        names = set(group_ids)
        flights = [flight for flight in self._open if flight.group_id in names]
        if unknown := names - {flight.group_id for flight in flights}:
            msg = f"asked to abort {_some(unknown)}: no open generate() call waits for such groups"
            raise GeneratorFailure(msg)
        for flight in flights:
            flight.is_aborted = True
        for flight in [flight for flight in self._waiting if flight.is_aborted]:
            self._waiting.remove(flight)
            self._hand_back(flight)
        await self.abort_at_members(flights)

    async def abort_at_members(self, flights: Iterable[Flight]) -> None:
        """Have members give back what they have of ``flights``, as it is.

        It comes as all groups do: where no caller asked for it, it goes on elsewhere.
        """
        wanted = set(flights)
        asked = [
            self._abort_one(member, proxy, group_id)
            for member, proxy in self._roster.serving
            for group_id in sorted({flight.group_id for flight in member.flights & wanted})
        ]
        await asyncio.gather(*asked)

    async def _abort_one(self, member: Member, proxy: GeneratorProxy, group_id: str) -> None:
        try:
            await self._roster.tell(member, proxy, "abort", [group_id])
        except GeneratorFailure:
            return  # it has ended there and is on its way

    def fail(self, failure: HeadraceError) -> None:
        """End every open call, and whatever comes later, with ``failure``; the first one counts."""
        if self.failure is None:
            self.failure = failure
        for call in {flight.call for flight in self._open}:
            call.arrivals.put_nowait(self.failure)
        self._roster.say_changed()

    async def close(self) -> None:
        """Stop waiting for members, which were ended before."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_END_SECONDS)

    async def _run(
        self, member: Member, proxy: GeneratorProxy, batch: Mapping[str, Flight]
    ) -> None:
        """Take the groups of ``batch`` as they come; ``proxy`` has been given them.

        What comes after a loss was noticed is counted and thrown away.
        """
        left = dict(batch)
        requests = [self._issue(flight) for flight in batch.values()]
        try:
            async with aclosing(proxy.generate(requests)) as deliveries:
                async for delivery in deliveries:
                    self._receive(member, proxy, left, delivery)
            if left:
                why = f"it ended a call without groups {_some(left)}"
                self._roster.fence(member, proxy, why)
        except MemberLostError as loss:
            self._roster.fence(member, proxy, str(loss))
        except HeadraceError as failure:
            if member.proxy is proxy:
                for flight in left.values():
                    member.let_go(flight)
                    flight.call.arrivals.put_nowait(failure)

    def _issue(self, flight: Flight) -> GenerationRequest:
        known, was_lost = flight.saved.num_tokens, flight.was_lost
        request = flight.issue(self._on_update, self._settled_version)
        if was_lost:
            asked = sum(len(rollout.completion_ids) for rollout in flight.request.begun)
            self.saving.counts.num_continued += flight.saved.num_tokens - asked
            self.saving.counts.num_dropped += known - flight.saved.num_tokens
        return request

    def _receive(
        self,
        member: Member,
        proxy: GeneratorProxy,
        left: dict[str, Flight],
        delivery: Delivery,
    ) -> None:
        """Take one group of ``left`` out. Raises MemberLostError for what was not asked for."""
        group_id = getattr(delivery.group, "group_id", None)
        if member.proxy is not proxy or delivery.incarnation != member.incarnation:
            self.counts.num_fenced += 1
            self._roster.telling.fenced(member, delivery.incarnation, str(group_id))
            return
        flight = None if group_id is None else left.pop(group_id, None)
        if flight is None:
            msg = f"it answered with group {group_id}, which it was not asked for"
            raise MemberLostError(msg)
        # Of what nobody waits for, even the versions may be of a history that was taken back.
        is_open = flight in self._open
        if is_open and (problem := flight.misfit(delivery.group, self.saving.newest_version)):
            msg = f"it answered with {problem}"
            raise MemberLostError(msg)
        member.losses_in_a_row = 0
        member.let_go(flight)
        if is_open:
            self.saving.note_delivered(delivery.group)
            self._take(flight, delivery.group)
        self.dispatch()
        self._roster.say_changed()

    def _take(self, flight: Flight, group: RolloutGroup) -> None:
        is_unfinished = any(rollout.may_go_on for rollout in group.rollouts)
        if is_unfinished and not flight.is_aborted:
            # Taken back because its member goes, or with a twin from another call.
            flight.go_on_from(group.rollouts)
            self._queue([flight])
        else:
            self._open.discard(flight)
            flight.deliver(group)

    def _queue(self, flights: Iterable[Flight]) -> None:
        """Have them wait for a member, in their order."""
        self._waiting = sorted([*self._waiting, *flights], key=lambda flight: flight.number)

    def _hand_back(self, flight: Flight) -> None:
        self._open.discard(flight)
        flight.hand_back()

    def _lost_too_often(self, flight: Flight) -> GeneratorFailure:
        return GeneratorFailure(
            f"group {flight.group_id} (prompt {flight.request.prompt.prompt_id}) was under way on "
            f"{flight.num_losses} generators that were lost, so it may be what ends them "
            f"(placement.max_restarts allows {self._max_losses}); {self._roster.history()}"
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have ``work`` done beside others; what it raises unforeseen ends every call."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failure = GeneratorFailure(f"the pool failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)


def _refuse_twins(requests: Sequence[GenerationRequest]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.group_id in seen:
            msg = (
                f"group {request.group_id} (prompt {request.prompt.prompt_id}): asked for twice in "
                "one call; give each group an id of its own"
            )
            raise GeneratorFailure(msg)
        seen.add(request.group_id)


def _some(names: Iterable[str]) -> str:
    """Name a few of many."""
    known = sorted(names)
    more = len(known) - MAX_NAMED
    return ", ".join(known[:MAX_NAMED]) + f" and {more} more" * (more > 0)
