"""Takes for length, by tokens or characters. Runs in this process: it is one comparison."""

from __future__ import annotations

import math

from headrace.config import LengthConfig
from headrace.types import Outcome, Prompt, Rollout
from headrace.verifiers.component import Score


class LengthComponent:
    """Pays 0 for what is short enough and less, down to -1, for what is longer."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        """Return what is lost, as a number in [-1, 0]."""
        del prompt
        is_tokens = self._config.unit == "tokens"
        length = len(rollout.completion_ids) if is_tokens else len(rollout.text)
        lost = self._lost(length)
        outcome = Outcome.WRONG if lost else Outcome.PASS
        detail = f"{length} {self._config.unit}"
        # 0.0 and not -0.0, which reads as a loss.
        return Score(outcome=outcome, reward=-lost if lost else 0.0, detail=detail)

    async def close(self) -> None:
        """Nothing was started."""

    def _lost(self, length: int) -> float:
        start, limit = self._config.start, self._config.limit
        share = min(max((length - start) / (limit - start), 0.0), 1.0)
        return share if self._config.shape == "linear" else (1.0 - math.cos(math.pi * share)) / 2.0
