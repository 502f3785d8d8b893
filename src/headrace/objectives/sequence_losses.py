"""Objectives of whole sequences, told token by token: each token has what its sequence has.

A rollout's tokens share one ratio, made of q - p over all its trained tokens. Returned is
(objective [N], clipped [N]) as by `losses`: with the aggregation ``sequence`` the loss is the mean
over rollouts of their objective, as in the papers. A is taken from each token; the group estimators
give all tokens of a rollout the same. Owns: a cell outside the mask changes nothing.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from headrace.objectives.losses import masked_advantages, ppo_clip
from headrace.objectives.segments import Segments

GspoLevel: TypeAlias = Literal["sequence", "token"]


def gspo(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    segments: Segments,
    clip_low: float,
    clip_high: float,
    level: GspoLevel,
) -> tuple[Tensor, Tensor]:
    """Return min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) and where the clip took over.

    s = exp(mean of q - p over the rollout). GSPO (arXiv:2507.18071): level ``sequence`` is equation
    5, level ``token`` equation 13, whose ratio is s_t = sg(s) exp(q - sg(q)): the same value, and a
    gradient that gives each token its own advantage. Where all tokens of a rollout have the same
    advantage and weight both have the same gradient.
    """
    mask = segments.loss_mask
    ratio = segments.spread(segments.mean(log_ratio))
    match level:
        case "sequence":
            pass
        case "token":
            ratio = ratio.detach() + torch.where(mask, log_ratio - log_ratio.detach(), 0.0)
        case _:
            assert_never(level)
    return ppo_clip(ratio, advantages, loss_mask=mask, clip_low=clip_low, clip_high=clip_high)


def gmpo(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    segments: Segments,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Return A times the geometric mean of a rollout's clipped token ratios, and the clipped ones.

    Geometric-Mean Policy Optimization (arXiv:2507.20673), in log space: q - p is
    clipped at ``clip_high`` where A > 0 and at ``-clip_low`` where A < 0, then averaged. The bounds
    are on the log-ratio: 0.4 stands for (e^-0.4, e^0.4). A clipped token has no gradient of its
    own and still counts in the mean.
    """
    mask = segments.loss_mask
    advantages = masked_advantages(advantages, mask)
    log_ratio = torch.where(mask, log_ratio, 0.0)
    too_high = (advantages > 0) & (log_ratio.detach() > clip_high)
    too_low = (advantages < 0) & (log_ratio.detach() < -clip_low)
    bounded = torch.where(too_high, clip_high, torch.where(too_low, -clip_low, log_ratio))
    mean = segments.spread(segments.mean(bounded))
    is_live = advantages != 0
    return torch.where(is_live, mean, 0.0).exp() * advantages, too_high | too_low
