"""The members of a pool: started, watched, fenced when they are lost, and started again.

    _keep     starts a member and starts it again; ended by `shrink`, by `close`, or because its
              restarts are used up
    _watch    asks a member for a sign of life every so often; ended by the loss of it

Owns: a member that was lost is fenced before anybody else knows, so nothing of that incarnation
counts any more; it comes back only with the weights of now; and when no member is left and none may
be started again, the pool is told why, the first cause first. What members sample is the pool's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.errors import GeneratorFailure, HeadraceError
from headrace.generators.pool.member import Member
from headrace.generators.pool.proxy import (
    Beat,
    GeneratorProxy,
    Launch,
    MemberLostError,
    Question,
)
from headrace.generators.pool.telling import Telling
from headrace.types import OnUpdate

T = TypeVar("T")

LOOKS = 10
"""Times that the clock is looked at before a member counts as hung: time in which this process
itself stood still is not held against a member for more than one of them."""
MAX_BACKOFF_SECONDS = 60.0
"""Between two starts of a member."""
END_SECONDS = 60.0
"""For a member's processes to be gone once they were killed."""
MAX_TOLD = 3
"""Losses that an error tells of after the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """How large a pool is and how long it is patient."""

    num_members: int
    max_rollouts: int
    """That one member is given at once; the others wait for whoever is free first."""
    heartbeat_seconds: float = 1.0
    """Between two signs of life."""
    hang_seconds: float = 60.0
    """Longest wait for one; after it the member is lost."""
    max_restarts: int = 3
    """Starts of a member after the first, without a group of it between them."""
    backoff_seconds: float = 1.0
    """Before the first of these; doubled with each."""
    member_bytes: int = 0
    """Of this machine's memory that one takes at least; 0 where they are elsewhere."""
    save_seconds: float = 1.0
    """Between two reports of how far unfinished rollouts are; 0 has none made."""
    on_update: OnUpdate = "wait"
    """What members do with unfinished rollouts when their weights are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEvents:
    """What a roster tells its pool, each at once and before anything else happens."""

    admit: Callable[[GeneratorProxy], Awaitable[None]]
    """Bring a new incarnation to where the pool is, as long as that takes."""
    joined: Callable[[Member, GeneratorProxy], None]
    """A member takes work from now on."""
    lost: Callable[[Member], None]
    """A member was fenced; whatever it was busy with is to be sampled elsewhere."""
    surrendered: Callable[[GeneratorFailure], None]
    """No member is left, nor will be."""


class Roster:
    """All members of now. Used from one event loop."""

    def __init__(self, launch: Launch, settings: PoolSettings) -> None:
        """`tell_of` comes before the first member."""
        self._launch = launch
        self._settings = settings
        self._events: RosterEvents
        self._incarnations = itertools.count(1)
        self._indexes = itertools.count()
        self._changed = asyncio.Event()
        self._losses: list[str] = []
        self._burials: set[asyncio.Task[None]] = set()
        """Ends of processes that are under way."""
        self.telling = Telling()
        self.members: list[Member] = []
        self.num_restarts = 0
        """Starts that followed a loss, since somebody took the number."""

    def tell_of(self, events: RosterEvents) -> None:
        """Have the pool hear of what happens to members."""
        self._events = events

    @property
    def serving(self) -> list[tuple[Member, GeneratorProxy]]:
        """Members that can be asked, and how."""
        return [(member, member.proxy) for member in self.members if member.proxy is not None]

    def grow(self, count: int) -> list[Member]:
        """Add ``count`` members, which join as soon as they are ready."""
        added = [
            Member(index=next(self._indexes), max_rollouts=self._settings.max_rollouts)
            for _ in range(count)
        ]
        self.members += added
        for member in added:
            name = f"generator-{member.index}"
            member.keeper = asyncio.create_task(self._keep(member), name=name)
            member.keeper.add_done_callback(self._notice_end)
        return added

    async def remove(self, member: Member) -> None:
        """End ``member``; what it was busy with is to be sampled elsewhere. Idempotent."""
        member.takes_work = False
        await _ended(member.keeper)
        if member in self.members:
            self.members.remove(member)
            self._events.lost(member)
            self.say_changed()

    async def close(self) -> None:
        """End every member and what it started. Idempotent."""
        await asyncio.gather(*(_ended(member.keeper) for member in self.members))
        if self._burials:
            await asyncio.wait(set(self._burials), timeout=END_SECONDS)
        self.members.clear()
        self.say_changed()

    async def until(self, is_enough: Callable[[], bool]) -> None:
        """Wait; unblocked by members that join, are given up or go, and by `say_changed`."""
        while not is_enough():
            self._changed.clear()
            await self._changed.wait()

    async def tell_all(self, question: Question, *arguments: object) -> None:
        """Have every member that serves do something, all at the same time.

        Waits for each until it has or is lost. Raises what the first of them raises.
        """
        asked = (self.tell(member, proxy, question, *arguments) for member, proxy in self.serving)
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def tell(
        self, member: Member, proxy: GeneratorProxy, question: Question, *arguments: object
    ) -> None:
        """Have one do it; where it is lost, fence it. Raises what the generator raises."""
        try:
            await proxy.ask(question, *arguments)
        except MemberLostError as loss:
            self.fence(member, proxy, str(loss))

    def fence(self, member: Member, proxy: GeneratorProxy, why: str) -> None:
        """End the incarnation behind ``proxy``, at once, unless that has happened."""
        if member.proxy is not proxy:
            return
        member.proxy = None
        if member.loss is not None and not member.loss.done():
            member.loss.set_result(why)
        self._events.lost(member)

    def take_restarts(self) -> int:
        """Return how often a member was started again since the last call."""
        count, self.num_restarts = self.num_restarts, 0
        return count

    def history(self) -> str:
        """Say what was lost, the first cause first."""
        if not self._losses:
            return "no member was lost"
        first, *others = self._losses
        later = others[-MAX_TOLD:]
        more = len(others) - len(later)
        told = [f"first {first}", *(["..."] if more else []), *later]
        return "; ".join(told)

    def say_changed(self) -> None:
        """Have whoever waits by `until` look again."""
        self._changed.set()

    def _notice_end(self, keeper: asyncio.Task[None]) -> None:
        """End the pool where a keeper ended by a fault of ours: nobody else would notice."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            failure = GeneratorFailure(f"the pool failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._events.surrendered(failure)
            self.say_changed()

    async def _keep(self, member: Member) -> None:
        """Waits for the loss of one incarnation after another."""
        while True:
            try:
                await self._live(member)
            except (MemberLostError, HeadraceError) as loss:
                self._note_loss(member, str(loss))
            if member.losses_in_a_row > self._settings.max_restarts:
                self._give_up(member)
                return
            backoff = self._settings.backoff_seconds * 2.0 ** (member.losses_in_a_row - 1)
            await asyncio.sleep(min(backoff, MAX_BACKOFF_SECONDS))
            self.num_restarts += 1

    async def _live(self, member: Member) -> None:
        """Start one incarnation and stay with it. Raises MemberLostError when it is over."""
        incarnation = next(self._incarnations)
        member.incarnation = incarnation
        proxy = await self._launch(member=member.index, incarnation=incarnation)
        member.loss = asyncio.get_running_loop().create_future()
        # No TaskGroup: one that fails while it is cancelled keeps to itself that it was.
        both = [
            asyncio.create_task(self._watch(member, proxy, member.loss)),
            asyncio.create_task(self._join(member, proxy)),
        ]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            for task in both:
                if task in done:
                    task.result()
        finally:
            self.fence(member, proxy, "it was ended")
            for task in both:
                task.cancel()
            # A task of its own: who waits here may be cancelled, and it must be done all the same.
            burial = asyncio.create_task(proxy.kill())
            self._burials.add(burial)
            burial.add_done_callback(self._burials.discard)
            await asyncio.gather(*both, return_exceptions=True)
            await asyncio.wait({burial}, timeout=END_SECONDS)

    async def _join(self, member: Member, proxy: GeneratorProxy) -> None:
        await self._events.admit(proxy)
        # No await between the end of that and this line: the pool must not have moved on.
        member.proxy = proxy
        if member.losses_in_a_row:
            self.telling.restarted(member)
        self.say_changed()
        self._events.joined(member, proxy)

    async def _watch(
        self, member: Member, proxy: GeneratorProxy, loss: asyncio.Future[str]
    ) -> None:
        """Waits for beats; ended by a loss that somebody noticed, by the member's end, or late."""
        ended = asyncio.ensure_future(proxy.lost())
        try:
            while True:
                beat = await self._beat(proxy, ended, loss)
                member.note_metrics(beat.metrics)
                await asyncio.wait(
                    {ended, loss},
                    timeout=self._settings.heartbeat_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                _raise_loss(ended, loss)
        finally:
            ended.cancel()

    async def _beat(
        self, proxy: GeneratorProxy, ended: asyncio.Future[str], loss: asyncio.Future[str]
    ) -> Beat:
        asked: asyncio.Future[Any] = asyncio.ensure_future(proxy.ask("beat"))
        try:
            for _ in range(LOOKS):
                await asyncio.wait(
                    {asked, ended, loss},
                    timeout=self._settings.hang_seconds / LOOKS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                _raise_loss(ended, loss)
                if asked.done():
                    beat = asked.result()
                    if not isinstance(beat, Beat):
                        msg = f"answered {type(beat).__name__} in place of a sign of life"
                        raise MemberLostError(msg)
                    return beat
        finally:
            asked.cancel()
        msg = f"gave no sign of life for {self._settings.hang_seconds:g} s"
        raise MemberLostError(msg)

    def _note_loss(self, member: Member, why: str) -> None:
        member.losses_in_a_row += 1
        self._losses.append(f"generator {member.index}: {why}")
        self.telling.lost(member, why)

    def _give_up(self, member: Member) -> None:
        member.is_over = True
        self.telling.given_up(member)
        self.say_changed()
        if all(other.is_over for other in self.members):
            msg = (
                f"no generator is left: each was started {self._settings.max_restarts} times more "
                "without a group of it between (placement.max_restarts); "
                f"{self.history()}"
            )
            self._events.surrendered(GeneratorFailure(msg))


def _raise_loss(ended: asyncio.Future[str], loss: asyncio.Future[str]) -> None:
    for future in (loss, ended):
        if future.done():
            raise MemberLostError(future.result())


async def _ended(task: asyncio.Task[None] | None) -> None:
    """Cancel ``task`` and wait for its end."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task}, timeout=END_SECONDS)
