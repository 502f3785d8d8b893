"""How far generator and learner disagree about the same tokens: sums, then figures.

d = p - mu in nats, sampled under mu. Owns: everything is a sum over tokens or rollouts until
`figures` divides once, so figures are the same for every split. Log-weights are clamped to
`LOG_WEIGHT_LIMIT` before they are exponentiated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.objectives.importance import LOG_WEIGHT_LIMIT, effective_sample_share
from headrace.objectives.segments import Segments

_MAX_EXPONENT = 700.0
"""The largest whole number that `math.exp` takes without an error is a little above."""


@torch.no_grad()
def mismatch_sums(gaps: Tensor, segments: Segments) -> dict[str, Tensor]:
    """Return sums over trained tokens and over rollouts that have any; ``gaps``: d [N]."""
    gaps = torch.where(segments.loss_mask, gaps, gaps.new_zeros(()))
    bounded = gaps.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    totals = segments.sum(gaps).clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    # A cell outside the mask has d = 0 and a weight of 1 that must not count.
    weights = torch.where(segments.loss_mask, bounded.exp(), 0.0)
    return {
        "tokens": segments.loss_mask.sum(),
        "rollouts": (segments.lengths > 0).sum(),
        "k1": -gaps.sum(),
        "k3": (torch.expm1(bounded) - bounded).sum(),
        "weights": weights.sum(),
        "squared_weights": weights.square().sum(),
        "rollout_chi2": torch.expm1(2 * totals).sum(),
        "rollout_mean_k1": -segments.mean(gaps).sum(),
    }


def figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of summed `mismatch_sums`; some token and rollout is counted.

    ``k1``, ``k3``: estimates of KL(mu || p) a token; ``chi2_token``, ``chi2_rollout``: E[w^2] - 1
    of the weights w = e^d of tokens and of whole rollouts; ``ess``: the effective share of the
    tokens under these weights; ``perplexity_ratio``: perplexity of the tokens under the learner
    over that under the generator, geometric mean over rollouts.
    """
    tokens, rollouts = sums["tokens"], sums["rollouts"]
    return {
        "k1": sums["k1"] / tokens,
        "k3": sums["k3"] / tokens,
        "chi2_token": sums["squared_weights"] / tokens - 1.0,
        "chi2_rollout": sums["rollout_chi2"] / rollouts,
        "ess": effective_sample_share(sums["weights"], sums["squared_weights"], tokens),
        "perplexity_ratio": math.exp(min(sums["rollout_mean_k1"] / rollouts, _MAX_EXPONENT)),
    }
