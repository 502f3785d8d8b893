"""What a generator's servers did since it was last asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.generators.metrics import percentiles, share


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Sums and samples of a stretch of time."""

    num_calls: int = 0
    """Calls that were answered with tokens or an end."""
    num_retries: int = 0
    """Calls that were made again at a server that lives."""
    num_lost: int = 0
    """Servers that stopped being used."""
    num_failed: int = 0
    """Rollouts that ended because their logits were not finite."""
    num_input: int = 0
    """Tokens that calls began with."""
    num_cached: int = 0
    """Of these, found in a server's cache."""
    update_seconds: float = 0.0
    """From a standstill to the last server's new weights."""
    rollout_seconds: list[float] = field(default_factory=list)
    """From submission to the end, of each rollout."""

    def metrics(self, num_servers: int) -> dict[str, float]:
        """Return them by metric name; what nothing was counted of is left out."""
        found = {
            "generator/servers/num_used": float(num_servers),
            "generator/servers/num_lost": float(self.num_lost),
            "generator/servers/num_calls": float(self.num_calls),
            "generator/servers/num_retries": float(self.num_retries),
            "generator/engine/num_failed": float(self.num_failed),
            "generator/idle/weights_seconds": self.update_seconds,
        }
        found |= share("generator/cache/found_share", self.num_cached, self.num_input)
        return found | percentiles("generator/rollout", "seconds", self.rollout_seconds)
