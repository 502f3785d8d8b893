"""Token objectives: what one token adds to the quantity that training maximises.

q: current log-probs, p: proximal ones, mu: the generator's; A: advantages; r = e^(q - p). Every
function takes flat packed tensors [N] and returns (objective [N], clipped [N]). Owns: a cell
outside ``loss_mask`` may hold anything, NaN and -1e9 included, and changes neither value nor
gradient; such cells are selected away with `torch.where` before any arithmetic, for 0 * NaN is
NaN. Does not average: `aggregation` does, with the batch's one denominator. Objectives of whole
sequences are in `sequence_losses`.
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
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) and where the clip took over.

    r = exp(log_ratio). Schulman et al. 2017 (arXiv:1707.06347), equation 7, with the asymmetric
    bounds of DAPO (arXiv:2503.14476, equation 8). With ``dual_clip`` c > 1 it is at least c A where
    A < 0 (Ye et al. 2020, arXiv:1912.09729). ``log_ratio``, ``advantages``: [N];
    ``loss_mask``: [N] bool. A clipped token has no gradient, and neither has one of advantage 0.
    Both hold for a ratio that overflows too, which is why this selects instead of calling
    `torch.minimum`: that one's gradient would be 0 * inf.
    """
    advantages = masked_advantages(advantages, loss_mask)
    ratio = torch.where(loss_mask, log_ratio.detach(), 0.0).exp()
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    high, low = advantages.new_tensor(1 + clip_high), advantages.new_tensor(1 - clip_low)
    bound = torch.where(advantages > 0, high, low)
    clipped = too_high | too_low
    if dual_clip is not None:
        # Never both: the lower bound is below 1 and this one above.
        too_costly = (advantages < 0) & (ratio > dual_clip)
        bound = torch.where(too_costly, dual_clip, bound)
        clipped = clipped | too_costly
    is_live = (advantages != 0) & ~clipped
    live = torch.where(is_live, log_ratio, 0.0).exp() * advantages
    return torch.where(clipped, bound * advantages, live), clipped


def reinforce(logprobs: Tensor, advantages: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return q A, and that nothing is clipped.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms". No ratio takes
    part: what another policy sampled is made up for by an importance weight or not at all.
    """
    zero = logprobs.new_zeros(())
    advantages = masked_advantages(advantages, loss_mask)
    return torch.where(loss_mask, logprobs, zero) * advantages, torch.zeros_like(loss_mask)


def cispo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    loss_mask: Tensor,
    min_ratio: float,
    max_ratio: float,
) -> tuple[Tensor, Tensor]:
    """Return sg(clip(r, min_ratio, max_ratio)) A q and where the clip took over.

    MiniMax-M1 (arXiv:2506.13585): the ratio is a bounded constant, so a token
    beyond the bounds keeps its gradient. ``min_ratio`` 0 bounds it from above alone.
    """
    ratio = torch.where(loss_mask, log_ratio.detach(), 0.0).exp()
    objective, _ = reinforce(logprobs, advantages, loss_mask=loss_mask)
    clipped = loss_mask & ((ratio > max_ratio) | (ratio < min_ratio))
    return ratio.clamp(min_ratio, max_ratio) * objective, clipped


def sapo(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    loss_mask: Tensor,
    tau_positive: float,
    tau_negative: float,
) -> tuple[Tensor, Tensor]:
    """Return (4 / tau) sigmoid(tau (r - 1)) A, and that nothing is clipped.

    Soft Adaptive Policy Optimization (arXiv:2511.20347); tau is ``tau_positive``
    where A > 0 and ``tau_negative`` elsewhere. The gate's gradient is 1 at r = 1 and fades smoothly
    on both sides.
    """
    advantages = masked_advantages(advantages, loss_mask)
    # Beyond e^30 the gate is flat, and the gradient of an overflowing ratio would be 0 * inf.
    ratio = torch.where(loss_mask & (advantages != 0), log_ratio, 0.0).clamp(max=30.0).exp()
    high, low = advantages.new_tensor(tau_positive), advantages.new_tensor(tau_negative)
    tau = torch.where(advantages > 0, high, low)
    gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
    return gate * advantages, torch.zeros_like(loss_mask)


def dppo_tv(
    logprobs: Tensor,
    generator_logprobs: Tensor,
    advantages: Tensor,
    *,
    loss_mask: Tensor,
    delta: float,
    anchor: float,
) -> tuple[Tensor, Tensor]:
    """Return keep A e^(q - mu) - anchor (q - mu)^2 and where a token was not kept.

    A token is not kept where its probability moved by more than ``delta`` in the direction its
    advantage pushes: A > 0 and e^q - e^mu > delta, or A <= 0 and e^q - e^mu < -delta. That is the
    total-variation trust region of DPPO (arXiv:2602.04879) as prime-rl has it in its default loss,
    with the squared log-ratio beside it. The anchor acts on every token.
    """
    zero = logprobs.new_zeros(())
    advantages = masked_advantages(advantages, loss_mask)
    log_ratio = masked_log_ratio(logprobs, generator_logprobs, loss_mask=loss_mask)
    generator = torch.where(loss_mask, generator_logprobs.detach(), zero).exp()
    moved = torch.where(loss_mask, logprobs.detach(), zero).exp() - generator
    beyond = torch.where(advantages > 0, moved > delta, moved < -delta)
    is_live = (advantages != 0) & ~beyond
    surrogate = torch.where(is_live, log_ratio, zero).exp()
    surrogate = torch.where(is_live, surrogate * advantages, zero)
    return surrogate - anchor * log_ratio.square(), beyond & loss_mask


def masked_advantages(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return ``advantages`` [N] as constants, 0 outside the mask."""
    return torch.where(loss_mask, advantages.detach(), 0.0)
