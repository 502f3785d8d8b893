"""Keeps one vLLM engine going: starts it, gives it its weights, and does both again when it dies.

Owns the order of what changes an engine (start, load, pause, end): one at a time. Rollouts that an
engine's death interrupts are their owner's to submit again, once `revive` has returned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.vllm.engine import EngineDied, UpdateRefused, VllmEngine
from headrace.generators.vllm.segment import Segment
from headrace.generators.vllm.settings import VllmSettings
from headrace.types import OnUpdate

_LOG = logging.getLogger(__name__)

CLOSED = "the generator was closed"


class Supervisor:
    """The engine of now, and the weights that a new one would get."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._turn = asyncio.Lock()
        self._engine: VllmEngine | None = None
        self._segment: Segment | None = None
        self._revival: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[VllmEngine] | None = None
        self._deaths = 0
        self._surrender: str | None = None
        """Why no engine is started again until there are new weights."""
        self._is_closed = False
        self.is_paused = False
        self.num_restarts = 0
        """Engines after the first, since somebody last took the number."""
        self.update_seconds = 0.0
        self.report: dict[str, int] = {}
        """What the worker said of the weights it loaded last."""

    @property
    def policy_version(self) -> int | None:
        """Of the weights that tokens are sampled from; None before the first."""
        return None if self._segment is None else self._segment.info.policy_version

    def require_weights(self) -> None:
        """Raise GeneratorFailure where nothing can be sampled: no weights, given up, closed."""
        self._require_open()
        if self._segment is None:
            msg = "asked to generate before the first update_weights"
            raise GeneratorFailure(msg)
        if self._surrender is not None:
            raise GeneratorFailure(self._surrender)

    def _require_open(self) -> None:
        if self._is_closed:
            raise GeneratorFailure(CLOSED)

    async def ready(self) -> VllmEngine:
        """Return the engine to submit to, started again if there is none.

        One that has died since is for `revive`. Raises GeneratorFailure as `require_weights` does.
        """
        self.require_weights()
        while self._engine is None:
            await self.revive(None)
            self.require_weights()
        return self._engine

    def note_ended_rollout(self) -> None:
        """A rollout came to its end: whatever killed the engine before does not always."""
        self._deaths = 0

    async def replace(
        self, segment: Segment, on_update: OnUpdate, take_back: Callable[[], list[str]]
    ) -> None:
        """Load ``segment``, which then belongs to the supervisor; start the engine if need be.

        ``take_back`` is called between the new weights and the next token and returns the requests
        that must not go on. Raises WeightSyncError; then the old weights stay.
        """
        try:
            async with self._turn:
                began = time.monotonic()
                while True:
                    try:
                        await self._load(await self._living(), segment, on_update, take_back)
                        break
                    except EngineDied as death:
                        await self._bury(death)
                self.update_seconds += time.monotonic() - began
        finally:
            if self._segment is not segment:
                segment.close()

    async def _load(
        self,
        engine: VllmEngine,
        segment: Segment,
        on_update: OnUpdate,
        take_back: Callable[[], list[str]],
    ) -> None:
        try:
            await engine.pause(forget_cache=on_update != "keep")
            report = await engine.load(segment)
            self._install(segment, report)
            if taken := take_back():
                await engine.abort(taken)
            if not self.is_paused:
                await engine.resume()
        except EngineDied:
            raise
        except UpdateRefused as refusal:
            await self._fall_back(refusal, segment)
        except BaseException:
            # It stands still and holds weights that nobody can name.
            await self._discard()
            raise

    def _install(self, segment: Segment, report: Mapping[str, int]) -> None:
        self.report = dict(report)
        old, self._segment = self._segment, segment
        if old is not None and old is not segment:
            old.close()

    async def _fall_back(self, refusal: UpdateRefused, segment: Segment) -> NoReturn:
        """Give the old weights to another engine: what this one holds now is not known."""
        await self._discard()
        if self._segment is not None:
            self.num_restarts += 1
            _LOG.warning("vLLM refused new weights (%s); another one gets the old", refusal)
            await self._settle()
        msg = f"version {segment.info.policy_version} was not loaded: {refusal}"
        raise WeightSyncError(msg) from refusal

    async def revive(self, dead: VllmEngine | None) -> None:
        """Return once another engine than ``dead`` is there. Raises GeneratorFailure.

        Called by every rollout that was interrupted; the first one starts it, in a task that lives
        on when that rollout is taken back.
        """
        if self._revival is None or self._revival.done():
            self._revival = asyncio.create_task(self._revive(dead), name="vllm-revival")
        await asyncio.shield(self._revival)

    async def _revive(self, dead: VllmEngine | None) -> None:
        async with self._turn:
            if dead is not None and self._engine is dead and not self._is_closed:
                await self._bury(EngineDied("its processes ended"))
            self.require_weights()
            if self._engine is None:
                await self._settle()

    async def _settle(self) -> None:
        """Start engines until one holds the weights of now. Raises GeneratorFailure in the end."""
        while True:
            try:
                await self._living()
                break
            except EngineDied as death:
                await self._bury(death)

    async def _living(self) -> VllmEngine:
        """Return the engine, started and with the weights of now where there are any."""
        if self._engine is None:
            engine = await self._start()
            try:
                if self._segment is not None:
                    await self._give_weights(engine, self._segment)
            except BaseException:
                await engine.end()
                raise
            self._engine, self._surrender = engine, None
        return self._engine

    async def _start(self) -> VllmEngine:
        """Start an engine, unless and until the generator is closed."""
        self._require_open()
        self._starting = asyncio.create_task(VllmEngine.start(self._settings), name="vllm-start")
        try:
            return await self._starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                # Not this task was cancelled but the start, which `close` alone does.
                raise GeneratorFailure(CLOSED) from None
            raise
        finally:
            self._starting = None

    async def _give_weights(self, engine: VllmEngine, segment: Segment) -> None:
        """Give a new engine the weights that the last one had."""
        await engine.pause(forget_cache=True)
        try:
            self.report = dict(await engine.load(segment))
        except UpdateRefused as refusal:
            msg = f"it does not take the weights that the last one had: {refusal}"
            raise EngineDied(msg) from refusal
        if not self.is_paused:
            await engine.resume()

    async def _bury(self, cause: Exception) -> None:
        """End what is left of the engine. Raises GeneratorFailure when that happens too often."""
        await self._discard()
        self._deaths += 1
        limit = self._settings.options.max_restarts
        if self._deaths > limit:
            self._surrender = (
                f"the vLLM engine died {self._deaths} times without a rollout ending between and "
                f"was not started again, generator.vllm.max_restarts = {limit}; the last time: "
                f"{cause}"
            )
            raise GeneratorFailure(self._surrender) from cause
        self.num_restarts += 1
        _LOG.warning("the vLLM engine died (%s); it is started again", cause)

    async def _discard(self) -> None:
        """End the engine; from here on there is none, also if this is cancelled."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.end()

    async def pause(self) -> None:
        """Return once no token is being sampled."""
        async with self._turn:
            self.is_paused = True
            await self._tell(lambda engine: engine.pause(forget_cache=False))

    async def resume(self) -> None:
        """Go on."""
        async with self._turn:
            self.is_paused = False
            await self._tell(VllmEngine.resume)

    async def _tell(self, command: Callable[[VllmEngine], Awaitable[None]]) -> None:
        """Give a command; an engine that dies of it gets it with its next start."""
        if self._engine is not None:
            try:
                await command(self._engine)
            except EngineDied as death:
                _LOG.debug("the engine died while told: %s", death)

    async def close(self) -> None:
        """End the engine and give the weights back. Idempotent."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
        async with self._turn:
            await self._discard()
            if self._segment is not None:
                self._segment.close()
            self._segment = None
