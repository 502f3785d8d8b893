"""A reward function of the user's, called in processes of its own.

An endless loop, a crash or an exception costs one rollout its score and nothing else; the event
loop never waits for it.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.config import FunctionConfig
from headrace.errors import ConfigError
from headrace.types import Outcome, Prompt
from headrace.verifiers.component import Score, failed_score
from headrace.verifiers.process_pool import ProcessPool, Reply, ReplyStatus
from headrace.verifiers.slots import Slots
from headrace.verifiers.worker_process import WorkerSpec

_CHECK_MEMORY_MIB = 4096


_OF_FUNCTION = frozenset((Outcome.RUNTIME, Outcome.TIMEOUT_WALL, Outcome.OOM))
"""How a call fails that a completion may have brought about; a dead process is INFRA."""


class FunctionComponent:
    """Pays what the function returns: a finite number, or None to abstain."""

    def __init__(self, config: FunctionConfig) -> None:
        self._failure_reward = config.failure_reward
        self.pool = ProcessPool(
            WorkerSpec(
                kind="function",
                target=config.path,
                num_processes=config.num_processes,
                timeout_seconds=config.timeout_seconds,
                memory_mib=config.memory_mib,
            )
        )

    @property
    def slots(self) -> Slots:
        """The places of calls."""
        return self.pool.slots

    @property
    def num_workers(self) -> int:
        """See `Resizable`."""
        return self.pool.num_workers

    async def resize(self, num_workers: int) -> None:
        """See `Resizable`."""
        await self.pool.resize(num_workers)

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return what the function returned; a failure of any kind is a reward of None."""
        job = {
            "prompt": prompt.text,
            "completion": completion,
            "answer": prompt.answer,
            "metadata": dict(prompt.metadata),
        }
        score = _score(await self.pool.call(job))
        if score.failed and self._failure_reward is not None and score.outcome in _OF_FUNCTION:
            return replace(score, reward=self._failure_reward)
        return score

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()


def check_function(path: str, *, memory_mib: int = _CHECK_MEMORY_MIB) -> None:
    """Import the function at ``path`` in a process of its own. Raises ConfigError if it fails."""
    pool = ProcessPool(
        WorkerSpec(
            kind="function",
            target=path,
            num_processes=1,
            timeout_seconds=1.0,
            memory_mib=memory_mib,
        )
    )
    try:
        problem = pool.start_problem()
    finally:
        pool.close_blocking()
    if problem is not None:
        raise ConfigError(problem)


def _score(reply: Reply) -> Score:
    match reply.status:
        case ReplyStatus.OK if reply.value is None:
            return Score(outcome=Outcome.ABSTAIN, reward=None, detail=reply.detail)
        case ReplyStatus.OK:
            reward = float(reply.value)
            outcome = Outcome.PASS if reward > 0 else Outcome.WRONG
            return Score(outcome=outcome, reward=reward, detail=f"returned {reward:g}")
        case _:
            return failed_score(reply)
