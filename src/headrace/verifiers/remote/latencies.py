"""Durations of the last few thousand answers, and their percentiles."""

from __future__ import annotations

import math
from collections import deque

WINDOW = 4096
"""Durations kept; older ones are forgotten, so that a percentile tells of now."""


class Latencies:
    """Bounded in memory, whatever is added."""

    def __init__(self, window: int = WINDOW) -> None:
        self._seconds: deque[float] = deque(maxlen=window)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._seconds.append(seconds)

    def percentile(self, share: float) -> float | None:
        """Return the smallest duration that ``share`` of them do not exceed; None without any."""
        if not self._seconds:
            return None
        ordered = sorted(self._seconds)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def mean(self) -> float | None:
        """Return the mean; None without any."""
        return math.fsum(self._seconds) / len(self._seconds) if self._seconds else None
