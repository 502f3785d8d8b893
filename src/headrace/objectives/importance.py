"""Importance correction: what a token counts that another distribution than the learner's sampled.

mu: log-probs the generator sampled under, p: the learner's own before the update; both [N], in
nats. In expectation over mu, e^(p - mu) makes a sum over sampled tokens one over p: it makes up
for a generator whose weights are older, or whose arithmetic is coarser, than the learner's.

Owns: weights are constants to the gradient, and a cell outside ``loss_mask`` has weight 0 and is
not truncated, whatever it held. Does not touch denominators: those count tokens, not weights.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from headrace.objectives.losses import masked_log_ratio

Correction: TypeAlias = Literal["none", "tis"]

LOG_WEIGHT_LIMIT = 20.0
"""Log-weights are clamped to this distance from 0, so that a weight and its square stay finite in
fp32; no weight exceeds e^20 = 4.9e8, whatever its bound."""


def tis(
    proximal_logprobs: Tensor, generator_logprobs: Tensor, *, loss_mask: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    """Return min(e^(p - mu), bound) and where the bound took over; [N] each.

    Truncated importance sampling, token by token: Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", with bound 2; the truncation is that of IMPALA
    (arXiv:1802.01561, section 4.1). ``bound`` > 0 bounds the variance at the price of a bias: a
    token that the learner finds more than ``bound`` times as likely counts too little. A log-prob
    that is not a number gives a weight that is not one either.
    """
    log_weights = masked_log_ratio(
        proximal_logprobs.detach(), generator_logprobs, loss_mask=loss_mask
    )
    weights = log_weights.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    truncated = loss_mask & (weights > bound)
    return torch.where(loss_mask, weights.clamp(max=bound), 0.0), truncated


def effective_sample_share(total: float, total_of_squares: float, count: float) -> float:
    """Return (sum w)^2 / (count * sum w^2): 1 when all weights are equal, 1 / count at the worst.

    Kish's effective sample size over the number of weights. Takes sums, which add up over
    micro-batches; ``count`` > 0, and some weight above 0.
    """
    return total * total / (count * total_of_squares)
