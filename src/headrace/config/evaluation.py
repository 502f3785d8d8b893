"""`[eval]`: held-out evaluation during training."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace.config.generator import SamplingConfig
from headrace.config.section import Section


class EvaluationConfig(Section):
    """Held-out evaluation, before the first step, every ``every`` steps and after the last."""

    every: int = Field(default=10, ge=1)
    """Training steps between evaluations."""
    greedy: bool = True
    """Measure pass@1 with one greedy rollout a prompt."""
    num_rollouts: int = Field(default=4, ge=0)
    """Sampled rollouts a prompt, for pass@k; 0 samples none."""
    pass_at_k: tuple[int, ...] = (1, 4)
    """Each k of the sampled pass@k, unbiased; none may exceed ``num_rollouts``."""
    interleaved: bool | None = None
    """Training goes on beside every evaluation but the first and the last, in portions of
    ``groups_per_step``; their tokens are of the policy versions that
    ``generator/evaluation_version`` tells. null: where ``max_staleness`` > 0."""
    sampling: SamplingConfig | None = None
    """Its own sampling; null takes that of training. Recorded with every result."""

    @model_validator(mode="after")
    def _k_within_rollouts(self) -> Self:
        if self.num_rollouts and any(not 1 <= k <= self.num_rollouts for k in self.pass_at_k):
            msg = (
                f"eval.pass_at_k = {list(self.pass_at_k)}: each must lie between 1 and "
                f"eval.num_rollouts = {self.num_rollouts}"
            )
            raise ValueError(msg)
        if not self.greedy and self.num_rollouts == 0:
            msg = (
                "eval.greedy = false with eval.num_rollouts = 0: would measure nothing; set either"
            )
            raise ValueError(msg)
        return self
