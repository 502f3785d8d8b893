"""No run waits for ever for a verdict, whatever verifier it was given.

Every part of a verifier has a deadline of its own: a call, an execution, a question. This one is
behind them all, for what nobody foresaw: a group whose verdicts do not come is not scored, which is
not the same as 0, and the prompt is recorded as dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.errors import ConfigError
from headrace.roles import Verifier
from headrace.types import Outcome, RolloutGroup, Verdict
from headrace.verifiers.component import Resizable
from headrace.verifiers.weighted import WeightedVerifier

NAME = "deadline"
"""Of the verifier in the verdicts that are given here."""


class DeadlineVerifier:
    """Asks another verifier, and answers itself where that does not in time."""

    def __init__(self, verifier: Verifier, seconds: float) -> None:
        """``seconds``: for one group, from the moment it is handed in; waiting in line included."""
        self._verifier = verifier
        self._seconds = seconds
        self._num_overdue = 0

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """See `Verifier`. Waits for the verdicts; unblocked by them, or by the deadline."""
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                return await self._verifier.score(group)
        except TimeoutError:
            if not deadline.expired():
                raise  # the verifier's own
        self._num_overdue += group.group_size
        detail = (
            f"no verdicts within faults.verifier_deadline_seconds = {self._seconds:g}; what was "
            "under way for them was cancelled"
        )
        verdict = Verdict(outcome=Outcome.INFRA, reward=None, verifier=NAME, detail=detail)
        return (verdict,) * group.group_size

    def metrics(self) -> Mapping[str, float]:
        """See `Verifier`; with the rollouts whose verdicts did not come."""
        overdue, self._num_overdue = self._num_overdue, 0
        return {**self._verifier.metrics(), "verifier/rollouts/num_overdue": float(overdue)}

    def workers(self) -> Mapping[str, Resizable]:
        """See `WeightedVerifier`. Raises ConfigError where there can be no more of them here."""
        if not isinstance(self._verifier, WeightedVerifier):
            msg = (
                "verifiers: those of this run are actors on the machines of a cluster, which Ray "
                "starts again as the recipe has them; stop the run, and give another "
                "verifier.components.NAME.num_processes with --resume"
            )
            raise ConfigError(msg)
        found = self._verifier.workers()
        if not found:
            msg = (
                "verifiers: none of this run's works in processes or cells that scale (math, "
                "function, and code in this machine's sandbox do); a judge's max_concurrent, a "
                "reward model's num_processes and servers of verifier.remote are the recipe's"
            )
            raise ConfigError(msg)
        return found

    async def close(self) -> None:
        """See `Verifier`."""
        await self._verifier.close()
