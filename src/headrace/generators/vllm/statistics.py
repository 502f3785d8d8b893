"""What the rollouts of a stretch of time say of the engine: its cache, and how long they took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from headrace.generators.vllm.flight import Flight


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Sums and samples since somebody last asked."""

    num_asked: int = 0
    """Tokens that requests began with."""
    num_found: int = 0
    """Of these, found in the cache."""
    first_token_seconds: list[float] = field(default_factory=list)
    rollout_seconds: list[float] = field(default_factory=list)

    def note_prefill(self, num_tokens: int, num_found: int) -> None:
        """Count a request that has sampled its first token."""
        self.num_asked += num_tokens
        self.num_found += num_found

    def add(self, flight: Flight) -> None:
        """Count a rollout that has ended."""
        self.rollout_seconds.append(time.monotonic() - flight.submitted_at)
        if flight.first_token_at is not None:
            self.first_token_seconds.append(flight.first_token_at - flight.submitted_at)

    def metrics(self) -> dict[str, float]:
        """Return them by metric name; what nothing was counted of is left out."""
        found: dict[str, float] = {}
        if self.num_asked:
            found["generator/cache/found_share"] = self.num_found / self.num_asked
        for name, seconds in (
            ("generator/first_token", self.first_token_seconds),
            ("generator/rollout", self.rollout_seconds),
        ):
            if seconds:
                middle, late = np.percentile(seconds, (50, 99))
                found |= {f"{name}/p50_seconds": float(middle), f"{name}/p99_seconds": float(late)}
        return found
