"""Attention for training: each prompt once, its completions branching from it.

A prompt's tokens see themselves causally. A completion's tokens see the whole prompt of their group
and themselves causally. What all prompts begin with is computed once too: their rest branches from
it as completions do from prompts. The result equals running every prompt + completion alone,
forward and backward; the work on the prompt is done once per group instead of once per rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
from headrace.models.branch_attention import Branch, Trees


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefixes:
    """What sequences branch from, and the shared tokens before it."""

    num_shared: int
    rest: Padding

    @property
    def width(self) -> int:
        return self.num_shared + self.rest.shape[1]

    def pad(self, packed: Tensor) -> Tensor:
        """Return [B, width, ...]; padding is on the right."""
        rest = self.rest.pad(packed)
        if self.num_shared == 0:
            return rest
        shared = packed[: self.num_shared]
        return torch.cat((shared.expand(len(rest), *shared.shape), rest), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Sequences of similar length, whose prefixes are of similar length too."""

    prefixes: _Prefixes
    """From which they and perhaps others branch."""
    owner: Tensor
    """[R] which of these prefixes each sequence continues."""
    sequences: Padding
    masks: Mapping[int | None, AttentionMask]
    """By window."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Return what the real rows of the sequences see."""
        pad = self.sequences.pad
        mixed = attend(
            pad(query),
            torch.cat((self._prefix(key), pad(key)), dim=1),
            torch.cat((self._prefix(value), pad(value)), dim=1),
            self.masks[window],
        )
        return self.sequences.unpad(mixed)

    def _prefix(self, packed: Tensor) -> Tensor:
        """[R, P, ...]: what each sequence branches from."""
        return self.prefixes.pad(packed).index_select(0, self.owner)


class SharedPrefix:
    """An `Attention` over the packed tokens of a `Microbatch`."""

    def __init__(self, batch: Microbatch, windows: Sequence[int | None]) -> None:
        self._windows = tuple(windows)
        self._device = batch.input_ids.device
        self._batch = batch
        self._trees = Trees(_trees(batch))

    @cached_property
    def _first(self) -> PackedCausal:
        """Of what is not branched from anything."""
        batch = self._batch
        first = [batch.num_shared] if batch.num_shared else batch.prompt_lengths
        return PackedCausal(first, self._windows, self._device)

    @cached_property
    def _runs(self) -> list[_Run]:
        return list(self._branches(self._batch))

    def _branches(self, batch: Microbatch) -> Iterator[_Run]:
        shared, suffixes = batch.num_shared, batch.suffix_lengths
        # Completions of one token feed nothing in and have no row here.
        rows = [row for row, length in enumerate(batch.completion_lengths) if length > 0]
        start, offset = shared, sum(suffixes, shared)
        completions: list[_Run] = []
        for run in alike_runs(suffixes):
            rest = Padding(suffixes[run], offset=start, device=self._device)
            start += sum(suffixes[run])
            if shared:
                whole = Padding([shared], offset=0, device=self._device)
                yield self._run(_Prefixes(num_shared=0, rest=whole), [0] * len(rest.lengths), rest)
            owners = range(*run.indices(len(suffixes)))
            own = [row for row in rows if batch.prompt_of_completion[row] in owners]
            lengths = [batch.completion_lengths[row] for row in own]
            for part in alike_runs(lengths):
                owner = [batch.prompt_of_completion[row] - run.start for row in own[part]]
                sequences = Padding(lengths[part], offset=offset, device=self._device)
                prefixes = _Prefixes(num_shared=shared, rest=rest)
                completions.append(self._run(prefixes, owner, sequences))
                offset += sum(lengths[part])
        yield from completions

    def _run(self, prefixes: _Prefixes, owner: Sequence[int], sequences: Padding) -> _Run:
        lengths = torch.tensor(
            [prefixes.num_shared + prefixes.rest.lengths[index] for index in owner],
            device=self._device,
        )
        shape = (prefixes.width, sequences.shape[1])
        return _Run(
            prefixes=prefixes,
            owner=torch.tensor(owner, dtype=torch.int64, device=self._device),
            sequences=sequences,
            masks={window: _mask(lengths, *shape, window) for window in set(self._windows)},
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        window = self._windows[layer]
        if window is None and self._trees.serves(query, key, value):
            return self._trees.attend(query, key, value)
        branches = [run.attend(query, key, value, window) for run in self._runs]
        return torch.cat((self._first(layer, query, key, value), *branches))


def _trees(batch: Microbatch) -> list[list[Branch]]:
    """Return each prompt with its completions, and the shared tokens before all of them."""
    shared = batch.num_shared
    trees, start = [], shared
    for length in batch.suffix_lengths:
        trees.append([Branch(start, length, 0, 0, shared)])
        start += length
    for owner, length in zip(batch.prompt_of_completion, batch.completion_lengths, strict=True):
        prompt = trees[owner][0]
        if length:
            trees[owner].append(Branch(start, length, prompt.start, prompt.length, shared))
        start += length
    return [[Branch(0, shared, 0, 0, 0)], *trees] if shared else trees


def _mask(lengths: Tensor, prompt_width: int, width: int, window: int | None) -> AttentionMask:
    """[R, T, P + T] for prompts of ``lengths`` [R]; a prompt's padding columns are seen by none."""
    columns = torch.arange(width, device=lengths.device)
    queries = lengths.unsqueeze(1) + columns
    prompt_columns = torch.arange(prompt_width, device=lengths.device)
    in_prompt = visible(queries, prompt_columns.expand(len(lengths), -1), window)
    in_prompt &= (prompt_columns < lengths.unsqueeze(1)).unsqueeze(1)
    in_completion = visible(columns, columns, window).expand(len(lengths), -1, -1)
    return AttentionMask(torch.cat((in_prompt, in_completion), dim=-1))
