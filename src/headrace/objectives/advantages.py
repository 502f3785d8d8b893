"""Advantages of one group of rollouts, in float64.

Owns: a rollout that was not scored has no influence on its siblings; a group without spread has
advantages of exactly 0. Groups arrive one by one, so grouping by position cannot happen here.
Does not read rollouts: a row with nothing to train on must come in as None, or its reward would
shift the baseline of its siblings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never

AdvantageEstimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo"]

SPREAD_FLOOR = 1e-6
"""Rewards closer together than this are equal: equal floats can have a std above 0 (eight times
0.1 in float64: 1.4e-17), and dividing by such a residue makes advantages out of rounding."""


def has_spread(rewards: Sequence[float | None], *, spread_floor: float = SPREAD_FLOOR) -> bool:
    """Return whether the scored rewards of a group differ by more than ``spread_floor``."""
    scored = _scored(rewards)
    return len(scored) > 1 and max(scored) - min(scored) > spread_floor


def group_advantages(
    rewards: Sequence[float | None],
    *,
    estimator: AdvantageEstimator,
    spread_floor: float = SPREAD_FLOOR,
) -> list[float | None]:
    """Return the advantage of each rollout of one group, None where it was not scored.

    A reward of None (or one that is not finite) is left out of mean, std and count. All
    advantages of a group without spread are exactly 0.0; a lone scored rollout is such a group.
    ``grpo`` divides by the sample standard deviation (n - 1), as TRL and torch.std do; the paper
    (arXiv:2402.03300, section 4.1) says only "std". So |A| <= (n - 1) / sqrt(n) < n for ``grpo``;
    for ``dr_grpo`` and ``rloo`` |A| <= max - min of the rewards.
    """
    if not has_spread(rewards, spread_floor=spread_floor):
        return [None if not _is_scored(reward) else 0.0 for reward in rewards]
    scored = _scored(rewards)
    # Counting from the smallest reward keeps the digits of a small spread on a large offset.
    origin = min(scored)
    mean = math.fsum(reward - origin for reward in scored) / len(scored)
    scale = _scale([reward - origin - mean for reward in scored], estimator)
    return [
        (reward - origin - mean) * scale if reward is not None and _is_scored(reward) else None
        for reward in rewards
    ]


def _scale(centred: Sequence[float], estimator: AdvantageEstimator) -> float:
    """Return the factor from R - mean to the advantage."""
    count = len(centred)
    match estimator:
        case "grpo":
            return 1.0 / math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
        case "dr_grpo":
            return 1.0
        case "rloo":
            # R_i - mean of the others = n / (n - 1) * (R_i - mean of all).
            return count / (count - 1)
        case _:
            assert_never(estimator)


def _is_scored(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def _scored(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None and _is_scored(reward)]
