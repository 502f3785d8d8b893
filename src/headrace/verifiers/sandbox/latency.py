"""How long things took: counts in buckets that grow by a tenth. Constant memory, any duration."""

from __future__ import annotations

import math

_SMALLEST = 1e-4
_GROWTH = 1.1
_NUM_BUCKETS = 150
"""Up to some 150 s; what takes longer is counted in the last one."""


class LatencyHistogram:
    """Not for several threads at once: its owner has a lock."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self.count = 0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        steps = math.log(max(seconds, _SMALLEST) / _SMALLEST, _GROWTH)
        self._counts[min(_NUM_BUCKETS - 1, math.ceil(steps))] += 1
        self.count += 1

    def quantile(self, share: float) -> float:
        """Return the seconds that ``share`` of them did not exceed, to a tenth; 0 if none."""
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return _SMALLEST * _GROWTH**bucket
        return 0.0
