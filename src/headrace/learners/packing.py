"""From scored groups to packed micro-batches.

Owns two facts: which rollouts can change the gradient at all, and the one global denominator, which
is fixed over the whole minibatch before anything is split. The prompt of a group is packed once and
its completions branch from it. A completion's last token is never fed in, since nothing follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.objectives.advantages import AdvantageEstimator, group_advantages
from headrace.objectives.aggregation import Aggregation, aggregation_weights
from headrace.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One rollout that takes part in the loss."""

    rollout: Rollout
    advantage: float
    weight: float
    """What one of its tokens counts: 1 / (the global denominator's share)."""

    @property
    def num_inputs(self) -> int:
        """Completion tokens that are fed in."""
        return len(self.rollout.completion_ids) - 1


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
    """Groups whose rewards are all equal: their policy gradient is exactly 0."""
    trained_rewards: tuple[float, ...]
    """Rewards of the rollouts in ``groups``."""


def select(
    groups: Sequence[RolloutGroup],
    *,
    estimator: AdvantageEstimator,
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
        groups=tuple(chosen), num_no_spread=num_no_spread, trained_rewards=tuple(rewards)
    )


def _scored_rows(
    group: RolloutGroup, estimator: AdvantageEstimator
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

    N input tokens: every prompt of the micro-batch, then every completion. M predicted tokens, in
    completion order; R completions.
    """

    input_ids: Tensor
    """[N]"""
    positions: Tensor
    """[N] within each sequence, prompt included."""
    prompt_lengths: tuple[int, ...]
    completion_lengths: tuple[int, ...]
    """[R] input tokens of each completion: one fewer than it has; may be 0."""
    prompt_of_completion: tuple[int, ...]
    """[R]"""
    source_rows: Tensor
    """[M] the input token whose hidden state predicts each token."""
    target_ids: Tensor
    """[M]"""
    loss_mask: Tensor
    """[M] bool"""
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
    prompts = [group.prompt_ids for group in groups]
    rows = [(index, row) for index, group in enumerate(groups) for row in group.rows]
    completions = [row.rollout.completion_ids for _, row in rows]
    lengths = [len(prompt) for prompt in prompts]
    inputs = [*prompts, *(ids[:-1] for ids in completions)]
    starts = [0] * len(prompts) + [lengths[index] for index, _ in rows]

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.repeat_interleave(
            torch.tensor(values, dtype=torch.float32), torch.tensor([len(c) for c in completions])
        ).to(device)

    return Microbatch(
        input_ids=_cat(inputs).to(device),
        positions=torch.cat(
            [torch.arange(s, s + len(ids)) for s, ids in zip(starts, inputs, strict=True)]
        ).to(device),
        prompt_lengths=tuple(lengths),
        completion_lengths=tuple(len(ids) - 1 for ids in completions),
        prompt_of_completion=tuple(index for index, _ in rows),
        source_rows=_source_rows(lengths, [index for index, _ in rows], completions).to(device),
        target_ids=_cat(completions).to(device),
        loss_mask=torch.cat([torch.tensor(row.rollout.loss_mask) for _, row in rows]).to(device),
        generator_logprobs=torch.cat(
            [torch.tensor(row.rollout.generator_logprobs) for _, row in rows]
        ).to(device),
        advantages=per_token([row.advantage for _, row in rows]),
        weights=per_token([row.weight for _, row in rows]),
    )


def _cat(sequences: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64)


def _source_rows(
    prompt_lengths: Sequence[int],
    prompt_of_completion: Sequence[int],
    completions: Sequence[Sequence[int]],
) -> Tensor:
    """Return [M]: what predicts each token.

    A completion's first token is predicted by its prompt's last one, the others by their
    predecessor.
    """
    prompt_ends = torch.tensor(prompt_lengths).cumsum(0) - 1
    start = sum(prompt_lengths)
    rows = []
    for prompt, ids in zip(prompt_of_completion, completions, strict=True):
        own = torch.arange(start, start + len(ids) - 1)
        rows.append(torch.cat((prompt_ends[prompt : prompt + 1], own)))
        start += len(ids) - 1
    return torch.cat(rows)
