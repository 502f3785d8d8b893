"""Attention over cache blocks: prefilling parts of sequences, and decoding one token of each.

Decoding goes block by block instead of row by row: a block that several rollouts share is read
once, against the queries of all of them together, and a block of one rollout is read where it
lies. The scores then meet row by row for the softmax, so the result is that of reading every
rollout's own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.models.attention import Padding, attend, visible
from headrace.models.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readers:
    """Blocks that are read by equally many rows, and those rows."""

    blocks: Tensor | slice
    """[B] or, when they lie side by side, where."""
    rows: Tensor
    """[B, m] rows that read each block; the row past the last one reads for nobody."""
    places: Tensor
    """[B, m] which of the row's blocks it is."""


class BlockTable:
    """Which blocks each running row reads, prepared for decoding until a row or block changes."""

    def __init__(self, table: Tensor, num_blocks: Tensor) -> None:
        """``table`` [n, T] block numbers, of which row i uses the first ``num_blocks`` [n]."""
        self.width = int(num_blocks.max())
        self.num_rows = len(table)
        used = torch.arange(self.width, device=table.device) < num_blocks.unsqueeze(1)
        table = table[:, : self.width]
        rows, places = used.nonzero(as_tuple=True)
        order = table[rows, places].argsort(stable=True)
        rows, places = rows[order], places[order]
        readers_of = torch.bincount(table[rows, places])
        blocks = readers_of.nonzero().flatten()
        counts = readers_of[blocks]
        first = counts.cumsum(0) - counts
        alone = counts == 1
        self.readers: list[_Readers] = []
        if bool(alone.any()):
            at = first[alone]
            self.readers.append(_readers(blocks[alone], rows[at, None], places[at, None]))
        if not bool(alone.all()):
            self.readers.append(
                self._shared(blocks[~alone], first[~alone], counts[~alone], rows, places)
            )

    def _shared(
        self, blocks: Tensor, first: Tensor, counts: Tensor, rows: Tensor, places: Tensor
    ) -> _Readers:
        member = torch.arange(int(counts.max()), device=blocks.device)
        is_real = member < counts.unsqueeze(1)
        at = (first.unsqueeze(1) + member).clamp_(max=len(rows) - 1)
        nobody = torch.full_like(at, self.num_rows)
        return _readers(blocks, torch.where(is_real, rows[at], nobody), places[at])


def _readers(blocks: Tensor, rows: Tensor, places: Tensor) -> _Readers:
    low, high = int(blocks[0]), int(blocks[-1]) + 1
    where = slice(low, high) if high - low == len(blocks) else blocks
    return _Readers(blocks=where, rows=rows, places=places)


