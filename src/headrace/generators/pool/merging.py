"""What the generators of a pool count, as if it were one.

Counts add up, the largest of maxima and of 99th percentiles is taken, speeds of members add up, and
of everything else it is the mean, as many values as there are: medians of parts are no median of
the whole, and are near it where the parts are alike, as those of a pool are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean


def over_time(beats: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return what one member counted from beat to beat, in one."""
    return _merged(beats, _over_time)


def over_members(members: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return what several members counted at the same time, in one."""
    return _merged(members, _over_members)


def _merged(
    parts: Iterable[Mapping[str, float]], rule: Callable[[str], Callable[[Sequence[float]], float]]
) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(value)
    return {name: rule(name.rpartition("/")[2])(found) for name, found in values.items()}


def _over_time(stat: str) -> Callable[[Sequence[float]], float]:
    if stat.startswith(("max", "p99")):
        return max
    if stat.startswith("num_") or (stat.endswith("_seconds") and not stat.startswith("p50")):
        return sum
    return fmean


def _over_members(stat: str) -> Callable[[Sequence[float]], float]:
    if stat.startswith(("max", "p99")):
        return max
    if stat.startswith("num_") or stat.endswith("_per_second"):
        return sum
    return fmean
