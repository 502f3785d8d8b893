"""Token objectives: what one token adds to the quantity that training maximises.

Every function takes flat packed tensors [N] and returns (objective [N], clipped [N]). Owns: a
cell outside ``loss_mask`` may hold anything, NaN and -1e9 included, and changes neither value nor
gradient; such cells are selected away with `torch.where` before any arithmetic, for 0 * NaN is
NaN. Does not average: `aggregation` does, with the batch's one denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_log_ratio(logprobs: Tensor, proximal_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return q - p [N], differentiable in ``logprobs``, and 0 outside ``loss_mask``."""
    zero = logprobs.new_zeros(())
    return torch.where(loss_mask, logprobs, zero) - torch.where(
        loss_mask, proximal_logprobs.detach(), zero
    )


def ppo_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    loss_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) and where the clip took over.

    r = exp(log_ratio). Schulman et al. 2017 (arXiv:1707.06347), equation 7, with the asymmetric
    bounds of DAPO. ``log_ratio``, ``advantages``: [N]; ``loss_mask``: [N] bool. A clipped token
    has no gradient, and neither has one of advantage 0. Both hold for a ratio that overflows too,
    which is why this selects instead of calling `torch.minimum`: that one's gradient would be
    0 * inf.
    """
    advantages = torch.where(loss_mask, advantages.detach(), 0.0)
    ratio = torch.where(loss_mask, log_ratio.detach(), 0.0).exp()
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    clipped = too_high | too_low
    is_live = (advantages != 0) & ~clipped
    high, low = advantages.new_tensor(1 + clip_high), advantages.new_tensor(1 - clip_low)
    bound = torch.where(advantages > 0, high, low)
    live = torch.where(is_live, log_ratio, 0.0).exp() * advantages
    return torch.where(clipped, bound * advantages, live), clipped
