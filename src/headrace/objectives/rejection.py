"""Rejection: which rollouts or tokens are too far from the policy that sampled them to learn from.

d = p - mu in nats. Every function returns what is kept, as bool. Owns: what is not a number is
never a reason to reject, so that a fault shows in the loss; cells outside the mask decide nothing.
Does not say what a rejected token counts in the denominator: `aggregation` does.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from headrace.objectives.importance import LOG_WEIGHT_LIMIT
from headrace.objectives.segments import Segments

Divergence: TypeAlias = Literal["k1", "k2", "k3"]
Reduction: TypeAlias = Literal["sum", "mean", "max"]


@torch.no_grad()
def within_divergence(
    gaps: Tensor,
    *,
    segments: Segments,
    divergence: Divergence,
    reduction: Reduction,
    low: float,
    high: float,
) -> Tensor:
    """Return [R]: whether a rollout's divergence from its generator is within bounds.

    For ``k1`` the bounds are on the ratio: kept if low <= e^(sum d) <= high, or e^(mean d), or for
    ``max`` if that holds for e^d of every token. ``k2`` = d^2 / 2 and ``k3`` = e^d - 1 - d are
    never negative: kept if their sum, mean or maximum is at most ``high``; ``low`` says nothing.
    ``gaps``: d [N]. Log-ratios are clamped to `LOG_WEIGHT_LIMIT` before they are exponentiated.
    """
    mask = segments.loss_mask
    gaps = torch.where(mask, gaps, gaps.new_zeros(()))
    match divergence:
        case "k1":
            return _ratio_within(gaps, segments, reduction, low, high)
        case "k2":
            values = gaps.square() / 2
        case "k3":
            values = torch.expm1(gaps.clamp(max=LOG_WEIGHT_LIMIT)) - gaps
        case _:
            assert_never(divergence)
    match reduction:
        case "sum":
            return ~(segments.sum(values) > high)
        case "mean":
            return ~(segments.mean(values) > high)
        case "max":
            return ~segments.any(values > high)
        case _:
            assert_never(reduction)


def _ratio_within(
    gaps: Tensor, segments: Segments, reduction: Reduction, low: float, high: float
) -> Tensor:
    if reduction != "max":
        gaps = segments.sum(gaps) if reduction == "sum" else segments.mean(gaps)
    ratio = gaps.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    outside = (ratio > high) | (ratio < low)
    return ~(segments.any(outside) if reduction == "max" else outside)


@torch.no_grad()
def without_veto(gaps: Tensor, *, segments: Segments, threshold: float) -> Tensor:
    """Return [R]: False for a rollout with a token whose e^d is below ``threshold``.

    One token that the learner holds to be next to impossible says that the whole rollout came from
    another policy.
    """
    log_threshold = torch.tensor(threshold, dtype=torch.float64).log().to(gaps)
    return ~segments.any(gaps < log_threshold)


@torch.no_grad()
def on_policy_enough(
    logprobs: Tensor,
    generator_logprobs: Tensor,
    advantages: Tensor,
    *,
    segments: Segments,
    threshold: float,
) -> Tensor:
    """Return [R]: False where A < 0 and mean(mu - q) > ``threshold``.

    DeepSeek-V3.2 (arXiv:2512.02556, equation 9): a bad rollout that the policy has moved away from
    already teaches nothing and destabilises. All of a rollout's advantages have one sign here.
    """
    moved = segments.mean(generator_logprobs - logprobs)
    return ~((segments.mean(advantages) < 0) & (moved > threshold))


@torch.no_grad()
def second_moment_limit(gaps: Tensor, *, threshold: float) -> float:
    """Return the largest (mu - p)^2 that may stay so that the mean of what stays is in bounds.

    M2PO (arXiv:2510.01161): tokens with the largest (mu - p)^2 are masked until the
    mean of the rest is at most ``threshold``. ``gaps``: [K] of every token that shares a
    gradient, for the choice is made over all of them. Equal squares stay or go together, so the
    order of the tokens decides nothing. 0 at least: a token whose log-probs agree always stays.
    """
    squares = gaps.square().to(torch.float64).sort().values
    if not len(squares):
        return 0.0
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    # The mean of ever larger values only grows, so what is within is a prefix.
    within = squares.cumsum(0) <= threshold * counts
    is_last_of_equals = torch.ones_like(within)
    is_last_of_equals[:-1] = squares[1:] > squares[:-1]
    chosen = squares[within & is_last_of_equals]
    return float(chosen[-1]) if len(chosen) else 0.0
