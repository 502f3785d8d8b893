"""A `Runner` of a model that only transformers computes: slow, and the same mathematics.

It keeps no cache: for every token it computes the whole rollout again, in rows padded on the right.
So a rollout always comes from one set of weights as a whole, whatever ``on_update`` says, and what
the engine has it do with blocks of the cache is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.errors import WeightSyncError
from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.scheduler import Part
from headrace.generators.torch_engine.weight_set import prove
from headrace.models.foreign import load_foreign
from headrace.models.foreign_config import ForeignConfig
from headrace.models.weights import content, misfits

PASS_TOKENS = 8192
"""Cells of one forward pass, padding included; a longer row goes alone."""


class ForeignRunner:
    """Runs one model of transformers'."""

    def __init__(self, config: ForeignConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ModelError if the model cannot be read."""
        # With its buffers, which are no part of an update: they never change.
        decoder = load_foreign(config.directory, dtype, device)
        self._decoder = decoder.requires_grad_(requires_grad=False)
        self._weights = dict(decoder.named_parameters())
        self._staged: dict[str, Tensor] = {}
        self._device = device

    @property
    def device(self) -> torch.device:
        """See `Runner`."""
        return self._device

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Runner`."""
        if wrong := misfits(self._weights, tensors):
            raise WeightSyncError(wrong)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Runner`."""
        for name, weight in self._weights.items():
            weight.copy_(tensors[name])

    def verify(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """See `Runner`."""
        _verify(self._weights, tensors, published)

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """See `Runner`."""
        if not self._staged:
            self._staged = {name: torch.empty_like(w) for name, w in self._weights.items()}
        for name, weight in self._staged.items():
            weight.copy_(tensors[name])
        _verify(self._staged, tensors, published)

    @torch.no_grad()
    def swap(self) -> None:
        """See `Runner`."""
        for name, weight in self._weights.items():
            weight.data, self._staged[name] = self._staged[name], weight.data

    def reserve(self, num_blocks: int, at_most: int) -> None:
        """See `Runner`. There is no cache."""

    def clear_cache(self) -> None:
        """See `Runner`. There is no cache."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner`. There is no cache."""

    def wipe_blocks(self, blocks: Sequence[int]) -> None:
        """See `Runner`. There is no cache."""

    def prefill(self, parts: Sequence[Part]) -> Tensor:
        """See `Runner`. Of the parts that complete their branch; the others wait for theirs."""
        whole = [part.branch for part in parts if part.num_tokens == part.branch.num_left]
        return self._next_logits([torch.tensor(branch.token_ids) for branch in whole])

    def decode(self, running: RunningRollouts) -> Tensor:
        """See `Runner`."""
        lengths = running.num_generated.tolist()
        return self._next_logits(
            [
                torch.cat((torch.tensor(ticket.request.prompt.token_ids), ids[:length]))
                for ticket, ids, length in zip(
                    running.tickets, running.token_ids, lengths, strict=True
                )
            ]
        )

    def _next_logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """Return [n, vocab] in fp32: what follows each of ``sequences``."""
        found = [torch.empty(0, self._decoder.config.vocab_size, device=self._device)]
        for part in _passes(sequences):
            ids = pad_sequence(list(part), batch_first=True).to(self._device)
            last = torch.tensor([len(sequence) - 1 for sequence in part], device=self._device)
            rows = torch.arange(len(part), device=self._device)
            hidden = self._decoder.hidden(ids, rows, last)
            found.append(self._decoder.logits(hidden).float())
        return torch.cat(found)


def _verify(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor], published: int) -> None:
    prove({name: content(weight) for name, weight in held.items()}, held, tensors, published)


def _passes(sequences: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield runs of ``sequences``, in order, that fit one pass."""
    start = longest = 0
    for index, sequence in enumerate(sequences):
        longest = max(longest, len(sequence))
        if index > start and longest * (index + 1 - start) > PASS_TOKENS:
            yield sequences[start:index]
            start, longest = index, len(sequence)
    if sequences:
        yield sequences[start:]
