"""How stale the tokens of a batch are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.types import RolloutGroup


def tokens_by_version(groups: Sequence[RolloutGroup]) -> Counter[int]:
    """Return policy version -> number of tokens it sampled."""
    found: Counter[int] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            for span in rollout.version_spans:
                found[span.policy_version] += span.end - span.start
    return found


def staleness_metrics(
    groups: Sequence[RolloutGroup], policy_version: int, num_updates: int
) -> Mapping[str, float]:
    """Return maximum, mean and histogram of the staleness of a batch's tokens.

    ``policy_version`` is that of the first of ``num_updates`` updates: mean and histogram, with an
    entry for each staleness that occurs, are of that one, the maximum is of the last.
    """
    tokens = tokens_by_version(groups)
    oldest = max((policy_version - version for version in tokens), default=0)
    maximum = {"learner/staleness/max": float(oldest + max(num_updates - 1, 0))}
    total = tokens.total()
    if total == 0:
        return maximum
    histogram = {
        f"learner/staleness/num_tokens_{policy_version - version}": float(count)
        for version, count in sorted(tokens.items(), reverse=True)
    }
    weighed = sum((policy_version - version) * count for version, count in tokens.items())
    return maximum | {"learner/staleness/mean": weighed / total} | histogram
