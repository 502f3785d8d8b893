"""What the rollouts of a stretch of time say of the engine: its cache, and how long they took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headrace.generators.metrics import percentiles, share
from headrace.generators.vllm.flight import Flight


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Sums and samples since somebody last asked."""

    num_asked: int = 0
    """Tokens that requests began with."""
    num_found: int = 0
    """Of these, found in the cache."""
    num_failed: int = 0
    """Rollouts that ended because their logits were not finite."""
    first_token_seconds: list[float] = field(default_factory=list)
    rollout_seconds: list[float] = field(default_factory=list)

    def note_prefill(self, num_tokens: int, num_found: int) -> None:
        """Count a request that has sampled its first token."""
        self.num_asked += num_tokens
        self.num_found += num_found

    def add(self, flight: Flight) -> None:
        """Count a rollout that has ended."""
        self.num_failed += flight.finish_reason == "error"
        self.rollout_seconds.append(time.monotonic() - flight.submitted_at)
        if flight.first_token_at is not None:
            self.first_token_seconds.append(flight.first_token_at - flight.submitted_at)

    def metrics(self) -> dict[str, float]:
        """Return them by metric name; what nothing was counted of is left out."""
        found = share("generator/cache/found_share", self.num_found, self.num_asked)
        found |= percentiles("generator/first_token", "seconds", self.first_token_seconds)
        found["generator/engine/num_failed"] = float(self.num_failed)
        return found | percentiles("generator/rollout", "seconds", self.rollout_seconds)
