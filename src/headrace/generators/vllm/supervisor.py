"""Keeps one vLLM engine going: starts it, gives it its weights, and does both again when it dies.

Owns the order of what changes an engine (start, load, pause, end): one at a time. Rollouts that an
engine's death interrupts are their owner's to submit again, once `revive` has returned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

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
        self._deaths = 0
        self._is_closed = False
        self.is_paused = False
        self.num_restarts = 0
        self.update_seconds = 0.0
        self.report: dict[str, int] = {}
        """What the worker said of the weights it loaded last."""

    @property
    def policy_version(self) -> int | None:
        """Of the weights that tokens are sampled from; None before the first."""
        return None if self._segment is None else self._segment.info.policy_version

    def require_weights(self) -> None:
        """Raise GeneratorFailure where nothing can be sampled: no weights, no engine, closed."""
        _ = self.engine

    @property
    def engine(self) -> VllmEngine:
        """The engine to submit to; one that has died is for `revive`."""
        if self._is_closed:
            raise GeneratorFailure(CLOSED)
        if self._segment is None:
            msg = "asked to generate before the first update_weights"
            raise GeneratorFailure(msg)
        if self._engine is None:
            msg = "the vLLM engine died too often and was not started again"
            raise GeneratorFailure(msg)
        return self._engine

    def note_ended_rollout(self) -> None:
        """A rollout came to its end: whatever killed the engine before does not always."""
        self._deaths = 0

    async def replace(
        self, segment: Segment, on_update: OnUpdate, start_over: Callable[[], list[str]]
    ) -> None:
        """Load ``segment``, which then belongs to the supervisor; start the engine if need be.

        ``start_over`` is called with ``restart`` while nothing is sampled, makes rollouts forget
        their tokens and returns their requests. Raises WeightSyncError; then the old weights stay.
        """
        async with self._turn:
            began = time.monotonic()
            while True:
                try:
                    await self._load(await self._living(), segment, on_update, start_over)
                    break
                except EngineDied as death:
                    await self._bury(death)
            self.update_seconds += time.monotonic() - began

    async def _load(
        self,
        engine: VllmEngine,
        segment: Segment,
        on_update: OnUpdate,
        start_over: Callable[[], list[str]],
    ) -> None:
        await engine.pause(forget_cache=on_update != "keep")
        try:
            report = await engine.load(segment)
        except UpdateRefused as refusal:
            # What the engine holds now is not known: another one gets the old weights.
            await self._bury(refusal)
            if self._segment is not None:
                await self._settle()
            msg = f"version {segment.info.policy_version} was not loaded: {refusal}"
            raise WeightSyncError(msg) from refusal
        self.report = dict(report)
        old, self._segment = self._segment, segment
        if old is not None and old is not segment:
            old.close()
        if on_update == "restart":
            await engine.abort(start_over())
        if not self.is_paused:
            await engine.resume()

    async def revive(self, dead: VllmEngine) -> None:
        """Return once another engine than ``dead`` is there. Raises GeneratorFailure.

        Called by every rollout that was interrupted; the first one starts it, in a task that lives
        on when that rollout is taken back.
        """
        if self._revival is None or self._revival.done():
            self._revival = asyncio.create_task(self._revive(dead), name="vllm-revival")
        await asyncio.shield(self._revival)

    async def _revive(self, dead: VllmEngine) -> None:
        async with self._turn:
            if self._engine is dead and not self._is_closed:
                await self._bury(EngineDied("its processes ended"))
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
        if self._is_closed:
            raise GeneratorFailure(CLOSED)
        if self._engine is None:
            self._engine = await VllmEngine.start(self._settings)
            if self._segment is not None:
                await self._engine.pause(forget_cache=True)
                try:
                    self.report = dict(await self._engine.load(self._segment))
                except UpdateRefused as refusal:
                    msg = f"it does not take the weights that the last one had: {refusal}"
                    raise EngineDied(msg) from refusal
                if not self.is_paused:
                    await self._engine.resume()
        return self._engine

    async def _bury(self, cause: Exception) -> None:
        """End what is left of the engine. Raises GeneratorFailure when that happens too often."""
        if self._engine is not None:
            await self._engine.end()
        self._engine = None
        self._deaths += 1
        limit = self._settings.options.max_restarts
        if self._deaths > limit:
            msg = (
                f"the vLLM engine died {self._deaths} times without a rollout ending between, "
                f"generator.vllm.max_restarts = {limit}; the last time: {cause}"
            )
            raise GeneratorFailure(msg) from cause
        self.num_restarts += 1
        _LOG.warning("the vLLM engine died (%s); it is started again", cause)

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
        async with self._turn:
            if self._engine is not None:
                await self._engine.end()
            self._engine = None
            if self._segment is not None:
                self._segment.close()
            self._segment = None
