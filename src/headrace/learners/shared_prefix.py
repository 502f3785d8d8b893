"""Attention for training: each prompt once, its completions branching from it.

A prompt's tokens see themselves causally. A completion's tokens see the whole prompt of their group
and themselves causally. The result equals running every prompt + completion alone, forward and
backward; the work on the prompt is done once per group instead of once per rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.learners.packing import Microbatch
from headrace.models.attention import (
    AttentionMask,
    PackedCausal,
    Padding,
    alike_runs,
    attend,
    visible,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Completions of similar length, whose prompts are of similar length too."""

    prompts: Padding
    """Of the prompts that they and perhaps others branch from."""
    owner: Tensor
    """[R] which of these prompts each completion continues."""
    completions: Padding
    masks: Mapping[int | None, AttentionMask]
    """By window."""


class SharedPrefix:
    """An `Attention` over the packed tokens of a `Microbatch`."""

    def __init__(self, batch: Microbatch, windows: Sequence[int | None]) -> None:
        device = batch.input_ids.device
        self._windows = tuple(windows)
        self._prompts = PackedCausal(batch.prompt_lengths, windows, device)
        self._runs = list(self._split(batch, device))

    def _split(self, batch: Microbatch, device: torch.device) -> Iterator[_Run]:
        # Completions of one token feed nothing in and have no row here.
        rows = [row for row, length in enumerate(batch.completion_lengths) if length > 0]
        offset = sum(batch.prompt_lengths)
        for run, prompts in zip(self._prompts.runs, self._prompts.paddings, strict=True):
            owners = range(run.start, run.stop)
            own = [row for row in rows if batch.prompt_of_completion[row] in owners]
            lengths = [batch.completion_lengths[row] for row in own]
            for part in alike_runs(lengths):
                owner = [batch.prompt_of_completion[row] - run.start for row in own[part]]
                completions = Padding(lengths[part], offset=offset, device=device)
                yield self._run(prompts, owner, completions, device)
                offset += sum(lengths[part])

    def _run(
        self, prompts: Padding, owner: Sequence[int], completions: Padding, device: torch.device
    ) -> _Run:
        lengths = torch.tensor([prompts.lengths[index] for index in owner], device=device)
        shape = (prompts.shape[1], completions.shape[1])
        return _Run(
            prompts=prompts,
            owner=torch.tensor(owner, dtype=torch.int64, device=device),
            completions=completions,
            masks={window: _mask(lengths, *shape, window) for window in set(self._windows)},
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        parts = [self._prompts(layer, query, key, value)]
        for run in self._runs:
            pad = run.completions.pad
            mixed = attend(
                pad(query),
                torch.cat((_prefix(run, key), pad(key)), dim=1),
                torch.cat((_prefix(run, value), pad(value)), dim=1),
                run.masks[self._windows[layer]],
            )
            parts.append(run.completions.unpad(mixed))
        return torch.cat(parts)


def _mask(lengths: Tensor, prompt_width: int, width: int, window: int | None) -> AttentionMask:
    """[R, T, P + T] for prompts of ``lengths`` [R]; a prompt's padding columns are seen by none."""
    columns = torch.arange(width, device=lengths.device)
    queries = lengths.unsqueeze(1) + columns
    prompt_columns = torch.arange(prompt_width, device=lengths.device)
    in_prompt = visible(queries, prompt_columns.expand(len(lengths), -1), window)
    in_prompt &= (prompt_columns < lengths.unsqueeze(1)).unsqueeze(1)
    in_completion = visible(columns, columns, window).expand(len(lengths), -1, -1)
    return AttentionMask(torch.cat((in_prompt, in_completion), dim=-1))


def _prefix(run: _Run, packed: Tensor) -> Tensor:
    """[R, P, ...]: the prompt of each completion."""
    return run.prompts.pad(packed).index_select(0, run.owner)
