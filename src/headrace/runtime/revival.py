"""A run outlives its learner: what died is built anew, and goes on from the last checkpoint.

A life of a run begins at a checkpoint, or at the start, and ends with the run or with its learner.
Owns: only a learner that died or hung begins another life, never one that says what is wrong; and
there are so many lives in a row without a new checkpoint between as the recipe allows, then the run
ends with the first cause. What a life begins with, and what it takes back, is its own business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.config import FaultConfig
from headrace.controller import RunOutcome
from headrace.errors import LearnerFailure, RunError
from headrace.learners import StoredCheckpoint

MAX_BACKOFF_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where a life begins."""

    checkpoint: StoredCheckpoint | None
    """None: at the start of the run."""
    death: LearnerFailure | None = None
    """How the life before ended; None of the first one."""

    @property
    def step(self) -> int:
        """Training steps done."""
        return 0 if self.checkpoint is None else self.checkpoint.step


class Checkpoints(Protocol):
    """Where lives begin."""

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written, whatever comes of it."""
        ...

    def latest(self) -> StoredCheckpoint | None:
        """Return the newest one. Raises CheckpointError if it is damaged."""
        ...


Live = Callable[[Beginning], Awaitable[RunOutcome]]
"""Lives from a beginning to the end of the run; its learner is closed when that ends."""


async def outlive(
    live: Live, first: Beginning, checkpoints: Checkpoints, limits: FaultConfig
) -> RunOutcome:
    """Live until the run ends. Raises what ended it; LearnerFailure once restarts are used up.

    Between two lives it waits for the checkpoint under way, which ends with the learner, and for a
    clock.
    """
    beginning, deaths = first, list[LearnerFailure]()
    while True:
        try:
            return await live(beginning)
        except RunError as error:
            death = death_in(error)
            if death is None:
                raise
            await checkpoints.settle()
            newest = checkpoints.latest()
            if newest is not None and newest.step > beginning.step:
                deaths.clear()
            deaths.append(death)
            beginning = Beginning(checkpoint=newest, death=death)
            if len(deaths) > limits.max_learner_restarts:
                raise LearnerFailure(_given_up(deaths, beginning)) from error
        await asyncio.sleep(_backoff_seconds(limits, len(deaths)))


def death_in(error: BaseException) -> LearnerFailure | None:
    """Return the death of a learner among the causes of ``error``; None where there is none.

    Who was waiting for the learner says so in words of its own: a generator for weights, a store
    for a checkpoint.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, LearnerFailure):
        cause = cause.__cause__
    return cause


def _backoff_seconds(limits: FaultConfig, num_deaths: int) -> float:
    return min(limits.backoff_seconds * 2.0 ** (num_deaths - 1), MAX_BACKOFF_SECONDS)


def _given_up(deaths: Sequence[LearnerFailure], beginning: Beginning) -> str:
    where = "the start" if beginning.checkpoint is None else f"step {beginning.step}"
    remedy = f"--resume goes on from {where}"
    if len(deaths) == 1:
        return f"{deaths[0]}. faults.max_learner_restarts = 0, so the run ends; {remedy}"
    return (
        f"the learner died {len(deaths)} times in a row without a new checkpoint, and "
        f"faults.max_learner_restarts = {len(deaths) - 1}; {remedy}. First: {deaths[0]}. "
        f"Last: {deaths[-1]}"
    )
