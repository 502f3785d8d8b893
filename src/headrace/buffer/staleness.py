"""How stale the tokens of a batch are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.types import RolloutGroup


def tokens_by_staleness(groups: Sequence[RolloutGroup], policy_version: int) -> Counter[int]:
    """Return staleness -> number of sampled tokens, for the first update of a step."""
    found: Counter[int] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            for span in rollout.version_spans:
                found[policy_version - span.policy_version] += span.end - span.start
    return found


def staleness_metrics(groups: Sequence[RolloutGroup], policy_version: int) -> Mapping[str, float]:
    """Return the mean and the histogram, with an entry for each staleness that occurs."""
    tokens = tokens_by_staleness(groups, policy_version)
    total = tokens.total()
    if total == 0:
        return {}
    mean = sum(staleness * count for staleness, count in tokens.items()) / total
    histogram = {
        f"learner/staleness/num_tokens_{staleness}": float(count)
        for staleness, count in sorted(tokens.items())
    }
    return {"learner/staleness/mean": mean} | histogram
