"""From scored groups to packed micro-batches.

Owns two facts: which rollouts can change the gradient at all, and the one global denominator, which
is fixed over the whole minibatch before anything is split. The prompt of a group is packed once and
its completions branch from it. Only trained tokens are predicted, and nothing after the last one is
fed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from headrace.models.attention import alike_runs
from headrace.objectives.advantages import GroupEstimator, group_advantages
from headrace.objectives.aggregation import Aggregation, aggregation_weights
from headrace.types import Rollout, RolloutGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One rollout that takes part in the loss."""

    rollout: Rollout
    advantage: float
    weight: float
    """What one of its tokens counts: 1 / (the global denominator's share)."""

    @property
    def trained(self) -> tuple[int, ...]:
        """[at least 1] places in the completion of the tokens trained on."""
        return tuple(index for index, is_trained in enumerate(self.rollout.loss_mask) if is_trained)

    @property
    def num_inputs(self) -> int:
        """Completion tokens that are fed in: all before the last one trained on."""
        return self.trained[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """Rows that share one prompt."""

    prompt_ids: tuple[int, ...]
    rows: tuple[TrainingRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens one forward pass over the group computes."""
        return len(self.prompt_ids) + sum(row.num_inputs for row in self.rows)

    @property
    def longest(self) -> int:
        """Length of its longest sequence."""
        return len(self.prompt_ids) + max(row.num_inputs for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one minibatch trains on, and what it leaves out because it cannot matter."""

    groups: tuple[TrainingGroup, ...]
    num_no_spread: int
    """Groups whose rewards are all equal, or all missing: their policy gradient is exactly 0."""
    num_with_spread: int
    """All others; with none of them the rewards teach nothing."""
    trained_rewards: tuple[float, ...]
    """Rewards of the rollouts in ``groups``."""


def select(
    groups: Sequence[RolloutGroup],
    *,
    estimator: GroupEstimator,
    aggregation: Aggregation,
    max_tokens: int,
    keep_no_spread: bool,
) -> Selection:
    """Choose the rows of a minibatch and give each its advantage and weight.

    Rollouts without a verdict or without a token have no row and no vote. Groups without a spread
    keep their share of the denominator, whether or not they are computed (``keep_no_spread``), so
    leaving them out changes no gradient.
    """
    scored = [_scored_rows(group, estimator) for group in groups]
    lengths = [sum(rollout.loss_mask) for rows in scored for rollout, _, _ in rows]
    weights = iter(aggregation_weights(lengths, aggregation=aggregation, max_tokens=max_tokens))
    chosen: list[TrainingGroup] = []
    rewards: list[float] = []
    num_no_spread = 0
    for group, rows in zip(groups, scored, strict=True):
        weighted = tuple(
            TrainingRow(rollout=rollout, advantage=advantage, weight=next(weights))
            for rollout, advantage, _ in rows
        )
        spread = any(row.advantage != 0.0 for row in weighted)
        num_no_spread += not spread
        if weighted and (spread or keep_no_spread):
            chosen.append(TrainingGroup(prompt_ids=group.prompt.token_ids, rows=weighted))
            rewards += [reward for _, _, reward in rows]
    return Selection(
        groups=tuple(chosen),
        num_no_spread=num_no_spread,
        num_with_spread=len(groups) - num_no_spread,
        trained_rewards=tuple(rewards),
    )


def _scored_rows(
    group: RolloutGroup, estimator: GroupEstimator
) -> list[tuple[Rollout, float, float]]:
    """Return (rollout, advantage, reward) of every rollout with a verdict and a trained token."""
    rewards = [
        reward if any(rollout.loss_mask) else None
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
    ]
    advantages = group_advantages(rewards, estimator=estimator)
    return [
        (rollout, advantage, reward)
        for rollout, advantage, reward in zip(group.rollouts, advantages, rewards, strict=True)
        if advantage is not None and reward is not None
    ]


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """Packed tensors of one forward and backward pass.

    N input tokens: every prompt of the micro-batch, then every completion, both sorted so that what
    is of similar length lies together. M trained tokens, in completion order; R completions. What a
    rollout says of its other tokens (a log-prob that may be anything) is not in here at all.
    """

    input_ids: Tensor
    """[N]"""
    positions: Tensor
    """[N] within each sequence, prompt included."""
    prompt_lengths: tuple[int, ...]
    completion_lengths: tuple[int, ...]
    """[R] input tokens of each completion; may be 0."""
    prompt_of_completion: tuple[int, ...]
    """[R]"""
    source_rows: Tensor
    """[M] the input token whose hidden state predicts each token."""
    target_ids: Tensor
    """[M]"""
    generator_logprobs: Tensor
    """[M]"""
    advantages: Tensor
    """[M]"""
    weights: Tensor
    """[M] so that loss = -sum(weights * objective) over all micro-batches."""
    proximal_logprobs: Tensor | None = None
    """[M] once recomputed; None when the generator's serve or the first pass gives them."""


def microbatches(
    groups: Sequence[TrainingGroup], *, max_tokens: int, device: torch.device
) -> list[Microbatch]:
    """Pack ``groups`` under a token budget, longest first, so that the worst case comes first.

    A group above the budget is split between its rollouts; a single rollout above it goes alone.
    """
    parts = [part for group in groups for part in _split(group, max_tokens)]
    parts.sort(key=lambda part: part.longest, reverse=True)
    batches: list[list[TrainingGroup]] = []
    room = 0
    for part in parts:
        if not batches or part.num_tokens > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(part)
        room -= part.num_tokens
    return [_pack(batch, device) for batch in batches]


def _split(group: TrainingGroup, max_tokens: int) -> Iterator[TrainingGroup]:
    rows: list[TrainingRow] = []
    used = len(group.prompt_ids)
    for row in group.rows:
        if rows and used + row.num_inputs > max_tokens:
            yield TrainingGroup(prompt_ids=group.prompt_ids, rows=tuple(rows))
            rows, used = [], len(group.prompt_ids)
        rows.append(row)
        used += row.num_inputs
    yield TrainingGroup(prompt_ids=group.prompt_ids, rows=tuple(rows))


def _pack(groups: Sequence[TrainingGroup], device: torch.device) -> Microbatch:
    groups = sorted(groups, key=lambda group: len(group.prompt_ids), reverse=True)
    prompts = [group.prompt_ids for group in groups]
    owners, rows = _sorted_rows(groups)
    inputs = [*prompts, *(row.rollout.completion_ids[: row.num_inputs] for row in rows)]
    starts = [0] * len(prompts) + [len(prompts[owner]) for owner in owners]
    repeats = torch.tensor([len(row.trained) for row in rows])

    def per_row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(repeats).to(device)

    return Microbatch(
        input_ids=_cat(inputs).to(device),
        positions=torch.cat(
            [torch.arange(s, s + len(ids)) for s, ids in zip(starts, inputs, strict=True)]
        ).to(device),
        prompt_lengths=tuple(len(prompt) for prompt in prompts),
        completion_lengths=tuple(row.num_inputs for row in rows),
        prompt_of_completion=tuple(owners),
        source_rows=_source_rows([len(prompt) for prompt in prompts], owners, rows).to(device),
        target_ids=_cat([_trained_part(row, row.rollout.completion_ids) for row in rows]).to(
            device
        ),
        generator_logprobs=torch.tensor(
            [lp for row in rows for lp in _trained_part(row, row.rollout.generator_logprobs)]
        ).to(device),
        advantages=per_row([row.advantage for row in rows]),
        weights=per_row([row.weight for row in rows]),
    )


def _sorted_rows(groups: Sequence[TrainingGroup]) -> tuple[list[int], list[TrainingRow]]:
    """Return each completion and the group it is of, those of prompts alike by their length."""
    owned: list[tuple[int, TrainingRow]] = []
    for run in alike_runs([len(group.prompt_ids) for group in groups]):
        rows = [
            (owner, row) for owner in range(*run.indices(len(groups))) for row in groups[owner].rows
        ]
        owned += sorted(rows, key=lambda pair: pair[1].num_inputs, reverse=True)
    return [owner for owner, _ in owned], [row for _, row in owned]


def _cat(sequences: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64)


def _trained_part(row: TrainingRow, values: Sequence[T]) -> list[T]:
    return [values[index] for index in row.trained]


def _source_rows(
    prompt_lengths: Sequence[int], owners: Sequence[int], rows: Sequence[TrainingRow]
) -> Tensor:
    """Return [M]: what predicts each token.

    A completion's first token is predicted by its prompt's last one, the others by their
    predecessor.
    """
    prompt_ends = list(accumulate(prompt_lengths))
    start = sum(prompt_lengths)
    found: list[int] = []
    for owner, row in zip(owners, rows, strict=True):
        own = (start + index - 1 if index else prompt_ends[owner] - 1 for index in row.trained)
        found.extend(own)
        start += row.num_inputs
    return torch.tensor(found)
