"""The loss of one micro-batch, and the sums its metrics are made of.

loss = -sum_t weight_t * objective_t (+ kl_coefficient * weight_t * k3_t). The weights hold the
global denominator, so the gradients of all micro-batches simply add up (FORMULAS: aggregation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import ObjectiveConfig
from headrace.learners.packing import Microbatch
from headrace.learners.shared_prefix import SharedPrefix
from headrace.models.decoder import Decoder
from headrace.objectives.kl import k3
from headrace.objectives.logprobs import linear_logprobs
from headrace.objectives.losses import masked_log_ratio, ppo_clip

LOGIT_CHUNK = 512
"""Rows of logits alive at once: at a vocabulary of 49152 in fp32, 100 MB."""


@dataclass(slots=True)
class LossSums:
    """Sums over trained tokens; divided once, at the end of the step."""

    tokens: float = 0.0
    loss: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    clipped: float = 0.0
    mismatch_k1: float = 0.0
    mismatch_k3: float = 0.0
    reference_k3: float = 0.0
    max_ratio: float = 0.0

    def add(self, other: LossSums) -> None:
        """Add the sums of another micro-batch."""
        self.tokens += other.tokens
        self.loss += other.loss
        self.entropy += other.entropy
        self.ratio += other.ratio
        self.clipped += other.clipped
        self.mismatch_k1 += other.mismatch_k1
        self.mismatch_k3 += other.mismatch_k3
        self.reference_k3 += other.reference_k3
        self.max_ratio = max(self.max_ratio, other.max_ratio)


def token_logprobs(
    decoder: Decoder, batch: Microbatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [M] of the micro-batch's predicted tokens.

    Logits are computed for predicting positions only, a chunk at a time.
    """
    attention = SharedPrefix(batch, decoder.config.windows)
    hidden = decoder(batch.input_ids, batch.positions, attention)
    return linear_logprobs(
        hidden.index_select(0, batch.source_rows),
        decoder.output_weight,
        batch.target_ids,
        temperature=temperature,
        chunk_tokens=LOGIT_CHUNK,
    )


def microbatch_loss(
    batch: Microbatch,
    logprobs: Tensor,
    entropy: Tensor,
    objective: ObjectiveConfig,
    reference_logprobs: Tensor | None,
) -> tuple[Tensor, LossSums]:
    """Return the differentiable loss and its sums for current ``logprobs`` q [M]."""
    mask = batch.loss_mask
    log_ratio = masked_log_ratio(logprobs, _proximal(batch, logprobs, objective), loss_mask=mask)
    surrogate, clipped = ppo_clip(
        log_ratio,
        batch.advantages,
        loss_mask=mask,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
    )
    # where, not multiply: a masked cell may hold NaN and must leave no trace.
    weights = torch.where(mask, batch.weights, 0.0)
    loss = -(weights * surrogate).sum()
    reference_k3 = 0.0
    if reference_logprobs is not None:
        kl = k3(logprobs, reference_logprobs, loss_mask=mask)
        loss = loss + objective.kl_coefficient * (weights * kl).sum()
        reference_k3 = float(kl.detach().sum())
    with torch.no_grad():
        sums = _sums(batch, logprobs.detach(), log_ratio.detach(), entropy)
    sums.loss = float(loss.detach())
    sums.clipped = float((clipped & mask).sum())
    sums.reference_k3 = reference_k3
    return loss, sums


def _proximal(batch: Microbatch, logprobs: Tensor, objective: ObjectiveConfig) -> Tensor:
    match objective.proximal:
        case "generator":
            return batch.generator_logprobs
        case "recompute":
            # Before the first update of a step, the learner's own log-probs are the current ones.
            return logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs


def _sums(batch: Microbatch, logprobs: Tensor, log_ratio: Tensor, entropy: Tensor) -> LossSums:
    mask = batch.loss_mask
    ratio = log_ratio.exp()
    # d = q - mu: how far learner and generator disagree about the same tokens.
    gap = torch.where(mask, logprobs - batch.generator_logprobs, 0.0)
    return LossSums(
        tokens=float(mask.sum()),
        entropy=float(torch.where(mask, entropy, 0.0).sum()),
        ratio=float(torch.where(mask, ratio, 0.0).sum()),
        max_ratio=float(torch.where(mask, ratio, 0.0).max()) if len(ratio) else 0.0,
        mismatch_k1=float(-gap.sum()),
        mismatch_k3=float((gap.exp() - 1.0 - gap).sum()),
    )
