"""How several votes become one. Owns: a tie is no verdict, and neither is a minority.

Pure: the same votes in any order give the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, assert_never

from headrace.verifiers.judge.answer import Vote

Rule: TypeAlias = Literal["majority", "mean", "unanimous"]
Points: TypeAlias = Mapping[str, float]
"""Criterion -> points."""
_Count: TypeAlias = Callable[[Sequence[int]], float | None]


def decided(votes: Sequence[Vote], num_votes: int, rule: Rule) -> Points | None:
    """Return the points by ``rule`` of what has been voted so far, or None if it decides nothing.

    ``num_votes`` were asked for; those that are missing or have no points count against. What is
    decided stays so, whatever the missing ones will say, but for ``mean``.
    """
    points = [vote.points for vote in votes if vote.points is not None]
    match rule:
        case "majority":
            return _by_criterion(points, lambda values: _most(values, num_votes))
        case "mean":
            if 2 * len(points) <= num_votes:
                return None
            return _by_criterion(points, lambda values: sum(values) / len(values))
        case "unanimous":
            return _by_criterion(points, lambda values: _all_alike(values, num_votes))
        case _:
            assert_never(rule)


def is_over(votes: Sequence[Vote], num_votes: int, rule: Rule) -> bool:
    """Whether no further vote can change the result, so that nobody need wait for the open ones."""
    match rule:
        case "majority":
            return decided(votes, num_votes, rule) is not None
        case "mean":
            return len(votes) == num_votes
        case "unanimous":
            points = [vote.points for vote in votes]
            return any(other != points[0] or other is None for other in points)
        case _:
            assert_never(rule)


def _by_criterion(points: Sequence[Mapping[str, int]], rule: _Count) -> Points | None:
    if not points:
        return None
    found: dict[str, float] = {}
    for name in points[0]:
        value = rule([one[name] for one in points])
        if value is None:
            return None
        found[name] = value
    return found


def _most(values: Sequence[int], num_votes: int) -> float | None:
    value, count = Counter(values).most_common(1)[0]
    return float(value) if 2 * count > num_votes else None


def _all_alike(values: Sequence[int], num_votes: int) -> float | None:
    return float(values[0]) if len(values) == num_votes and len(set(values)) == 1 else None
