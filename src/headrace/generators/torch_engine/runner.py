"""Execution: prefill and decode forward passes over the cache. Decides nothing.

Owns the generator's copy of the weights and the invariant that no forward pass ever sees a mixture
of two versions: `load` replaces all of them between two passes, on the thread that runs the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.scheduler import Branch
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig

MAX_NAMED = 3
"""Weights that an error names; a half-sent model would fill the screen."""


class ModelRunner:
    """A decoder with its cache."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        with torch.device("meta"):
            decoder = Decoder(config)
        # Uninitialised on purpose: the generator refuses to sample before its first weights.
        decoder = decoder.to_empty(device=device).to(dtype)
        self._decoder = decoder.requires_grad_(requires_grad=False)
        self._decoder.model.fill_rope(config)
        self._cache = KVCache(config, dtype, device)
        self.config = config

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace every weight by the one of the same name in ``tensors``.

        Raises WeightSyncError, before anything is replaced, when a name, a shape or a dtype does
        not fit: a cast here would leave weights that nobody published.
        """
        held = self.weights()
        if misfits := list(_misfits(held, tensors)):
            more = len(misfits) - MAX_NAMED
            raise WeightSyncError(
                "; ".join(misfits[:MAX_NAMED]) + f" (and {more} more)" * (more > 0)
            )
        with torch.no_grad():
            for name, weight in held.items():
                weight.copy_(tensors[name])

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> weight as held."""
        return dict(self._decoder.named_parameters())

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room in the cache for ``num_slots`` rollouts of ``length`` tokens."""
        self._cache.ensure(num_slots, length)

    def clear_cache(self) -> None:
        """Forget every slot."""
        self._cache.clear()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` cached tokens of slot ``source`` over slot ``target``."""
        self._cache.move(source, target, length)

    def prefill(self, branches: Sequence[Branch], first_slot: int) -> Tensor:
        """Compute each branch's prompt once, fill its slots, and return next-token logits.

        Slots from ``first_slot`` on are given out in the order of ``branches`` and their tickets.
        Returns [sum of tickets, vocab].
        """
        lengths = [len(branch.prompt.token_ids) for branch in branches]
        sizes = [len(branch.tickets) for branch in branches]
        ids = torch.tensor([token for branch in branches for token in branch.prompt.token_ids])
        attention = _PrefillAttention(self._cache, self.config, lengths, sizes, first_slot)
        hidden = self._decoder(
            ids.to(self._device), positions_of(lengths).to(self._device), attention
        )
        ends = torch.tensor(lengths).cumsum(0) - 1
        logits = self._decoder.logits(hidden[ends.to(self._device)])
        return logits.repeat_interleave(torch.tensor(sizes).to(self._device), dim=0)

    def decode(self, running: RunningRollouts) -> Tensor:
        """Feed every running rollout its last token; return next-token logits [n, vocab]."""
        positions = running.cached_length.to(self._device)
        attention = _DecodeAttention(self._cache, self.config, positions)
        hidden = self._decoder(running.last_token.to(self._device), positions, attention)
        return self._decoder.logits(hidden)


def _misfits(held: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> Iterator[str]:
    """Say in what way the two sets of weights differ in kind."""
    for name in sorted(held.keys() | published.keys()):
        if name not in published:
            yield f"{name} was not published"
        elif name not in held:
            yield f"{name} was published, and this model has no such weight"
        elif _kind(held[name]) != _kind(published[name]):
            yield f"{name} is {_kind(published[name])}, the generator holds {_kind(held[name])}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class _PrefillAttention:
    """Causal attention that also writes each prompt's keys and values into all of its slots."""

    def __init__(
        self,
        cache: KVCache,
        config: DecoderConfig,
        lengths: Sequence[int],
        sizes: Sequence[int],
        first_slot: int,
    ) -> None:
        device = cache.device
        self._causal = PackedCausal(lengths, config.windows, device)
        self._cache = cache
        self._lengths, self._sizes = lengths, sizes
        self._first_slot = first_slot

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache.view(layer, self._cache.num_slots, self._cache.length)
        slot, row = self._first_slot, 0
        for length, size in zip(self._lengths, self._sizes, strict=True):
            # [P, kv_heads, head_dim] -> [kv_heads, P, head_dim], one copy for each rollout.
            keys[slot : slot + size, :, :length] = key[row : row + length].transpose(0, 1)
            values[slot : slot + size, :, :length] = value[row : row + length].transpose(0, 1)
            slot, row = slot + size, row + length
        return self._causal(layer, query, key, value)


class _DecodeAttention:
    """One query a slot against everything that slot has cached, its own key included."""

    def __init__(self, cache: KVCache, config: DecoderConfig, positions: Tensor) -> None:
        """``positions`` [n] of the tokens being decoded; slot i holds rollout i."""
        self._cache = cache
        self._num_slots = len(positions)
        self._length = int(positions.max()) + 1
        self._slots = torch.arange(self._num_slots, device=positions.device)
        self._positions = positions
        self._windows = config.windows
        self._scale = config.head_dim**-0.5
        self._biases = {window: self._bias(window) for window in set(config.windows)}

    def _bias(self, window: int | None) -> Tensor:
        """[n, 1, 1, L]: 0 where a slot's query may look, -inf elsewhere."""
        distance = self._positions.unsqueeze(1) - torch.arange(
            self._length, device=self._positions.device
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return bias[:, None, None, :]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache.view(layer, self._num_slots, self._length)
        keys[self._slots, :, self._positions] = key
        values[self._slots, :, self._positions] = value
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        scores = (grouped * self._scale) @ keys.transpose(-1, -2)
        weights = torch.softmax(scores.float() + self._biases[self._windows[layer]], dim=-1)
        return (weights.to(values.dtype) @ values).flatten(1, 2)
