"""From token objectives to the loss, with one denominator for the whole batch.

Owns invariant 6: the weight of a token is fixed before the batch is split, so any split into
micro-batches, ranks or packings adds up to the same loss and gradient. Does not count tokens:
the caller says how many each rollout of the whole minibatch trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from headrace.objectives.segments import Segments

Aggregation: TypeAlias = Literal["token", "sequence", "constant"]


def aggregation_weights(
    rollout_lengths: Sequence[int], *, aggregation: Aggregation, max_tokens: int
) -> list[float]:
    """Return, for each rollout of the whole minibatch, the weight of each of its tokens.

    ``rollout_lengths`` holds the trained tokens (True in the loss mask) of every rollout of every
    rank. With R the rollouts that have at least one: ``token`` 1 / total, ``sequence``
    1 / (R * length), ``constant`` 1 / (R * max_tokens). A rollout without trained tokens gets 0.

    Rollouts of a group without spread belong in the list although their gradient is 0: skipping
    their forward pass must not change the gradient of the others. Rollouts that were not scored
    are not trained on and come in with length 0.
    """
    total = sum(rollout_lengths)
    count = sum(length > 0 for length in rollout_lengths)
    return [
        _token_weight(length, total=total, count=count, how=aggregation, max_tokens=max_tokens)
        for length in rollout_lengths
    ]


def _token_weight(
    length: int, *, total: int, count: int, how: Aggregation, max_tokens: int
) -> float:
    if length == 0:
        return 0.0
    match how:
        case "token":
            return 1.0 / total
        case "sequence":
            return 1.0 / (count * length)
        case "constant":
            return 1.0 / (count * max_tokens)
        case _:
            assert_never(how)


def aggregate_loss(
    token_objective: Tensor, *, weights: Tensor, rollout_index: Tensor, loss_mask: Tensor
) -> Tensor:
    """Return - sum over trained tokens of weight * objective, a scalar.

    ``token_objective``: [N]; ``weights``: [R] from `aggregation_weights`; ``rollout_index``: [N]
    int64, the row in ``weights`` of each token; ``loss_mask``: [N] bool. Add the results of all
    micro-batches and ranks; never average them. With no trained token it is 0 and so is its
    gradient.
    """
    selected = torch.where(loss_mask, token_objective, 0.0)
    return -(selected * weights[rollout_index]).sum()


def without_rejected(
    weights: Tensor,
    *,
    segments: Segments,
    kept: Tensor,
    aggregation: Aggregation,
    max_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return token weights [N] among the ``kept`` and the share of the denominator that left it.

    For losses whose denominator does not count rejected tokens. Which ones are is known batch part
    by batch part, so the rest is left to the end: sum the shares of all parts to S, and multiply
    the loss by 1 / (1 - S). ``weights``: [N] as of `aggregation_weights`; ``kept``: [N] bool, the
    trained tokens that stay. ``token``: S counts the rejected tokens. ``sequence`` and
    ``constant``: S counts the rollouts that lost all of theirs; with ``sequence`` the others' means
    are over the tokens they kept.
    """
    trained = torch.where(segments.loss_mask, weights, 0.0)
    left = segments.restricted(kept).lengths
    gone = (left == 0) & (segments.lengths > 0)
    match aggregation:
        case "token":
            return trained, torch.where(kept, 0.0, trained).sum()
        case "sequence":
            share = (segments.sum(trained) * gone).sum()
            return trained * segments.spread(segments.lengths / left.clamp(min=1)), share
        case "constant":
            return trained, (segments.mean(trained) * gone).sum() * max_tokens
        case _:
            assert_never(aggregation)
