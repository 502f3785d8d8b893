"""The loss of one micro-batch, and the sums its metrics are made of.

loss = -sum_t weight_t * (importance_t * objective_t - kl_coefficient * kl_t
                          + entropy_coefficient * entropy_t)

over the tokens that are not rejected. The weights hold the global denominator, so the gradients of
all micro-batches simply add up. The importance of a token is a constant, 1 without a correction,
and no part of the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, assert_never

import torch
from torch import Tensor

from headrace.config import (
    CispoLoss,
    DppoTvLoss,
    GmpoLoss,
    GspoLoss,
    LossConfig,
    ObjectiveConfig,
    PpoClipLoss,
    ReinforceLoss,
    SapoLoss,
)
from headrace.learners.correction import Correction, correct
from headrace.learners.foreign_pass import foreign_logprobs, trained_hidden
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Microbatch
from headrace.learners.shared_prefix import SharedPrefix
from headrace.learners.value_head import ValueHead
from headrace.models.foreign import ForeignDecoder, Policy
from headrace.objectives.aggregation import without_rejected
from headrace.objectives.kl import k2, k3
from headrace.objectives.logprobs import Support, linear_logprobs
from headrace.objectives.losses import (
    cispo,
    dppo_tv,
    masked_log_ratio,
    ppo_clip,
    reinforce,
    sapo,
)
from headrace.objectives.mismatch import mismatch_sums
from headrace.objectives.proximal import loglinear_proximal
from headrace.objectives.segments import Segments
from headrace.objectives.sequence_losses import gmpo, gspo

LOGIT_CHUNK = 512
"""Tokens whose logits are computed together, one tile of the vocabulary at a time."""


class LinearLogprobs(Protocol):
    """`linear_logprobs`, or what computes the same."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        support: Support | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [N]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSetting:
    """What the loss depends on beside the batch."""

    objective: ObjectiveConfig
    max_tokens: int
    """Longest completion, for the aggregation ``constant``."""
    policy_version: int
    """Of the weights that the current log-probs are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What a forward pass says of the trained tokens, [M] each, in fp32 or wider."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    """Of the state before each token; None without a value head."""


def token_logprobs(
    decoder: Policy,
    batch: Microbatch,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs and entropies of `read_tokens`."""
    found = read_tokens(decoder, batch, temperature, dtype, entropy_gradient=entropy_gradient)
    return found.logprobs, found.entropy


def read_tokens(
    decoder: Policy,
    batch: Microbatch,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    *,
    entropy_gradient: bool = False,
    head: ValueHead | None = None,
    predict: LinearLogprobs = linear_logprobs,
) -> Readings:
    """Return what ``decoder`` and ``head`` say of the micro-batch's trained tokens.

    Over the tokens that filters left where the generator recorded them. Logits are computed for
    predicting positions only, a chunk at a time, by products in ``dtype``. What a group's prompt
    has in common, its last value included, is computed once, unless transformers computes.
    ``predict`` is the output layer of a decoder.
    """
    if isinstance(decoder, ForeignDecoder):
        hidden = trained_hidden(decoder, batch)
        logprobs, entropy = foreign_logprobs(
            decoder, hidden, batch, temperature, dtype, entropy_gradient=entropy_gradient
        )
        values = None if head is None else head(hidden)
        return Readings(logprobs=logprobs, entropy=entropy, values=values)
    attention = SharedPrefix(batch, decoder.config.windows)
    hidden = decoder(batch.input_ids, batch.positions, attention)
    logprobs, entropy = predict(
        hidden.index_select(0, batch.source_rows).to(dtype),
        decoder.output_weight,
        batch.target_ids,
        temperature=temperature,
        chunk_tokens=LOGIT_CHUNK,
        support=batch.support,
        entropy_gradient=entropy_gradient,
    )
    values = None if head is None else head(hidden).index_select(0, batch.source_rows)
    return Readings(logprobs=logprobs, entropy=entropy, values=values)


