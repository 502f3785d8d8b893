"""The learner of a replay: laid out, step by step, as the one whose steps are done again.

A run that was resumed may have gone on with more threads or on other ranks, and both decide a
step's last bits. So it is put down and taken up again, from a checkpoint of its own, wherever the
run was.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.monitors import RecordedStep
from headrace.runtime.learners import LocalLearner, place_learner
from headrace.runtime.places import LocalPlaces
from headrace.runtime.preflight import PreparedModel
from headrace.runtime.recording import LAYOUT_FACTS, as_recorded, fact

CLOSE_SECONDS = 60.0
"""How long a learner that has been told to end may take."""


class ReplayLearner:
    """Holds one learner at a time."""

    def __init__(self, config: RunConfig, model: PreparedModel) -> None:
        """``config`` as far as records do not say otherwise."""
        self._config = config
        self._model = model
        self._learner: LocalLearner | None = None
        self._layout: object = None
        self._parts = AsyncExitStack()

    async def laid_out_for(self, record: RecordedStep) -> LocalLearner:
        """Return the learner, as it is after the last step, in the layout of ``record``.

        Raises RunDirectoryError where the record does not tell it, and RunError.
        """
        layout = [record.facts.get(name) for name in LAYOUT_FACTS]
        if self._learner is None:
            self._learner = await self._begin(record)
        elif layout != self._layout:
            self._learner = await self._moved(self._learner, record)
        self._layout = layout
        return self._learner

    async def close(self) -> None:
        """End the learner, if there is one."""
        self._learner = None
        await self._parts.aclose()

    async def _moved(self, learner: LocalLearner, record: RecordedStep) -> LocalLearner:
        with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
            if (writing := await learner.save(Path(folder))) is not None:
                await writing
            await self.close()
            moved = await self._begin(record)
            await moved.load(Path(folder))
        return moved

    async def _begin(self, record: RecordedStep) -> LocalLearner:
        config = as_recorded(self._config, record)
        num_updates = int(fact(record, "num_updates"))
        compute = ComputeThread("learner", int(fact(record, "num_threads")))
        self._parts.push_async_callback(asyncio.to_thread, compute.close, CLOSE_SECONDS)
        learner = place_learner(
            config, self._model, num_updates=num_updates, compute=compute, places=LocalPlaces()
        )
        self._parts.push_async_callback(learner.close)
        await learner.start()
        return learner
