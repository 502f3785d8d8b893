"""How long components take to answer, by kind: the tail is what a step waits for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

_KEPT = 20_000
"""Times of one kind that are kept between two readings: the last ones."""
PERCENTS = (50, 90, 99)


class AnswerTimes:
    """Collects times and tells their percentiles. Bounded in memory."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def add(self, kind: str, seconds: float) -> None:
        """Note one answer, from asking to having it; the wait for a place is part of it."""
        self._seconds[kind].append(seconds)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call; a kind that was not asked has none."""
        metrics = {
            f"verifier/kind/{kind}/latency/p{percent}_seconds": percentile(times, percent)
            for kind, seconds in self._seconds.items()
            if (times := sorted(seconds))
            for percent in PERCENTS
        }
        self._seconds.clear()
        return metrics


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest of the values, in order, that ``percent`` of them do not exceed."""
    return ordered[-(-percent * len(ordered) // 100) - 1]
