"""Pays what a reward model says. The model lives in processes of its own, and scores in batches.

Owns: what arrives while a batch is computed goes into the next one, in order of arrival; a caller
that is cancelled leaves its place in the queue; one completion that fails fails its batch alone.
Batches are made by one task each, which `close` ends, and never by a caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from headrace.config import RewardModelConfig
from headrace.errors import ConfigError
from headrace.types import Outcome, Prompt
from headrace.verifiers.component import Score, failed_score
from headrace.verifiers.process_pool import ProcessPool, ReplyStatus
from headrace.verifiers.slots import Slots
from headrace.verifiers.worker_process import WorkerSpec


@dataclass(frozen=True, slots=True)
class _Asked:
    """One completion and who waits for its score."""

    prompt: str
    completion: str
    score: asyncio.Future[Score]


class RewardModelComponent:
    """Collects completions and has them scored together."""

    def __init__(self, config: RewardModelConfig) -> None:
        self.pool = ProcessPool(_spec(config))
        self._config = config
        self._waiting: deque[_Asked] = deque()
        self._batches: set[asyncio.Task[None]] = set()

    @property
    def slots(self) -> Slots:
        """The places of batches."""
        return self.pool.slots

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return the model's number; None where a prompt is too long for it, or where it failed.

        Waits for the batches before its own; each has a deadline.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(prompt.text, completion, loop.create_future())
        self._waiting.append(asked)
        # After those that arrive in the same turn of the loop, so that they share a batch.
        loop.call_soon(self._start_batches)
        return await asked.score

    async def close(self) -> None:
        """End the processes, and the batches on them."""
        for batch in self._batches:
            batch.cancel()
        await asyncio.gather(*self._batches, return_exceptions=True)
        await self.pool.close()

    def _start_batches(self) -> None:
        while self._waiting and len(self._batches) < self._config.num_processes:
            batch: list[_Asked] = []
            while self._waiting and len(batch) < self._config.batch_size:
                asked = self._waiting.popleft()
                if not asked.score.done():
                    batch.append(asked)
            if batch:
                task = asyncio.create_task(self._score(batch))
                self._batches.add(task)
                task.add_done_callback(self._end_batch)

    def _end_batch(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        if not task.cancelled():
            self._start_batches()

    async def _score(self, batch: list[_Asked]) -> None:
        """Score ``batch``; each of its callers is answered, whatever happens."""
        try:
            texts = [[asked.prompt, asked.completion] for asked in batch]
            reply = await self.pool.call({"texts": texts})
            if reply.status is ReplyStatus.OK:
                scores = [_score(value, self._config) for value in reply.value]
            else:
                scores = [failed_score(reply)] * len(batch)
            for asked, score in zip(batch, scores, strict=True):
                if not asked.score.done():
                    asked.score.set_result(score)
        except Exception as error:  # noqa: BLE001 - raised again at every caller
            for asked in batch:
                if not asked.score.done():
                    asked.score.set_exception(error)
        finally:
            for asked in batch:
                asked.score.cancel()


def check_reward_model(config: RewardModelConfig) -> None:
    """Load the model in a process of its own. Raises ConfigError if it cannot score."""
    if not config.path.is_dir():
        msg = f"path = {str(config.path)!r}: no such directory"
        raise ConfigError(msg)
    pool = ProcessPool(_spec(config))
    try:
        problem = pool.start_problem()
    finally:
        pool.close_blocking()
    if problem is not None:
        raise ConfigError(problem)


def _spec(config: RewardModelConfig) -> WorkerSpec:
    settings = {"path", "template", "label", "squash", "max_tokens", "device", "dtype"}
    return WorkerSpec(
        kind="reward_model",
        target=config.model_dump_json(include=settings),
        shown=f"path = {str(config.path)!r}",
        num_processes=config.num_processes,
        timeout_seconds=config.timeout_seconds,
        # A device's memory is mapped into the process: its address space says nothing.
        memory_mib=None,
    )


def _score(value: float | None, config: RewardModelConfig) -> Score:
    if value is None:
        detail = f"the prompt is longer than max_tokens = {config.max_tokens}, or than is read"
        return Score(outcome=Outcome.ABSTAIN, reward=None, detail=detail)
    outcome = Outcome.PASS if value > 0 else Outcome.WRONG
    return Score(outcome=outcome, reward=value, detail=f"the model says {value:.4g}")
