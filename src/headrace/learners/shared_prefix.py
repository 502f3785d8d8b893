"""Attention for training: each prompt once, its completions branching from it.

A prompt's tokens see themselves causally. A completion's tokens see the whole prompt of their group
and themselves causally. The result equals running every prompt + completion alone, forward and
backward; the work on the prompt is done once per group instead of once per rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.learners.packing import Microbatch
from headrace.models.attention import PackedCausal, Padding, attend, visible


class SharedPrefix:
    """An `Attention` over the packed tokens of a `Microbatch`."""

    def __init__(self, batch: Microbatch, windows: Sequence[int | None]) -> None:
        device = batch.input_ids.device
        self._num_prompt_tokens = sum(batch.prompt_lengths)
        self._windows = tuple(windows)
        self._prompts = PackedCausal(batch.prompt_lengths, windows, device)
        # Completions of one token feed nothing in and have no row here.
        rows = [row for row, length in enumerate(batch.completion_lengths) if length > 0]
        self._lengths = [batch.completion_lengths[row] for row in rows]
        owners = [batch.prompt_of_completion[row] for row in rows]
        self._owner = torch.tensor(owners, dtype=torch.int64, device=device)
        self._completions = Padding(self._lengths, offset=self._num_prompt_tokens, device=device)
        lengths = torch.tensor(batch.prompt_lengths, device=device)[self._owner]
        self._masks = {window: self._mask(lengths, window) for window in set(self._windows)}

    def _mask(self, prompt_lengths: Tensor, window: int | None) -> Tensor:
        """[R, T, P + T]: prompt columns first; padding columns of the prompt are seen by no one."""
        device = prompt_lengths.device
        prompt_width, width = self._prompts.padding.shape[1], self._completions.shape[1]
        columns = torch.arange(width, device=device)
        queries = prompt_lengths.unsqueeze(1) + columns
        prompt_columns = torch.arange(prompt_width, device=device)
        in_prompt = visible(queries, prompt_columns.expand(len(prompt_lengths), -1), window)
        in_prompt &= (prompt_columns < prompt_lengths.unsqueeze(1)).unsqueeze(1)
        in_completion = visible(columns, columns, window).expand(len(prompt_lengths), -1, -1)
        return torch.cat((in_prompt, in_completion), dim=-1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        of_prompts = self._prompts(layer, query, key, value)
        if not self._lengths:
            return of_prompts
        pad = self._completions.pad
        mixed = attend(
            pad(query),
            torch.cat((self._prefix(key), pad(key)), dim=1),
            torch.cat((self._prefix(value), pad(value)), dim=1),
            self._masks[self._windows[layer]],
        )
        return torch.cat((of_prompts, self._completions.unpad(mixed)))

    def _prefix(self, packed: Tensor) -> Tensor:
        """[R, P, ...]: the prompt of each completion."""
        return self._prompts.padding.pad(packed).index_select(0, self._owner)
