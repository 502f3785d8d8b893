"""GeneratorPool: the Generator role over members that live elsewhere, any of which may die.

Owns: every group that was asked for is yielded exactly once, whichever members are lost on the way;
a group stays whole on one member, since its rollouts share a prompt; and no token comes from other
weights than the last published ones once `update_from` has returned. A group is sampled anew where
its member was lost, and its tokens are the same: they rest on seed, weights and place in the group
alone. Which members there are is the roster's.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from headrace.errors import GeneratorFailure, HeadraceError, WeightSyncError
from headrace.generators.pool.flights import Call, Flight, batches
from headrace.generators.pool.member import Member
from headrace.generators.pool.merging import over_members, over_time
from headrace.generators.pool.proxy import (
    Delivery,
    GeneratorProxy,
    Launch,
    MemberLostError,
    Question,
)
from headrace.generators.pool.roster import PoolSettings, Roster, RosterEvents
from headrace.roles import WeightStore
from headrace.types import GenerationRequest, RolloutGroup, WeightNotice, WeightUpdate

CLOSED = "the generators were closed"
MAX_NAMED = 5
"""Groups that an error names."""


class GeneratorPool:
    """Samples with several generators. Used from one event loop; starts nothing before weights."""

    def __init__(self, launch: Launch, settings: PoolSettings, store: WeightStore) -> None:
        """``store`` is closed by whoever had it made; members read what it writes."""
        self._settings = settings
        self._store = store
        self._wanted = settings.num_members
        events = RosterEvents(
            admit=self._admit,
            joined=self._dispatch,
            lost=self._reissue,
            surrendered=self._fail,
        )
        self._roster = Roster(launch, settings, events)
        self._numbers = itertools.count()
        self._waiting: list[Flight] = []
        """Flights that no member has, in the order in which they were asked for."""
        self._open: set[Flight] = set()
        """Flights that a call waits for."""
        self._notice: WeightNotice | None = None
        self._publication = 0
        """Counts notices, whose versions may repeat or, after a learner's restart, go back."""
        self._is_paused = False
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: HeadraceError | None = None
        self._num_reissued = 0
        self._num_fenced = 0
        self._metrics_since = time.monotonic()

    @property
    def num_members(self) -> int:
        """Members that serve."""
        return len(self._roster.serving)

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[RolloutGroup, None]:
        """See `Generator`. Waits for members, whose loss has others take over.

        Raises GeneratorFailure once no member is left, or where a group was lost with too many.
        """
        self._require_weights()
        _refuse_twins(requests)
        call = Call()
        flights = [self._flight(request, call) for request in requests]
        self._open.update(flights)
        self._waiting += flights
        self._dispatch()
        try:
            for _ in flights:
                item = await call.arrivals.get()
                if isinstance(item, HeadraceError):
                    raise item
                yield item
        finally:
            call.is_closed = True
            self._take_back(flights)

    def _flight(self, request: GenerationRequest, call: Call) -> Flight:
        return Flight(number=next(self._numbers), request=request, call=call)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`. For who holds tensors; a weight sync writes them and tells of them."""
        notice = await self._store.write(update, is_whole=True)
        await self.update_from(notice)
        self._store.release(notice.policy_version)

    async def update_from(self, notice: WeightNotice) -> None:
        """Return once every token sampled from now on comes from the weights of ``notice``.

        All members load at the same time; who is lost meanwhile, or comes later, loads them before
        it gets work. Waits for at least one member. Raises WeightSyncError.
        """
        async with self._changing:
            self._require_open()
            self._notice = notice
            self._publication += 1
            if not self._roster.members:
                self._roster.grow(self._wanted)
            await self._tell_all("update_weights", self._publication, notice)
            await self._roster.until(lambda: self._failure is not None or self.num_members > 0)
            self._require_open()

    async def pause(self) -> None:
        """See `Interruptible`."""
        await self._set_paused(is_paused=True)

    async def resume(self) -> None:
        """See `Interruptible`."""
        await self._set_paused(is_paused=False)

    async def _set_paused(self, *, is_paused: bool) -> None:
        self._require_open()
        # Before anything is awaited: a member that joins now does so as the pool then is.
        self._is_paused = is_paused
        await self._tell_all("pause" if is_paused else "resume")

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `Interruptible`. What no member has yet comes back as it was asked for."""
        self._require_open()
        names = set(group_ids)
        flights = sorted(
            (f for f in self._open if f.group_id in names), key=lambda flight: flight.number
        )
        if unknown := names - {flight.group_id for flight in flights}:
            msg = f"asked to abort {_some(unknown)}: no open generate() call waits for such groups"
            raise GeneratorFailure(msg)
        for flight in flights:
            flight.is_aborted = True
        for flight in [flight for flight in self._waiting if flight.is_aborted]:
            self._waiting.remove(flight)
            self._hand_back(flight)
        await self._abort_at_members(flights)

    async def resize(self, num_members: int) -> None:
        """Have so many members; return once those that came take work and those that went are gone.

        Groups of a member that goes are taken back unfinished and go on at the others. Raises
        GeneratorFailure where a new one does not join; then those that did stay.
        """
        async with self._changing:
            self._require_open()
            self._wanted = num_members
            if not self._roster.members:
                return
            for member in [member for member in self._roster.members if member.is_over]:
                await self._roster.remove(member)
            surplus = len(self._roster.members) - num_members
            if surplus > 0:
                await self._shrink(surplus)
            else:
                await self._grow(-surplus)

    def metrics(self) -> Mapping[str, float]:
        """See `Generator`. What members count arrives with their signs of life."""
        now = time.monotonic()
        seconds, self._metrics_since = max(now - self._metrics_since, 1e-9), now
        members = self._roster.members
        counted = []
        found: dict[str, float] = {}
        for member in members:
            beats, member.metrics = member.metrics, []
            counted.append(over_time(beats))
            share = min(member.take_busy_seconds() / seconds, 1.0)
            found[f"generator/member_{member.index}/busy_share"] = share
        found |= over_members(counted)
        found |= {
            "generator/pool/num_members": float(self.num_members),
            "generator/pool/num_restarts": float(self._roster.take_restarts()),
            "generator/pool/num_reissued_groups": float(self._num_reissued),
            "generator/pool/num_fenced_answers": float(self._num_fenced),
        }
        self._num_reissued = self._num_fenced = 0
        return found

    async def close(self) -> None:
        """See `Generator`. Ends every member; open calls raise GeneratorFailure."""
        self._fail(GeneratorFailure(CLOSED))
        await self._roster.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    # --- work ------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
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

    async def _run(
        self, member: Member, proxy: GeneratorProxy, batch: Mapping[str, Flight]
    ) -> None:
        """Waits for the groups of ``batch``; ended by them, by a failure, or by a loss.

        What comes after that loss was noticed is counted and thrown away.
        """
        left = dict(batch)
        requests = [flight.sent() for flight in batch.values()]
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
            if self._roster.is_current(member, proxy):
                for flight in left.values():
                    member.let_go(flight)
                    flight.call.arrivals.put_nowait(failure)

    def _receive(
        self,
        member: Member,
        proxy: GeneratorProxy,
        left: dict[str, Flight],
        delivery: Delivery,
    ) -> None:
        """Take one group of ``left`` out. Raises MemberLostError for what was not asked for."""
        is_current = self._roster.is_current(member, proxy)
        if not is_current or delivery.incarnation != member.incarnation:
            self._num_fenced += 1
            return
        group_id = getattr(delivery.group, "group_id", None)
        flight = None if group_id is None else left.pop(group_id, None)
        if flight is None:
            msg = f"it answered with group {group_id}, which it was not asked for"
            raise MemberLostError(msg)
        assert self._notice is not None
        if problem := flight.misfit(delivery.group, self._notice.policy_version):
            msg = f"it answered with {problem}"
            raise MemberLostError(msg)
        member.losses_in_a_row = 0
        member.let_go(flight)
        self._take(flight, delivery.group)
        self._dispatch()
        self._roster.say_changed()

    def _take(self, flight: Flight, group: RolloutGroup) -> None:
        if flight not in self._open:
            return
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

    def _reissue(self, member: Member) -> None:
        """Have what a lost member was busy with sampled elsewhere."""
        flights = sorted(member.flights, key=lambda flight: flight.number)
        again = []
        for flight in flights:
            member.let_go(flight)
            flight.num_losses += 1
            if flight not in self._open:
                continue
            if flight.is_aborted:
                self._hand_back(flight)
            elif flight.num_losses > self._settings.max_restarts + 1:
                flight.call.arrivals.put_nowait(self._lost_too_often(flight))
            else:
                again.append(flight)
        self._num_reissued += len(again)
        self._queue(again)
        self._dispatch()

    def _lost_too_often(self, flight: Flight) -> GeneratorFailure:
        return GeneratorFailure(
            f"group {flight.group_id} (prompt {flight.request.prompt.prompt_id}) was under way on "
            f"{flight.num_losses} generators that were lost, so it may be what ends them "
            f"(placement.max_restarts = {self._settings.max_restarts}); {self._roster.history()}"
        )

    def _take_back(self, flights: Sequence[Flight]) -> None:
        """Forget what nobody waits for any more, and have members stop with it."""
        left = [flight for flight in flights if flight in self._open]
        self._open.difference_update(left)
        self._waiting = [flight for flight in self._waiting if flight in self._open]
        if left and self._failure is None:
            self._start(self._abort_at_members(left))

    # --- members ---------------------------------------------------------------------------------

    async def _admit(self, proxy: GeneratorProxy) -> None:
        """Bring a new member to where the pool is. Waits for it; the roster's watch ends the wait.

        Raises MemberLostError where it cannot be brought there.
        """
        publication, is_paused = -1, False
        while (publication, is_paused) != (self._publication, self._is_paused):
            if publication != self._publication:
                wanted, notice = self._publication, self._notice
                try:
                    await proxy.ask("update_weights", wanted, notice)
                    publication = wanted
                except WeightSyncError as error:
                    if wanted == self._publication:
                        raise MemberLostError(str(error)) from error
                    # Others came meanwhile, and what it was to read is there no more.
            elif is_paused != self._is_paused:
                wanted_pause = self._is_paused
                await proxy.ask("pause" if wanted_pause else "resume")
                is_paused = wanted_pause

    async def _tell_all(self, question: Question, *arguments: object) -> None:
        """Have every member that serves do something, all at the same time.

        Waits for each until it has or is lost. Raises what the first of them raises.
        """
        serving = self._roster.serving
        asked = (self._tell(member, proxy, question, *arguments) for member, proxy in serving)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _tell(
        self, member: Member, proxy: GeneratorProxy, question: Question, *arguments: object
    ) -> None:
        try:
            await proxy.ask(question, *arguments)
        except MemberLostError as loss:
            self._roster.fence(member, proxy, str(loss))

    async def _abort_at_members(self, flights: Iterable[Flight]) -> None:
        """Have members give up what they have of ``flights``, or have been given of the same id."""
        wanted = set(flights)
        asked = [
            self._abort_one(member, proxy, group_id)
            for member, proxy in self._roster.serving
            for group_id in sorted({flight.group_id for flight in member.flights & wanted})
        ]
        await asyncio.gather(*asked)

    async def _abort_one(self, member: Member, proxy: GeneratorProxy, group_id: str) -> None:
        try:
            await proxy.ask("abort", [group_id])
        except MemberLostError as loss:
            self._roster.fence(member, proxy, str(loss))
        except GeneratorFailure:
            return  # it has ended there and is on its way

    async def _shrink(self, surplus: int) -> None:
        """End members: those that do not serve first, then the latest."""
        order = sorted(self._roster.members, key=lambda m: (m.is_serving, -m.index))
        leaving = order[:surplus]
        for member in leaving:
            member.takes_work = False
        await self._abort_at_members([flight for m in leaving for flight in m.flights])
        # What they give back is on its way; what does not come is sampled anew elsewhere.
        with suppress(TimeoutError):
            returned = self._roster.until(lambda: not any(m.flights for m in leaving))
            await asyncio.wait_for(returned, self._settings.hang_seconds)
        for member in leaving:
            await self._roster.remove(member)

    async def _grow(self, count: int) -> None:
        added = self._roster.grow(count)
        await self._roster.until(
            lambda: self._failure is not None or all(m.is_serving or m.is_over for m in added)
        )
        failed = [member for member in added if member.is_over]
        for member in failed:
            await self._roster.remove(member)
        if failed:
            msg = f"{len(failed)} of {count} new generators did not join; {self._roster.history()}"
            raise GeneratorFailure(msg)

    def _fail(self, failure: HeadraceError) -> None:
        """End every open call, and refuse others, with ``failure``."""
        if self._failure is None:
            self._failure = failure
        for call in {flight.call for flight in self._open}:
            call.arrivals.put_nowait(self._failure)
        self._roster.say_changed()

    def _require_open(self) -> None:
        if self._failure is not None:
            raise GeneratorFailure(str(self._failure))

    def _require_weights(self) -> None:
        self._require_open()
        if self._notice is None:
            msg = "asked to generate before the first update_weights"
            raise GeneratorFailure(msg)

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
            self._fail(failure)


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