class DecodeAttention:
    """An `Attention` over one new token of every row of a `BlockTable`."""

    def __init__(
        self,
        cache: KVCache,
        config: DecoderConfig,
        table: BlockTable,
        positions: Tensor,
        targets: Tensor,
    ) -> None:
        """``positions`` [n] of the new tokens, whose keys and values go to blocks ``targets``."""
        self._cache, self._table, self._targets = cache, table, targets
        self._offsets = positions % cache.block_size
        self._windows, self._scale = config.windows, config.head_dim**-0.5
        self._biases = {window: self._bias(positions, window) for window in set(config.windows)}
        repeats = config.num_heads // config.num_kv_heads
        heads = (table.num_rows + 1, config.num_kv_heads, repeats)
        device = positions.device
        places = (*heads, table.width, cache.block_size)
        # Where no block lies the score stays -inf through all layers.
        self._scores = torch.full(places, -torch.inf, device=device)
        # The last row reads for nobody: with weights of 0 it adds nothing to what is read.
        self._weights = torch.zeros(places, device=device)
        self._mixed = torch.zeros(*heads, config.head_dim, device=device)
        self._query = torch.zeros_like(self._mixed, dtype=cache.dtype)

    def _bias(self, positions: Tensor, window: int | None) -> Tensor:
        """[n, 1, 1, T * block_size]: 0 where a row's query may look, -inf elsewhere."""
        columns = torch.arange(self._table.width * self._cache.block_size, device=positions.device)
        distance = positions.unsqueeze(1) - columns
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return bias[:, None, None, :]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        self._cache.write(layer, self._targets, self._offsets, key, value)
        num_rows = len(query)
        grouped = query.view(num_rows, key.shape[1], -1, query.shape[-1])
        torch.mul(grouped, self._scale, out=self._query[:num_rows])
        blocks = [self._cache.read(layer, readers.blocks) for readers in self._table.readers]
        for readers, (keys, _) in zip(self._table.readers, blocks, strict=True):
            self._score(readers, keys)
        scores = self._scores[:num_rows].flatten(-2)
        scores += self._biases[self._windows[layer]]
        torch.softmax(scores, -1, out=self._weights[:num_rows].flatten(-2))
        self._mixed.zero_()
        for readers, (_, values) in zip(self._table.readers, blocks, strict=True):
            self._mix(readers, values)
        return self._mixed[:num_rows].flatten(1, 2).to(query.dtype)

    def _score(self, readers: _Readers, keys: Tensor) -> None:
        """Fill in the scores of ``keys`` [B, kv_heads, block_size, D] for all their readers."""
        query = self._query[readers.rows].transpose(1, 2)
        # [B, kv_heads, m * repeats, D]: the queries of all readers of a block in one product.
        scores = query.flatten(2, 3) @ keys.transpose(-1, -2)
        scores = scores.view(*query.shape[:4], -1).transpose(1, 2)
        self._scores[readers.rows, :, :, readers.places] = scores.float()

    def _mix(self, readers: _Readers, values: Tensor) -> None:
        """Add what every reader takes from ``values`` [B, kv_heads, block_size, D]."""
        weights = self._weights[readers.rows, :, :, readers.places].to(values.dtype)
        weights = weights.transpose(1, 2)
        mixed = weights.flatten(2, 3) @ values
        mixed = mixed.view(*weights.shape[:4], -1).transpose(1, 2)
        self._mixed.index_add_(0, readers.rows.flatten(), mixed.flatten(0, 1).float())


class PrefillAttention:
    """An `Attention` over new parts of sequences whose beginnings may lie in the cache."""

    def __init__(
        self,
        cache: KVCache,
        config: DecoderConfig,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Part b is tokens ``starts[b]`` to ``starts[b] + lengths[b]`` of blocks ``tables[b]``."""
        device, size = cache.device, cache.block_size
        width = max(-(-(a + n) // size) for a, n in zip(starts, lengths, strict=True))
        # Short tables are filled up with their own first block, which no query may look at there.
        filled = [[*table[:width], *[table[0]] * (width - len(table))] for table in tables]
        self._cache = cache
        self._table = torch.tensor(filled, device=device)
        self._padding = Padding(lengths, device=device)
        first = torch.tensor(starts, device=device).unsqueeze(1)
        columns = torch.arange(self._padding.shape[1], device=device)
        self._windows = tuple(config.windows)
        keys = torch.arange(width * size, device=device)
        queries = first + columns
        self._masks = {w: visible(queries, keys, w) for w in set(self._windows)}
        positions = self._padding.unpad(queries)
        rows = torch.arange(len(tables), device=device).repeat_interleave(
            torch.tensor(lengths, device=device)
        )
        self._targets, self._offsets = self._table[rows, positions // size], positions % size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        self._cache.write(layer, self._targets, self._offsets, key, value)
        shape = self._table.shape
        keys, values = (
            # [B * T, kv_heads, size, D] -> [B, T * size, kv_heads, D]
            part.view(*shape, *part.shape[1:]).permute(0, 1, 3, 2, 4).flatten(1, 2)
            for part in self._cache.read(layer, self._table.flatten())
        )
        mixed = attend(self._padding.pad(query), keys, values, self._masks[self._windows[layer]])
        return self._padding.unpad(mixed)
