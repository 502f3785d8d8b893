"""Advantages of rollouts from their rewards, in float64.

Owns: a rollout that was not scored has no influence on any other; rewards without spread give
advantages of exactly 0. Groups arrive as lists of their own, so grouping by position cannot happen
here, and every rollout has one vote however long it is, except in ``opo``'s baseline. Does not read
rollouts: a row with nothing to train on must come in as None, or its reward would shift the
baseline of its siblings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never

GroupEstimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "rloo_std", "opo"]
BatchEstimator: TypeAlias = Literal["reinforce_pp", "reinforce_pp_baseline"]
AdvantageEstimator: TypeAlias = GroupEstimator | BatchEstimator

Rewards: TypeAlias = Sequence[float | None]
"""Of the rollouts of one group; None: not scored."""

SPREAD_FLOOR = 1e-6
"""Rewards closer together than this are equal: equal floats can have a std above 0 (eight times
0.1 in float64: 1.4e-17), and dividing by such a residue makes advantages out of rounding."""


def has_spread(rewards: Rewards, *, spread_floor: float = SPREAD_FLOOR) -> bool:
    """Return whether the scored rewards of a group differ by more than ``spread_floor``."""
    scored = _scored(rewards)
    return len(scored) > 1 and max(scored) - min(scored) > spread_floor


def advantages(
    groups: Sequence[Rewards],
    lengths: Sequence[Sequence[int]],
    *,
    estimator: AdvantageEstimator,
    spread_floor: float = SPREAD_FLOOR,
) -> list[list[float | None]]:
    """Return the advantage of each rollout of each group of a batch, None where not scored.

    ``lengths`` are the trained tokens of each rollout. A group estimator looks at one group at a
    time. REINFORCE++ (arXiv:2501.03262) normalises over the rollouts of the whole batch:
    ``reinforce_pp`` by mean and std of the rewards, ``reinforce_pp_baseline`` by the
    std of R - mean of the group, whose mean over the batch is 0 already. The std is
    that of a sample (n - 1).
    """
    match estimator:
        case "reinforce_pp":
            flat = [reward for rewards in groups for reward in rewards]
            found = iter(group_advantages(flat, estimator="grpo", spread_floor=spread_floor))
            return [[next(found) for _ in rewards] for rewards in groups]
        case "reinforce_pp_baseline":
            return _over_batch_deviation(
                [
                    group_advantages(rewards, estimator="dr_grpo", spread_floor=spread_floor)
                    for rewards in groups
                ]
            )
        case _:
            return [
                group_advantages(
                    rewards, estimator=estimator, lengths=counts, spread_floor=spread_floor
                )
                for rewards, counts in zip(groups, lengths, strict=True)
            ]


def group_advantages(
    rewards: Rewards,
    *,
    estimator: GroupEstimator,
    lengths: Sequence[int] | None = None,
    spread_floor: float = SPREAD_FLOOR,
) -> list[float | None]:
    """Return the advantage of each rollout of one group, None where it was not scored.

    A reward of None (or one that is not finite) is left out of mean, std and count. All
    advantages of a group without spread are exactly 0.0; a lone scored rollout is such a group.

    ``grpo``: (R - mean) / std (arXiv:2402.03300, section 4.1); the std is that of a sample (n - 1),
    as in TRL and torch.std, where the paper says only "std". ``dr_grpo``: R - mean
    (arXiv:2503.20783). ``rloo``: R - mean of the others (arXiv:2402.14740).
    ``rloo_std``: that over the std of the whole group; the std of the others alone can be 0 where
    the group has a spread. ``opo``: R - sum(length R) / sum(length) (arXiv:2505.23585),
    for which ``lengths`` are the trained tokens of each rollout; None: all alike.

    So |A| <= (n - 1) / sqrt(n) for ``grpo``, sqrt(n) for ``rloo_std``, and max - min of the
    rewards for the others: never more than n where rewards lie in [0, 1].
    """
    scored = _scored(rewards)
    if not has_spread(rewards, spread_floor=spread_floor):
        return [0.0 if _is_scored(reward) else None for reward in rewards]
    # Counting from the smallest reward keeps the digits of a small spread on a large offset.
    origin = min(scored)
    weights = _baseline_weights(rewards, estimator, lengths)
    baseline = math.fsum(w * (r - origin) for w, r in zip(weights, scored, strict=True))
    scale = _scale([reward - origin for reward in scored], estimator)
    return [
        (reward - origin - baseline) * scale if reward is not None and _is_scored(reward) else None
        for reward in rewards
    ]


def _baseline_weights(
    rewards: Rewards, estimator: GroupEstimator, lengths: Sequence[int] | None
) -> list[float]:
    """Return what each scored reward counts in the baseline; they add up to 1."""
    if estimator == "opo" and lengths is not None:
        counts = [c for c, reward in zip(lengths, rewards, strict=True) if _is_scored(reward)]
    else:
        counts = [1] * len(_scored(rewards))
    total = sum(counts)
    return [count / total for count in counts]


def _scale(values: Sequence[float], estimator: GroupEstimator) -> float:
    """Return the factor from R - baseline to the advantage."""
    count = len(values)
    # R_i - mean of the others = n / (n - 1) * (R_i - mean of all).
    leave_one_out = count / (count - 1)
    match estimator:
        case "grpo":
            return 1.0 / _deviation(values)
        case "dr_grpo" | "opo":
            return 1.0
        case "rloo":
            return leave_one_out
        case "rloo_std":
            return leave_one_out / _deviation(values)
        case _:
            assert_never(estimator)


def _over_batch_deviation(groups: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Return centred values over their std in the batch; what is 0 stays exactly 0."""
    values = [value for group in groups for value in group if value is not None]
    scale = 1.0 / _deviation(values) if any(values) else 1.0
    return [[None if value is None else value * scale for value in group] for group in groups]


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample of at least 2 values that differ."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _is_scored(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def _scored(rewards: Rewards) -> list[float]:
    return [reward for reward in rewards if reward is not None and _is_scored(reward)]
