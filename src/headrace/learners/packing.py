"""From the rows of a minibatch to packed micro-batches.

The prompt of a group is packed once and its completions branch from it; what all prompts of a
micro-batch begin with, such as a system prompt, is packed once for all of them. Only trained tokens
are predicted, and nothing after the last one is fed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kept_support import decode
from headrace.learners.selection import TrainingGroup, TrainingRow, plain_rollout
from headrace.models.attention import alike_runs
from headrace.objectives.logprobs import Support
from headrace.objectives.segments import Segments

T = TypeVar("T")

LEAST_SHARED = 16
"""Tokens that prompts must have in common for their attention to be cut in two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Critique:
    """What the critic says of each token, [M] each."""

    advantages: Tensor
    targets: Tensor
    values: Tensor
    """Those that both were computed from."""


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """Packed tensors of one forward and backward pass.

    N input tokens: what all prompts begin with, the rest of every prompt, then every completion,
    both sorted so that what is of similar length lies together. M trained tokens, in completion
    order; R completions. What a rollout says of its other tokens (a log-prob that may be anything)
    is not in here at all.
    """

    rows: tuple[TrainingRow, ...]
    """[R]"""
    input_ids: Tensor
    """[N]"""
    positions: Tensor
    """[N] within each sequence, prompt included."""
    num_shared: int
    """Tokens that all prompts begin with and that are held once; each has at least one more."""
    prompt_lengths: tuple[int, ...]
    """Of whole prompts."""
    completion_lengths: tuple[int, ...]
    """[R] input tokens of each completion; may be 0."""
    prompt_of_completion: tuple[int, ...]
    """[R]"""
    source_rows: Tensor
    """[M] the input token whose hidden state predicts each token."""
    target_ids: Tensor
    """[M]"""
    rollout_index: Tensor
    """[M] the completion that each token is of."""
    support: Support | None
    """The tokens that each one was drawn from; None where nothing filtered them."""
    generator_logprobs: Tensor
    """[M]"""
    advantages: Tensor
    """[M]"""
    rewards: Tensor
    """[R]"""
    weights: Tensor
    """[M] so that loss = -sum(weights * objective) over all micro-batches."""
    proximal_logprobs: Tensor | None = None
    """[M] once recomputed; None when the generator's serve or the first pass gives them."""
    critique: Critique | None = None
    """The critic's judgement, once it was made."""
    moment_limit: float | None = None
    """Largest (mu - p)^2 that is trained on; None: any."""
    is_idle: bool = False
    """Computed because other ranks compute meanwhile: it weighs nothing and is counted nowhere."""

    @property
    def segments(self) -> Segments:
        """Which completion each token is of; all of them are trained on."""
        everywhere = torch.ones_like(self.rollout_index, dtype=torch.bool)
        return Segments(index=self.rollout_index, count=len(self.rows), loss_mask=everywhere)

    @property
    def suffix_lengths(self) -> tuple[int, ...]:
        """What each prompt has beyond the shared tokens."""
        return tuple(length - self.num_shared for length in self.prompt_lengths)

    def versions(self) -> Tensor:
        """Return [M] int64 the policy version that sampled each token."""
        found = [
            version
            for row in self.rows
            for version in _trained_part(row, row.rollout.policy_versions)
        ]
        return torch.tensor(found, dtype=torch.int64, device=self.target_ids.device)


def microbatches(
    groups: Sequence[TrainingGroup], *, max_tokens: int, device: torch.device
) -> list[Microbatch]:
    """Pack ``groups`` under a token budget, longest first, so that the worst case comes first.

    A group above the budget is split between its rollouts; a single rollout above it goes alone.
    """
    parts = [part for group in groups for part in split_group(group, max_tokens)]
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


def idle_microbatch(device: torch.device) -> Microbatch:
    """Return the smallest micro-batch there is, whose gradient is exactly 0."""
    row = TrainingRow(rollout=plain_rollout(1), advantage=0.0, weight=0.0)
    (batch,) = microbatches(
        [TrainingGroup(prompt_ids=(0,), rows=(row,))], max_tokens=1, device=device
    )
    batch.is_idle = True
    return batch


