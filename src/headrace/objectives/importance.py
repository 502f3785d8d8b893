"""Importance correction: what a token counts that another distribution than the learner's sampled.

mu: log-probs the generator sampled under, p: the learner's own before the update, d = p - mu, in
nats. In expectation over mu, e^d makes a sum over sampled tokens one over p: it makes up for a
generator whose weights are older, or whose arithmetic is coarser, than the learner's.

Owns: weights are constants to the gradient, and a cell outside the mask has weight 0 and is not
altered, whatever it held. A d that is not a number gives a weight that is not one either: a fault
is never covered up by a bound. Does not touch denominators: those count tokens, not weights. What
takes whole rollouts out is in `rejection`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from headrace.objectives.segments import Segments

WeightLevel: TypeAlias = Literal["token", "sequence", "geometric"]
WeightMode: TypeAlias = Literal["truncate", "clip", "mask"]

LOG_WEIGHT_LIMIT = 20.0
"""Log-weights are clamped to this distance from 0, so that a weight and its square stay finite in
fp32; no weight exceeds e^20 = 4.9e8, whatever its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeights:
    """What each token counts, [N] each."""

    weights: Tensor
    """0 outside the mask."""
    altered: Tensor
    """bool: where a bound took over."""
    kept: Tensor
    """bool: False where mode ``mask`` took the token out; True for every other trained token."""


def log_weights_at(level: WeightLevel, gaps: Tensor, segments: Segments) -> Tensor:
    """Return the log-weight of each token [N], within `LOG_WEIGHT_LIMIT`; ``gaps`` is d [N].

    ``token``: d itself; ``sequence``: its sum over the rollout; ``geometric``: its mean.
    """
    match level:
        case "token":
            found = torch.where(segments.loss_mask, gaps, gaps.new_zeros(()))
        case "sequence":
            found = segments.spread(segments.sum(gaps))
        case "geometric":
            found = segments.spread(segments.mean(gaps))
        case _:
            assert_never(level)
    return found.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)


@torch.no_grad()
def importance_weights(
    gaps: Tensor,
    *,
    segments: Segments,
    level: WeightLevel,
    mode: WeightMode,
    low: float,
    high: float,
) -> ImportanceWeights:
    """Return bounded weights x = e^(d at ``level``) for ``gaps`` d = p - mu [N].

    ``truncate``: min(x, high), whatever ``low`` (truncated importance sampling, Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", with high 2; after
    IMPALA, arXiv:1802.01561, section 4.1). ``clip``: x within [low, high]. ``mask``: x, and 0
    outside [low, high] (IcePop, Ring-1T, arXiv:2510.18855: level token, 0.5 to 5). A bound trades
    variance for bias.
    """
    mask = segments.loss_mask
    weights = log_weights_at(level, gaps, segments).exp()
    above, below = weights > high, weights < low
    kept = mask
    match mode:
        case "truncate":
            below = torch.zeros_like(below)
            weights = weights.clamp(max=high)
        case "clip":
            weights = weights.clamp(low, high)
        case "mask":
            kept = mask & ~(above | below)
        case _:
            assert_never(mode)
    return ImportanceWeights(
        weights=torch.where(kept, weights, 0.0), altered=mask & (above | below), kept=kept
    )


def effective_sample_share(total: float, total_of_squares: float, count: float) -> float:
    """Return (sum w)^2 / (count * sum w^2): 1 when all weights are equal, 1 / count at the worst.

    Kish's effective sample size over the number of weights. Takes sums, which add up over
    micro-batches; ``count`` > 0. Weights that are all 0 are worth nothing: 0.
    """
    return total * total / (count * total_of_squares) if total_of_squares else 0.0
