"""What each token of a micro-batch counts, and which are rejected, by `[objective.correction]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import CorrectionConfig
from headrace.learners.packing import Microbatch
from headrace.objectives.importance import ImportanceWeights, importance_weights
from headrace.objectives.rejection import (
    on_policy_enough,
    second_moment_limit,
    within_divergence,
    without_veto,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Constants to the gradient, [M] each."""

    weights: Tensor
    """What a token of the policy's term counts; 0 where it is rejected."""
    altered: Tensor
    """bool: where a bound on weights took over."""
    kept: Tensor
    """bool: tokens that are in the loss."""


def correct(
    batch: Microbatch, proximal: Tensor, logprobs: Tensor, config: CorrectionConfig
) -> Correction:
    """Judge every token under ``proximal`` p and current ``logprobs`` q, [M] each."""
    found, kept = judged_by_gap(batch, proximal, config)
    if config.off_policy_mask is not None:
        segments = batch.segments
        close = on_policy_enough(
            logprobs,
            batch.generator_logprobs,
            batch.advantages,
            segments=segments,
            threshold=config.off_policy_mask,
        )
        kept = kept & segments.spread(close)
    return Correction(
        weights=torch.where(kept, found.weights, 0.0), altered=found.altered, kept=kept
    )


def judged_by_gap(
    batch: Microbatch, proximal: Tensor, config: CorrectionConfig
) -> tuple[ImportanceWeights, Tensor]:
    """Return weights and the tokens that stay, as far as d = p - mu alone decides."""
    gaps, segments = (proximal - batch.generator_logprobs).detach(), batch.segments
    found = _weights(gaps, batch, config)
    kept = found.kept
    if config.rejection is not None:
        rule = config.rejection
        within = within_divergence(
            gaps,
            segments=segments,
            divergence=rule.divergence,
            reduction=rule.reduction,
            low=rule.low or 0.0,
            high=rule.high,
        )
        kept = kept & segments.spread(within)
    if config.veto is not None:
        kept = kept & segments.spread(without_veto(gaps, segments=segments, threshold=config.veto))
    if batch.moment_limit is not None:
        kept = kept & ~(gaps.square() > batch.moment_limit)
    return found, kept


def limit_moments(
    batches: Sequence[Microbatch],
    config: CorrectionConfig,
    gathered: Callable[[Tensor], Tensor] = lambda gaps: gaps,
) -> None:
    """Set the limit of M2PO, where it is on, over all tokens of a minibatch; p is known.

    ``gathered`` returns the gaps of all ranks from those of this one.
    """
    if config.m2po is None or not batches:
        return
    gaps = [
        batch.proximal_logprobs - batch.generator_logprobs
        for batch in batches
        if batch.proximal_logprobs is not None and not batch.is_idle
    ]
    own = torch.cat(gaps) if gaps else batches[0].generator_logprobs[:0]
    limit = second_moment_limit(gathered(own), threshold=config.m2po)
    for batch in batches:
        batch.moment_limit = limit


def _weights(gaps: Tensor, batch: Microbatch, config: CorrectionConfig) -> ImportanceWeights:
    segments, rule = batch.segments, config.weight
    if rule is None:
        mask = segments.loss_mask
        return ImportanceWeights(weights=torch.ones_like(gaps), altered=~mask, kept=mask)
    return importance_weights(
        gaps,
        segments=segments,
        level=rule.level,
        mode=rule.mode,
        low=rule.low or 0.0,
        high=rule.high,
    )
