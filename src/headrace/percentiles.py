"""Percentiles of what was measured, by one rule for all roles, and the last values measured.

Owns the rule: nearest rank, so that a percentile is a value that was measured, and never one
between two. Does not know what the values are of.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

KEPT = 4096
"""Values that a window keeps; older ones are forgotten, so that a percentile tells of now."""


def percentiles(values: Iterable[float], percents: Sequence[int]) -> tuple[float, ...]:
    """Return, for each of ``percents`` (1..100), the smallest value that so many do not exceed.

    Raises ValueError where there are no values: nothing is a percentile of nothing.
    """
    ordered = sorted(values)
    if not ordered:
        msg = "percentiles of no values; ask only where something was measured"
        raise ValueError(msg)
    # In whole numbers: 0.99 * 100 is more than 99 in floats.
    return tuple(ordered[-(-percent * len(ordered) // 100) - 1] for percent in percents)


class Window:
    """The last values of one measurement. Bounded in memory, whatever is added.

    Not for several threads at once: its owner has a lock, or a loop.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._values: deque[float] = deque(maxlen=kept)

    def __len__(self) -> int:
        """How many values are kept."""
        return len(self._values)

    def add(self, value: float) -> None:
        """Count one value, and forget the oldest beyond ``kept``."""
        self._values.append(value)

    def percentiles(self, *percents: int) -> tuple[float, ...] | None:
        """Return the percentiles of what is kept; None without any."""
        return percentiles(self._values, percents) if self._values else None

    def mean(self) -> float | None:
        """Return the mean of what is kept; None without any."""
        return math.fsum(self._values) / len(self._values) if self._values else None
