"""The loss of one micro-batch, and the sums its metrics are made of.

loss = sum_t weight_t * (kl_coefficient * k3_t - importance_t * objective_t). The weights hold the
global denominator, so the gradients of all micro-batches simply add up. The importance of a token
is a constant, 1 without a correction, and no part of the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from headrace.config import ObjectiveConfig
from headrace.learners.packing import Microbatch
from headrace.learners.shared_prefix import SharedPrefix
from headrace.models.decoder import Decoder
from headrace.objectives.importance import importance_weights
from headrace.objectives.kl import k3
from headrace.objectives.logprobs import linear_logprobs
from headrace.objectives.losses import masked_log_ratio, ppo_clip
from headrace.objectives.segments import Segments

LOGIT_CHUNK = 512
"""Tokens whose logits are computed together, one tile of the vocabulary at a time."""


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
    importance: float = 0.0
    squared_importance: float = 0.0
    truncated: float = 0.0
    max_ratio: float = 0.0
    max_importance: float = 0.0

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
        self.importance += other.importance
        self.squared_importance += other.squared_importance
        self.truncated += other.truncated
        self.max_ratio = max(self.max_ratio, other.max_ratio)
        self.max_importance = max(self.max_importance, other.max_importance)


def token_logprobs(
    decoder: Decoder, batch: Microbatch, temperature: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [M], in fp32 or wider, of the micro-batch's trained tokens.

    Logits are computed for predicting positions only, a chunk at a time, by products in ``dtype``.
    """
    attention = SharedPrefix(batch, decoder.config.windows)
    hidden = decoder(batch.input_ids, batch.positions, attention)
    return linear_logprobs(
        hidden.index_select(0, batch.source_rows).to(dtype),
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
    mask = torch.ones_like(batch.weights, dtype=torch.bool)
    proximal = _proximal(batch, logprobs, objective)
    log_ratio = masked_log_ratio(logprobs, proximal, loss_mask=mask)
    surrogate, clipped = ppo_clip(
        log_ratio,
        batch.advantages,
        loss_mask=mask,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
    )
    importance, truncated = _importance(batch, proximal, objective, mask)
    loss = -(batch.weights * importance * surrogate).sum()
    reference_k3 = 0.0
    if reference_logprobs is not None:
        kl = k3(logprobs, reference_logprobs, loss_mask=mask)
        loss = loss + objective.kl_coefficient * (batch.weights * kl).sum()
        reference_k3 = float(kl.detach().sum())
    with torch.no_grad():
        sums = _sums(batch, logprobs, log_ratio, entropy, importance)
    sums.loss = float(loss.detach())
    sums.clipped = float(clipped.sum())
    sums.truncated = float(truncated.sum())
    sums.reference_k3 = reference_k3
    return loss, sums


def _proximal(batch: Microbatch, logprobs: Tensor, objective: ObjectiveConfig) -> Tensor:
    match objective.proximal:
        case "generator":
            return batch.generator_logprobs
        case "recompute":
            # Before the first update of a step, the learner's own log-probs are the current ones.
            return logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs


def _importance(
    batch: Microbatch, proximal: Tensor, objective: ObjectiveConfig, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the importance of each token [M], a constant, and where its bound took over [M]."""
    match objective.correction:
        case "none":
            return torch.ones_like(batch.weights), ~mask
        case "tis":
            found = importance_weights(
                proximal - batch.generator_logprobs,
                # A weight of each token knows no rollouts.
                segments=Segments(
                    index=torch.zeros_like(batch.target_ids), count=1, loss_mask=mask
                ),
                level="token",
                mode="truncate",
                low=0.0,
                high=objective.correction_bound,
            )
            return found.weights, found.altered
        case _:
            assert_never(objective.correction)


def _sums(
    batch: Microbatch, logprobs: Tensor, log_ratio: Tensor, entropy: Tensor, importance: Tensor
) -> LossSums:
    ratio = log_ratio.exp()
    # d = q - mu: how far learner and generator disagree about the same tokens.
    gap = logprobs - batch.generator_logprobs
    return LossSums(
        tokens=float(len(ratio)),
        entropy=float(entropy.sum()),
        ratio=float(ratio.sum()),
        importance=float(importance.sum()),
        squared_importance=float(importance.square().sum()),
        max_importance=float(importance.max()),
        max_ratio=float(ratio.max()),
        mismatch_k1=float(-gap.sum()),
        mismatch_k3=float((torch.expm1(gap) - gap).sum()),
    )
