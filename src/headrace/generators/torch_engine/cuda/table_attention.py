"""Decode attention that reads a block table as it is: every shape is known before any value is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.models.decoder_config import DecoderConfig

PagedDecode: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int | None], Tensor]
"""(query, keys, values, table, positions, window) -> mixed values; see `paged_decode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """What a decode pass reads about its n rows, on the device."""

    numbers: Tensor
    """[3, n] int64: each row's token, its position, and the block its key and value go to."""
    table: Tensor
    """[n, T] int32: the blocks of each row, as many as its position needs, and then anything."""


class TableAttention:
    """An `Attention` over one new token of every row."""

    def __init__(
        self, cache: KVCache, config: DecoderConfig, inputs: DecodeInputs, mix: PagedDecode
    ) -> None:
        self._cache, self._mix = cache, mix
        self._table = inputs.table
        _, self._positions, self._targets = inputs.numbers
        self._offsets = self._positions % cache.block_size
        self._windows = config.windows

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        self._cache.write(layer, self._targets, self._offsets, key, value)
        keys, values = self._cache.read(layer, slice(None))
        window = self._windows[layer]
        return self._mix(query, keys, values, self._table, self._positions, window)


def inputs_of(numbers: Tensor, table: Tensor, device: torch.device) -> DecodeInputs:
    """Return ``numbers`` [3, n] and ``table`` [n, T] on ``device``."""
    return DecodeInputs(numbers=numbers.to(device), table=table.to(torch.int32).to(device))