def split_group(group: TrainingGroup, max_tokens: int) -> Iterator[TrainingGroup]:
    """Yield parts of ``group`` of at most ``max_tokens``, its prompt in each; a rollout is whole.

    A single rollout above it goes alone.
    """
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
    shared = _num_shared(prompts)
    suffixes = [prompt[shared:] for prompt in prompts]
    owners, rows = _sorted_rows(groups, shared)
    completions = [row.rollout.completion_ids[: row.num_inputs] for row in rows]
    inputs = [prompts[0][:shared], *suffixes, *completions]
    starts = [0, *(shared for _ in suffixes), *(len(prompts[owner]) for owner in owners)]
    repeats = [len(row.trained) for row in rows]

    def per_row(values: Sequence[float]) -> Tensor:
        return _repeated(np.asarray(values, dtype=np.float32), repeats).to(device)

    return Microbatch(
        rows=tuple(rows),
        input_ids=_cat(inputs).to(device),
        positions=torch.cat(
            [torch.arange(s, s + len(ids)) for s, ids in zip(starts, inputs, strict=True)]
        ).to(device),
        num_shared=shared,
        prompt_lengths=tuple(len(prompt) for prompt in prompts),
        completion_lengths=tuple(row.num_inputs for row in rows),
        prompt_of_completion=tuple(owners),
        source_rows=_source_rows(shared, suffixes, owners, rows).to(device),
        target_ids=_cat([_trained_part(row, row.rollout.completion_ids) for row in rows]).to(
            device
        ),
        rollout_index=_repeated(np.arange(len(rows)), repeats).to(device),
        support=_support(rows, device),
        generator_logprobs=torch.tensor(
            [lp for row in rows for lp in _trained_part(row, row.rollout.generator_logprobs)]
        ).to(device),
        advantages=per_row([row.advantage for row in rows]),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32).to(device),
        weights=per_row([row.weight for row in rows]),
        proximal_logprobs=_known_proximal(rows, device),
    )


def _num_shared(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all ``prompts`` begin with and are to hold once; 0 where too few.

    At least one is left of each prompt: what predicts its completions is its own.
    """
    if len(prompts) == 1:
        return 0
    first, last = min(prompts), max(prompts)  # in the order of words, nothing lies between
    most = min(map(len, prompts)) - 1
    common = next((i for i in range(most) if first[i] != last[i]), most)
    return common if common >= LEAST_SHARED else 0


def _known_proximal(rows: Sequence[TrainingRow], device: torch.device) -> Tensor | None:
    if any(row.proximal_logprobs is None for row in rows):
        return None
    return torch.tensor([lp for row in rows for lp in row.proximal_logprobs or ()], device=device)


def _support(rows: Sequence[TrainingRow], device: torch.device) -> Support | None:
    """Return what the generator recorded of every trained token; None where it recorded nothing."""
    if all(row.rollout.kept_support is None for row in rows):
        return None
    kept = [
        decode(encoded)
        for row in rows
        for encoded in _trained_part(row, row.rollout.kept_support or ())
    ]
    return Support(
        rows=_repeated(np.arange(len(kept)), [len(ids) for ids in kept]).to(device),
        ids=torch.from_numpy(np.concatenate(kept)).to(device),
    )


def _sorted_rows(
    groups: Sequence[TrainingGroup], shared: int
) -> tuple[list[int], list[TrainingRow]]:
    """Return each completion and the group it is of, those of prompts alike by their length."""
    owned: list[tuple[int, TrainingRow]] = []
    for run in alike_runs([len(group.prompt_ids) - shared for group in groups]):
        rows = [
            (owner, row) for owner in range(*run.indices(len(groups))) for row in groups[owner].rows
        ]
        owned += sorted(rows, key=lambda pair: pair[1].num_inputs, reverse=True)
    return [owner for owner, _ in owned], [row for _, row in owned]


def _cat(sequences: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64)


def _repeated(values: npt.NDArray[Any], counts: Sequence[int]) -> Tensor:
    """Return [sum(counts)] each value as often as its count says."""
    return torch.from_numpy(np.repeat(values, counts))


def _trained_part(row: TrainingRow, values: Sequence[T]) -> list[T]:
    return list(compress(values, row.rollout.loss_mask))


def _source_rows(
    shared: int,
    suffixes: Sequence[Sequence[int]],
    owners: Sequence[int],
    rows: Sequence[TrainingRow],
) -> Tensor:
    """Return [M]: what predicts each token.

    A completion's first token is predicted by its prompt's last one, the others by their
    predecessor.
    """
    prompt_ends = list(accumulate(map(len, suffixes), initial=shared))[1:]
    start = prompt_ends[-1]
    found: list[int] = []
    for owner, row in zip(owners, rows, strict=True):
        own = (start + index - 1 if index else prompt_ends[owner] - 1 for index in row.trained)
        found.extend(own)
        start += row.num_inputs
    return torch.tensor(found)
