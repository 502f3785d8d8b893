"""What an engine did since it was last asked: how full it ran, and how long rollouts took.

Only counts. Python is at work here once for each step and each rollout, never for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Sums and samples of a stretch of time."""

    num_steps: int = 0
    """Decode steps."""
    num_running: int = 0
    """Rollouts that sampled a token, summed over these steps."""
    num_prefilled: int = 0
    """Tokens computed in prefills."""
    num_found: int = 0
    """Tokens that a prefill found in the cache."""
    num_preemptions: int = 0
    """Times a running rollout gave its blocks back."""
    most_held: int = 0
    """Cache blocks held at once at most."""
    idle_seconds: float = 0.0
    """Waiting for requests."""
    update_seconds: float = 0.0
    """Loading weights."""
    first_token_seconds: list[float] = field(default_factory=list)
    """From submission to the first token, of each rollout."""
    rollout_seconds: list[float] = field(default_factory=list)
    """From submission to the end, of each rollout."""

    def metrics(self) -> dict[str, float]:
        """Return them by metric name; what nothing was counted of is left out."""
        found: dict[str, float] = {
            "generator/engine/num_steps": float(self.num_steps),
            "generator/engine/num_preemptions": float(self.num_preemptions),
            "generator/cache/max_blocks_held": float(self.most_held),
            "generator/idle/no_requests_seconds": self.idle_seconds,
            "generator/idle/weights_seconds": self.update_seconds,
        }
        found |= _share("generator/engine/mean_running", self.num_running, self.num_steps)
        asked_for = self.num_prefilled + self.num_found
        found |= _share("generator/cache/found_share", self.num_found, asked_for)
        found |= _percentiles("generator/first_token", self.first_token_seconds)
        return found | _percentiles("generator/rollout", self.rollout_seconds)


def _share(name: str, part: float, whole: float) -> dict[str, float]:
    return {name: part / whole} if whole > 0 else {}


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    middle, late = np.percentile(seconds, (50, 99))
    return {f"{name}/p50_seconds": float(middle), f"{name}/p99_seconds": float(late)}
