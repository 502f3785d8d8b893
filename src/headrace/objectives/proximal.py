"""The proximal policy where no forward pass computed it."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def loglinear_proximal(
    logprobs: Tensor, generator_logprobs: Tensor, *, versions: Tensor, policy_version: int
) -> Tensor:
    """Return p = mu + a (q - mu) [N], a constant: the policy one update before the current one.

    AReaL's approximation: log-probs change in a line with the version, so of a token that version
    v_tok sampled and version v_now computes q of, a = clip((v_now - 1 - v_tok) / (v_now - v_tok),
    0, 1), and 0 where v_tok is v_now. ``versions``: [N] int64, v_tok; ``policy_version``: v_now.
    """
    age = policy_version - versions
    share = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0).to(logprobs.dtype)
    # Selected, so that where p is mu a q that is no number is no matter.
    moved = generator_logprobs + share * (logprobs - generator_logprobs)
    return torch.where(share > 0, moved, generator_logprobs)
