"""New weights for all servers, and what that does to unfinished rollouts.

Invariant: no token comes from half-replaced weights, and every token's version is the one that
sampled it. Servers load at a standstill; one that refuses the weights ends the update and leaves no
version to sample from; one that is lost is left out and asked again at the next update.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar, assert_never

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.sglang.calls import Calls, OpenGroup, OpenRollout, stop_call
from headrace.generators.sglang.client import ServerBusy, ServerLost, repeated
from headrace.generators.sglang.facts import ServerFacts
from headrace.generators.sglang.gate import Gate
from headrace.generators.sglang.servers import Member, PauseMode, usable
from headrace.generators.sglang.uninterrupted import in_thread, to_the_end
from headrace.generators.sglang.weights import PublishedWeights
from headrace.types import OnUpdate, WeightUpdate

T = TypeVar("T")

CLOSED = "the generator was closed"
UPDATE = "update"
PAUSE = "pause"


class Updates:
    """Pauses the servers and brings weights to them, one thing at a time."""

    def __init__(
        self,
        calls: Calls,
        weights: PublishedWeights,
        open_groups: Callable[[], Sequence[OpenGroup]],
        on_update: OnUpdate,
        architecture: str | None,
    ) -> None:
        self.admission = Gate()
        """Held while an update waits for what was admitted before it."""
        self.is_paused = False
        self._paused = asyncio.Event()
        self._calls = calls
        self._weights = weights
        self._open_groups = open_groups
        self._on_update: OnUpdate = on_update
        self._architecture = architecture
        self._run = secrets.token_hex(4)
        self._updating = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._controlling = asyncio.Lock()
        """Held while servers are told to stop, load or go on, so that these do not cross."""

    async def pause(self) -> None:
        """See `Interruptible`."""
        self.is_paused = True
        self._paused.set()
        self._calls.gate.hold(PAUSE)
        async with self._controlling:
            await self._tell(lambda member: member.pause("in_place"))

    async def resume(self) -> None:
        """See `Interruptible`. Waits for an update that has the servers at a standstill."""
        async with self._controlling:
            self.is_paused = False
            self._paused.clear()
            await self._tell(Member.resume)
            self._calls.gate.release(PAUSE)

    async def queue_paused(self) -> None:
        """Make paused servers ready to be told of aborts.

        A server that is paused in place answers no abort of a running request before it goes on. So
        its requests are queued first: that gives up their cache, and up to 50 tokens each that the
        scheduler has not handed over yet.
        """
        if self.is_paused:
            async with self._controlling:
                await self._tell(lambda member: member.pause("retract"))

    async def update(self, update: WeightUpdate) -> None:
        """See `Generator.update_weights`."""
        async with self._updating:
            if not self._is_closed:
                self._running = asyncio.create_task(self._update(update))
                try:
                    return await self._running
                except asyncio.CancelledError:
                    if not self._is_closed:
                        raise
        msg = f"version {update.policy_version}: {CLOSED}"
        raise WeightSyncError(msg)

    async def close(self) -> None:
        """End the update that is under way, and set paused servers going."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self.is_paused:
            await self.resume()

    async def _update(self, update: WeightUpdate) -> None:
        await self._ask_unknown()
        # Told apart also where a version is published twice: the name proves a load.
        name = f"headrace-{self._run}-{len(self._calls.versions)}-v{update.policy_version}"
        directory = await self._filed(partial(self._weights.write, update, name))
        try:
            async with self._standstill():
                began = time.monotonic()
                await self._load(directory, name, update.policy_version)
                self._calls.statistics.update_seconds += time.monotonic() - began
        finally:
            await self._filed(partial(self._weights.remove, directory))

    async def _filed(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the files of a version. Raises WeightSyncError when it takes too long."""
        seconds = self._calls.options.update_deadline_seconds
        try:
            return await in_thread(work, seconds)
        except TimeoutError as error:
            msg = (
                f"{self._weights.place} was not written or cleared within "
                f"generator.sglang.update_deadline_seconds = {seconds:g}; is its disk there?"
            )
            raise WeightSyncError(msg) from error

    # --- before -------------------------------------------------------------------------------

    async def _ask_unknown(self) -> None:
        """Ask servers that are not known, or were lost, what they are.

        Raises WeightSyncError if none can serve this run, and at the start if one does not answer
        or cannot. Whatever a server that was lost later says, the others go on without it.
        """
        members = self._calls.members
        unknown = [member for member in members if member.facts is None]
        problems = [p for found in await asyncio.gather(*map(self._ask, unknown)) for p in found]
        lost = [str(member.lost) for member in members if member.lost is not None]
        if not self._calls.versions or len(lost) == len(members):
            problems += lost
        if problems:
            msg = f"generator.sglang.urls: {'; '.join(problems)}"
            raise WeightSyncError(msg)

    async def _ask(self, member: Member) -> list[str]:
        try:
            facts = await self._read_facts(member)
            # Whoever used it before may have left it paused, and then it answers nothing.
            await member.resume()
        except (ServerLost, ServerBusy) as error:
            member.lost = str(error)
            return []
        except GeneratorFailure as error:
            problems = [str(error)]
        else:
            found = facts.problems(self._on_update, self._architecture)
            problems = [f"{member.url}: {problem}" for problem in found]
        if problems and self._calls.versions:
            member.lost = "; ".join(problems)
            return []
        if not problems:
            member.facts, member.lost = facts, None
        return problems

    async def _read_facts(self, member: Member) -> ServerFacts:
        """Be patient at the start. A server that was lost later holds up no update."""
        if self._calls.versions:
            return await member.read_facts()
        return await repeated(member.read_facts, self._calls.options.max_retries)

    # --- the standstill -----------------------------------------------------------------------

    def _standstill(self) -> AbstractAsyncContextManager[None]:
        match self._on_update:
            case "wait":
                return self._waited()
            case "keep" | "recompute":
                return self._paused_servers()
            case "restart":
                return self._restarted()
            case _:
                assert_never(self._on_update)

    @asynccontextmanager
    async def _waited(self) -> AsyncIterator[None]:
        """Let what was admitted end; unblocked by the last open rollout, or by a pause."""
        self.admission.hold(UPDATE)
        try:
            while unfinished := _unfinished(self._open_groups()):
                if self.is_paused:
                    msg = (
                        f"{len(unfinished)} rollouts are unfinished and paused, and "
                        'generator.on_update = "wait" waits for them; resume or abort them first'
                    )
                    raise WeightSyncError(msg)
                paused = asyncio.ensure_future(self._paused.wait())
                tasks = [rollout.task for rollout in unfinished if rollout.task is not None]
                await asyncio.wait({paused, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                paused.cancel()
            async with self._controlling:
                yield
        finally:
            self.admission.release(UPDATE)

    @asynccontextmanager
    async def _paused_servers(self) -> AsyncIterator[None]:
        """Stop the servers where they are, and let them go on unless all is paused."""
        mode: PauseMode = "in_place" if self._on_update == "keep" else "retract"
        self._calls.gate.hold(UPDATE)
        try:
            async with self._controlling:
                try:
                    await self._tell(lambda member: member.pause(mode))
                    yield
                finally:
                    if not self.is_paused:
                        await to_the_end(self._tell(Member.resume))
        finally:
            self._calls.gate.release(UPDATE)

    @asynccontextmanager
    async def _restarted(self) -> AsyncIterator[None]:
        """Take every open call back, and begin at the prompt again."""
        self._calls.gate.hold(UPDATE)
        try:
            await self.queue_paused()
            await asyncio.gather(*map(stop_call, _unfinished(self._open_groups())))
            for rollout in _unfinished(self._open_groups()):
                if rollout.draft.finish_reason is None:
                    rollout.draft.start_over()
            async with self._controlling:
                yield
        finally:
            self._calls.gate.release(UPDATE)

    # --- loading ------------------------------------------------------------------------------

    async def _load(self, directory: Path, name: str, policy_version: int) -> None:
        """Bring version ``name`` to every server that answers. Raises WeightSyncError."""
        self._calls.versions[name] = policy_version
        members = [member for member in self._calls.members if member.lost is None]
        try:
            await self._load_all(members, directory, name)
        except BaseException as error:
            self._calls.name = None
            for group in self._open_groups():
                group.fail(GeneratorFailure(f"the weights under it are unknown: {error}"))
            raise
        self._calls.name = name

    async def _load_all(self, members: Sequence[Member], directory: Path, name: str) -> None:
        loads = (self._load_one(member, directory, name) for member in members)
        found = await asyncio.gather(*loads, return_exceptions=True)
        refusals = []
        for member, error in zip(members, found, strict=True):
            match error:
                case None:
                    pass
                case ServerLost() | ServerBusy():
                    member.lose(str(error))
                    self._calls.statistics.num_lost += 1
                case GeneratorFailure() | WeightSyncError():
                    refusals.append(str(error))
                case _:
                    raise error
        if not refusals and not usable(members, name):
            refusals = [str(member.lost) for member in self._calls.members]
        if refusals:
            msg = f"version {name} was not loaded: {'; '.join(refusals)}"
            raise WeightSyncError(msg)

    async def _load_one(self, member: Member, directory: Path, name: str) -> None:
        member.loaded = None
        await member.load(directory, name)
        if self._on_update == "recompute":
            # What was queued keeps the cache key of its version, so the cache itself must go.
            await member.flush()
        member.loaded = name

    async def _tell(self, order: Callable[[Member], Awaitable[None]]) -> None:
        """Give ``order`` to every server that answers; one that does not obey is lost."""
        members = [member for member in self._calls.members if member.lost is None]
        found = await asyncio.gather(*map(order, members), return_exceptions=True)
        for member, error in zip(members, found, strict=True):
            if isinstance(error, GeneratorFailure):
                member.lose(str(error))
                self._calls.statistics.num_lost += 1
            elif error is not None:
                raise error


def _unfinished(groups: Iterable[OpenGroup]) -> list[OpenRollout]:
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    return [r for r in rollouts if r.task is not None and not r.task.done()]
