"""Estimates of KL(policy || reference) from one sampled token each, in nats.

q: log-probs of the policy that sampled, ref: log-probs of the reference; both [N]. Which one to
use where (Schulman, "Approximating KL divergence"; gradients in expectation over q):

    k1 = q - ref                     unbiased value; gradient 0, so for the reward, never the loss
    k2 = (q - ref)^2 / 2             biased value; the gradient of KL(q || ref)
    k3 = e^(ref - q) - 1 - (ref - q) unbiased value, never negative; the gradient of KL(ref || q)

Owns: a cell outside ``loss_mask`` is 0 and has no gradient, whatever it held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.objectives.losses import masked_log_ratio


def k1(logprobs: Tensor, reference_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return q - ref, [N]."""
    return masked_log_ratio(logprobs, reference_logprobs, loss_mask=loss_mask)


def k2(logprobs: Tensor, reference_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return (q - ref)^2 / 2, [N]."""
    return masked_log_ratio(logprobs, reference_logprobs, loss_mask=loss_mask).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return e^(ref - q) - 1 - (ref - q), [N]."""
    log_ratio = masked_log_ratio(logprobs, reference_logprobs, loss_mask=loss_mask)
    # expm1 keeps the digits of a KL near 0, where e^x - 1 would cancel.
    return torch.expm1(-log_ratio) + log_ratio
