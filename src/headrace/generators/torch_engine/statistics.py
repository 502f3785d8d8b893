"""What an engine did since it was last asked: how full it ran, and how long rollouts took.

Only counts. Python is at work here once for each step and each rollout, never for each token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headrace.generators.metrics import percentiles, share


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Sums and samples of a stretch of time."""

    began_at: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    """Decode steps."""
    num_running: int = 0
    """Rollouts that sampled a token, summed over these steps."""
    max_running: int = 0
    """Rollouts that could run together."""
    num_sampled: int = 0
    """Tokens sampled."""
    num_prefilled: int = 0
    """Tokens computed in prefills."""
    num_found: int = 0
    """Tokens that a prefill found in the cache."""
    num_preemptions: int = 0
    """Times a running rollout gave its blocks back."""
    num_aborted: int = 0
    """Rollouts handed back unfinished."""
    num_continued: int = 0
    """Rollouts that came in with tokens of their own and went on from these."""
    num_failed: int = 0
    """Rollouts that ended because their logits were not finite."""
    most_held: int = 0
    """Cache blocks held at once at most."""
    num_blocks: int = 0
    """Cache blocks there are."""
    working_seconds: float = 0.0
    """Inside engine steps."""
    idle_seconds: float = 0.0
    """Waiting for requests."""
    paused_seconds: float = 0.0
    """Waiting to be resumed."""
    update_seconds: float = 0.0
    """Loading weights, or putting staged ones in their place: nothing is sampled meanwhile."""
    max_stall_seconds: float = 0.0
    """Longest time without a step between the last one under old weights and the first one after,
    where rollouts were unfinished and nothing was paused."""
    staging_seconds: float = 0.0
    """Preparing weights beside those at work."""
    first_token_seconds: list[float] = field(default_factory=list)
    """From submission to the first token, of each rollout."""
    rollout_seconds: list[float] = field(default_factory=list)
    """From submission to the end, of each rollout that came to its end."""
    rollout_tokens: list[int] = field(default_factory=list)
    """Completion tokens of these."""

    def metrics(self) -> dict[str, float]:
        """Return them by metric name; what nothing was counted of is left out."""
        found: dict[str, float] = {
            "generator/engine/num_steps": float(self.num_steps),
            "generator/engine/num_preemptions": float(self.num_preemptions),
            "generator/engine/num_aborted": float(self.num_aborted),
            "generator/engine/num_continued": float(self.num_continued),
            "generator/engine/num_failed": float(self.num_failed),
            "generator/cache/max_blocks_held": float(self.most_held),
            "generator/idle/no_requests_seconds": self.idle_seconds,
            "generator/idle/paused_seconds": self.paused_seconds,
            "generator/idle/weights_seconds": self.update_seconds,
        }
        if self.max_stall_seconds:
            found["generator/weights/max_stall_seconds"] = self.max_stall_seconds
        if self.staging_seconds:
            found["generator/weights/staging_seconds"] = self.staging_seconds
        found |= share("generator/idle/share", self._idle, time.monotonic() - self.began_at)
        found |= share("generator/engine/tokens_per_second", self.num_sampled, self.working_seconds)
        slots = self.num_steps * self.max_running
        found |= share("generator/engine/occupied_share", self.num_running, slots)
        found |= share("generator/cache/max_held_share", self.most_held, self.num_blocks)
        found |= share("generator/engine/mean_running", self.num_running, self.num_steps)
        asked_for = self.num_prefilled + self.num_found
        found |= share("generator/cache/found_share", self.num_found, asked_for)
        found |= percentiles("generator/first_token", "seconds", self.first_token_seconds)
        found |= percentiles("generator/rollout", "seconds", self.rollout_seconds)
        return found | percentiles("generator/rollout", "tokens", self.rollout_tokens)

    @property
    def _idle(self) -> float:
        return self.idle_seconds + self.paused_seconds + self.update_seconds