def microbatch_loss(
    batch: Microbatch,
    logprobs: Tensor,
    entropy: Tensor,
    setting: LossSetting,
    reference_logprobs: Tensor | None,
    value_terms: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """Return the differentiable loss and its sums for current ``logprobs`` q [M].

    ``reference_logprobs`` [M] are those of the KL term, None where the loss has none;
    ``value_terms`` [M] what a critic adds for each token.
    """
    objective = setting.objective
    proximal = _proximal(batch, logprobs, setting)
    correction = correct(batch, proximal, logprobs.detach(), objective.correction)
    segments = batch.segments.restricted(correction.kept)
    weights, rejected_share = _denominators(batch, correction, setting)
    surrogate, clipped = token_objective(objective.loss, batch, logprobs, proximal, segments)
    pull = _pull(objective, logprobs, entropy, reference_logprobs, correction.kept)
    if value_terms is not None:
        pull = pull + torch.where(correction.kept, value_terms, 0.0)
    loss = (weights * (pull - correction.weights * surrogate)).sum()

    own = proximal if objective.proximal == "recompute" else logprobs
    sums = correction_sums(batch, own, correction, batch.segments)
    sums.count(loss=loss, rejected_share=rejected_share, clipped=clipped.sum())
    sums.add(_token_sums(logprobs, proximal, reference_logprobs, entropy, correction.kept))
    return loss, sums


def _pull(
    objective: ObjectiveConfig,
    logprobs: Tensor,
    entropy: Tensor,
    reference_logprobs: Tensor | None,
    kept: Tensor,
) -> Tensor:
    """Return [M] what a token adds to the loss whatever its advantage: KL and entropy."""
    found = torch.zeros_like(logprobs)
    if reference_logprobs is not None:
        estimator = k2 if objective.kl_estimator == "k2" else k3
        kl = estimator(logprobs, reference_logprobs, loss_mask=kept)
        found = found + objective.kl_coefficient * kl
    if objective.entropy_coefficient > 0:
        found = found - objective.entropy_coefficient * torch.where(kept, entropy, 0.0)
    return found


@torch.no_grad()
def _token_sums(
    logprobs: Tensor,
    proximal: Tensor,
    reference_logprobs: Tensor | None,
    entropy: Tensor,
    kept: Tensor,
) -> LossSums:
    """Return the sums over the tokens that were not rejected."""
    ratio = masked_log_ratio(logprobs, proximal, loss_mask=kept).exp()
    ratio = torch.where(kept, ratio, 0.0)
    sums = LossSums()
    sums.count(entropy=torch.where(kept, entropy, 0.0).sum(), ratio=ratio.sum())
    sums.peak(ratio=ratio)
    if reference_logprobs is not None:
        # Always k3, whatever the loss has: it estimates the KL without a bias.
        sums.count(reference_kl=k3(logprobs, reference_logprobs, loss_mask=kept).sum())
    return sums


@torch.no_grad()
def correction_sums(
    batch: Microbatch, own: Tensor, correction: Correction, segments: Segments
) -> LossSums:
    """Return what is counted of every token of ``segments``, rejected or not.

    ``own``: the learner's log-probs [M].
    """
    mask = segments.loss_mask
    gaps = torch.where(mask, own.detach() - batch.generator_logprobs, 0.0)
    left = segments.restricted(correction.kept)
    sums = LossSums()
    sums.count(
        tokens=left.loss_mask.sum(),
        rejected_rollouts=(segments.lengths > 0).sum() - (left.lengths > 0).sum(),
        importance=correction.weights.sum(),
        squared_importance=correction.weights.square().sum(),
        altered=(correction.altered & mask).sum(),
        **{f"mismatch/{name}": value for name, value in mismatch_sums(gaps, segments).items()},
    )
    sums.peak(gap=gaps.abs(), importance=correction.weights)
    return sums


def token_objective(
    loss: LossConfig, batch: Microbatch, logprobs: Tensor, proximal: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Return the objective of each token [M] and where a bound took over [M]."""
    advantages, mask = batch.advantages, segments.loss_mask
    log_ratio = masked_log_ratio(logprobs, proximal, loss_mask=mask)
    match loss:
        case PpoClipLoss():
            return ppo_clip(
                log_ratio,
                advantages,
                loss_mask=mask,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                dual_clip=loss.dual_clip,
            )
        case ReinforceLoss():
            return reinforce(logprobs, advantages, loss_mask=mask)
        case CispoLoss(min_ratio=low, max_ratio=high):
            return cispo(
                logprobs, log_ratio, advantages, loss_mask=mask, min_ratio=low, max_ratio=high
            )
        case GspoLoss() | GmpoLoss():
            return _sequence_objective(loss, log_ratio, advantages, segments)
        case SapoLoss(tau_positive=positive, tau_negative=negative):
            return sapo(
                log_ratio,
                advantages,
                loss_mask=mask,
                tau_positive=positive,
                tau_negative=negative,
            )
        case DppoTvLoss(delta=delta, anchor=anchor):
            return dppo_tv(
                logprobs, proximal, advantages, loss_mask=mask, delta=delta, anchor=anchor
            )
        case _:
            assert_never(loss)


def _sequence_objective(
    loss: GspoLoss | GmpoLoss, log_ratio: Tensor, advantages: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    low, high = loss.clip_low, loss.clip_high
    if isinstance(loss, GmpoLoss):
        return gmpo(log_ratio, advantages, segments=segments, clip_low=low, clip_high=high)
    return gspo(
        log_ratio, advantages, segments=segments, clip_low=low, clip_high=high, level=loss.level
    )


def _proximal(batch: Microbatch, logprobs: Tensor, setting: LossSetting) -> Tensor:
    match setting.objective.proximal:
        case "generator":
            return batch.generator_logprobs
        case "recompute":
            # Before the first update of a step, the learner's own log-probs are the current ones.
            return logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        case "loglinear":
            return loglinear_proximal(
                logprobs.detach(),
                batch.generator_logprobs,
                versions=batch.versions(),
                policy_version=setting.policy_version,
            )


def _denominators(
    batch: Microbatch, correction: Correction, setting: LossSetting
) -> tuple[Tensor, Tensor]:
    """Return token weights [M] and the share of the denominator that was rejected."""
    objective = setting.objective
    if objective.correction.count_rejected:
        return batch.weights, batch.weights.new_zeros(())
    return without_rejected(
        batch.weights,
        segments=batch.segments,
        kept=correction.kept,
        aggregation=objective.aggregation,
        max_tokens=setting.max_tokens,
    )
