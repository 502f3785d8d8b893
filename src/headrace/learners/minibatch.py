"""One minibatch: what it trains on, packed, and what was rejected before its pass.

Owns: a rollout that is rejected before the training pass is not computed in it, and its part of the
denominator is what it would have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.config import RunConfig
from headrace.learners.correction import Correction, judged_by_gap, limit_moments
from headrace.learners.layout import Alone, Layout
from headrace.learners.loss import correction_sums
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Microbatch, microbatches
from headrace.learners.selection import ScoredGroup, Selection, TrainingGroup, select
from headrace.objectives.aggregation import without_rejected


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """The rollouts of one optimizer update."""

    selection: Selection
    batches: list[Microbatch]
    """This rank's, and idle ones while other ranks compute theirs."""
    rejected_share: float = 0.0
    """Of the denominator, what this rank's rollouts took that were left out after packing."""


def plan_minibatch(
    groups: Sequence[ScoredGroup],
    config: RunConfig,
    *,
    device: torch.device,
    layout: Layout | None = None,
) -> Minibatch:
    """Select and pack the rollouts of ``groups`` that can change the gradient."""
    objective = config.objective
    selection = select(
        groups,
        aggregation=objective.aggregation,
        max_tokens=config.sampling.max_tokens,
        keep_no_spread=objective.pulls_without_advantage,
    )
    layout = layout or Alone()
    budget = config.learner.max_tokens_per_microbatch
    own = microbatches(layout.share(selection.groups), max_tokens=budget, device=device)
    return Minibatch(selection=selection, batches=layout.padded(own, device))


def drop_rejected(
    part: Minibatch, config: RunConfig, *, device: torch.device, layout: Layout | None = None
) -> LossSums:
    """Leave out the rollouts all of whose tokens p rejects, and return what was counted of them.

    The proximal log-probs of ``part`` are known; the choice of M2PO, which is over all of its
    tokens, is made here.
    """
    correction = config.objective.correction
    layout = layout or Alone()
    limit_moments(part.batches, correction, layout.gathered)
    sums, left = LossSums(), dict[int, Tensor]()
    part.batches = [batch for batch in part.batches if not batch.is_idle]
    for batch in part.batches:
        assert batch.proximal_logprobs is not None
        found, kept = judged_by_gap(batch, batch.proximal_logprobs, correction)
        counts = batch.segments.restricted(kept).lengths
        own = torch.split(batch.proximal_logprobs, [len(row.trained) for row in batch.rows])
        left |= {
            id(row.rollout): logprobs
            for row, logprobs, count in zip(batch.rows, own, counts.tolist(), strict=True)
            if count
        }
        gone = batch.segments.spread(counts == 0)
        if gone.any():
            sums.add(_sums_of_gone(batch, gone, found.altered))
            part.rejected_share += _share_of_gone(batch, gone, config)
    if sums["mismatch/tokens"]:
        _pack_again(part, left, config, device)
    part.batches = layout.padded(part.batches, device)
    return layout.total(sums)


def _pack_again(
    part: Minibatch, left: Mapping[int, Tensor], config: RunConfig, device: torch.device
) -> None:
    """Pack the rollouts of which ``left`` has the proximal log-probs, by identity."""
    limit = part.batches[0].moment_limit
    budget = config.learner.max_tokens_per_microbatch
    groups = _only(part.selection.groups, left)
    part.batches = microbatches(groups, max_tokens=budget, device=device)
    for batch in part.batches:
        batch.moment_limit = limit


def _only(groups: Sequence[TrainingGroup], left: Mapping[int, Tensor]) -> list[TrainingGroup]:
    kept = [
        TrainingGroup(
            prompt_ids=group.prompt_ids,
            rows=tuple(
                replace(row, proximal_logprobs=tuple(left[id(row.rollout)].tolist()))
                for row in group.rows
                if id(row.rollout) in left
            ),
        )
        for group in groups
    ]
    return [group for group in kept if group.rows]


def _sums_of_gone(batch: Microbatch, gone: Tensor, altered: Tensor) -> LossSums:
    assert batch.proximal_logprobs is not None
    nothing = Correction(
        weights=torch.zeros_like(batch.weights), altered=altered, kept=torch.zeros_like(gone)
    )
    return correction_sums(batch, batch.proximal_logprobs, nothing, batch.segments.restricted(gone))


def _share_of_gone(batch: Microbatch, gone: Tensor, config: RunConfig) -> float:
    objective = config.objective
    if objective.correction.count_rejected:
        return 0.0
    _, share = without_rejected(
        batch.weights,
        segments=batch.segments,
        kept=~gone,
        aggregation=objective.aggregation,
        max_tokens=config.sampling.max_tokens,
    )
    return float(share)
