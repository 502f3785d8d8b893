"""Attention in which a query does the same arithmetic alone and among others.

Queries are laid into tiles: in a prefill those of one sequence that stand in the same cache block,
in a decode step each one alone. A tile meets the keys of one block at a time; such pairs are what
is multiplied, in numbers that agree (`Shapes`). A query's scores are then exponentiated under their
exact maximum, and sums run through its blocks in the order of the sequence. Keys that it may not
see weigh 0 and add exactly nothing, so it does not matter how many of them there are.

Nothing is shared between queries but reading a block. `paged_attention` is the faster form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headrace.generators.torch_engine.invariant.sizes import cut
from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.models.attention import visible
from headrace.models.decoder_config import DecoderConfig


class Combine(Protocol):
    """Combines two tensors, element by element."""

    def __call__(self, left: Tensor, right: Tensor, /, *, out: Tensor) -> Tensor:
        """Write the result to ``out``."""
        ...


def score(queries: Tensor, keys: Tensor) -> Tensor:
    """Return [pairs, kv_heads, m, block_size] of [pairs, kv_heads, m, D] and cached keys."""
    scores: Tensor = queries @ keys.transpose(-1, -2)
    return scores.float()


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return [pairs, kv_heads, m, D] of [pairs, kv_heads, m, block_size] and cached values."""
    mixed: Tensor = weights.to(values.dtype) @ values
    return mixed.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Where n rows stand in the tiles of their queries."""

    tables: Tensor
    """[t, T] cache blocks of each tile's sequence."""
    num_queries: int
    """Places of each tile."""
    tile: Tensor
    """[n] of each row."""
    place: Tensor
    """[n] of each row in its tile."""
    positions: Tensor
    """[n] of each row in its sequence."""

    @classmethod
    def single(cls, tables: Tensor, positions: Tensor, num_queries: int) -> Tiles:
        """Return a tile for each row, whose blocks are in the row of ``tables`` of its number."""
        rows = torch.arange(len(positions), device=positions.device)
        return cls(
            tables=tables,
            num_queries=num_queries,
            tile=rows,
            place=torch.zeros_like(rows),
            positions=positions,
        )

    @classmethod
    def joined(cls, tables: Tensor, sequence: Tensor, positions: Tensor, block_size: int) -> Tiles:
        """Return a tile for the rows of each sequence and block, which follow each other.

        Row i is of sequence ``sequence[i]``, whose blocks are that row of ``tables``.
        """
        block = torch.stack((sequence, positions // block_size))
        found, tile = torch.unique_consecutive(block, dim=1, return_inverse=True)
        return cls(
            tables=tables[found[0]],
            num_queries=block_size,
            tile=tile,
            place=positions % block_size,
            positions=positions,
        )


class _Reads:
    """Which pairs of a tile and a block a layer multiplies, and how their results are summed.

    Tiles are ranked by their number of blocks, most first, and pairs are ordered by the place of
    the block among those of its tile, then by rank. So the pairs of one place are a run that begins
    with rank 0, and adding run after run adds up the blocks of every tile in their order.
    """

    def __init__(
        self, tiles: Tiles, block_size: int, window: int | None, sizes: Sequence[int]
    ) -> None:
        device = tiles.positions.device
        queries = _query_positions(tiles)
        first = torch.zeros_like(queries[:, 0])
        if window is not None:
            first = (queries.amin(1) - window + 1).clamp_(min=0) // block_size
        num_blocks = queries.amax(1) // block_size + 1 - first
        by_rank = num_blocks.argsort(descending=True, stable=True)
        self.row_ranks = by_rank.argsort()[tiles.tile]
        """[n] of each row's tile."""
        places = torch.arange(int(num_blocks.max()), device=device).unsqueeze(1)
        place, rank = (places < num_blocks[by_rank]).nonzero(as_tuple=True)
        counts = torch.bincount(place)
        self._runs = list(zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True))
        self.chunks = [slice(part.start, part.start + size) for part, size in cut(len(rank), sizes)]
        # What fills the last chunk up is the first pair once more; no run ends behind it.
        padding = (0, self.chunks[-1].stop - len(rank))
        place, self.ranks = functional.pad(place, padding), functional.pad(rank, padding)
        """[P] of each pair's tile."""
        tile = by_rank[self.ranks]
        place = first[tile] + place
        self.blocks = tiles.tables[tile, place]
        """[P] that each pair reads."""
        keys = (place * block_size).unsqueeze(1) + torch.arange(block_size, device=device)
        sees = visible(queries[tile], keys, window)
        bias = torch.zeros(sees.shape, device=device).masked_fill_(~sees, -torch.inf)
        self.bias = bias[:, None, :, None, :]
        """[P, 1, queries, 1, block_size]: 0 where a query sees a key, -inf elsewhere."""

    def fold(self, combine: Combine, pairs: Tensor, into: Tensor) -> None:
        """Combine all ``pairs`` [P, ...] of each tile with its rank's row of ``into`` [t, ...]."""
        for start, count in self._runs:
            combine(into[:count], pairs[start : start + count], out=into[:count])

    def add(self, chunk: slice, pairs: Tensor, into: Tensor) -> None:
        """Add the ``pairs`` [size, ...] of one chunk to their ranks' rows of ``into`` [t, ...]."""
        for start, count in self._runs:
            low, high = max(start, chunk.start), min(start + count, chunk.stop)
            if low < high:
                into[low - start : high - start] += pairs[low - chunk.start : high - chunk.start]


def _query_positions(tiles: Tiles) -> Tensor:
    """[t, queries] positions; places without a row repeat the highest of their tile."""
    highest = tiles.positions.new_zeros(len(tiles.tables))
    highest.scatter_reduce_(0, tiles.tile, tiles.positions, "amax")
    queries = highest.unsqueeze(1).repeat(1, tiles.num_queries)
    queries[tiles.tile, tiles.place] = tiles.positions
    return queries


def _sum_last(values: Tensor) -> Tensor:
    """Sum over the last axis, a power of two long, by adding halves: one order on every device."""
    while (width := values.shape[-1]) > 1:
        values = values[..., : width // 2] + values[..., width // 2 :]
    return values.squeeze(-1)


class TiledAttention:
    """An `Attention` over the rows of `Tiles`, whose keys and values it adds to the cache.

    A pass may have more rows than that, behind them; these see nothing and get zeros.
    """

    def __init__(
        self, cache: KVCache, config: DecoderConfig, tiles: Tiles, num_pairs: Sequence[int]
    ) -> None:
        """``num_pairs`` are the numbers of pairs that agree, ascending."""
        size, repeats = cache.block_size, config.num_heads // config.num_kv_heads
        self._cache, self._tiles, self._scale = cache, tiles, config.head_dim**-0.5
        self._shape = (len(tiles.tables), config.num_kv_heads, tiles.num_queries, repeats)
        """[t, kv_heads, queries, repeats], the last two of which are the rows of a product."""
        self._windows = config.windows
        self._reads = {w: _Reads(tiles, size, w, num_pairs) for w in set(config.windows)}
        self._targets = tiles.tables[tiles.tile, tiles.positions // size]
        self._offsets = tiles.positions % size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        num_rows, width = len(self._tiles.tile), query.shape[-1]
        _, kv_heads, _, repeats = self._shape
        self._cache.write(layer, self._targets, self._offsets, key[:num_rows], value[:num_rows])
        reads = self._reads[self._windows[layer]]
        at = (reads.row_ranks, slice(None), self._tiles.place)
        tiles = query.new_zeros(*self._shape, width)
        tiles[at] = query[:num_rows].view(num_rows, kv_heads, repeats, width) * self._scale
        weights = self._scores(layer, reads, tiles.flatten(2, 3))
        total = self._exponentiate(reads, weights)
        mixed = self._mixed(layer, reads, weights, width) / total.unsqueeze(-1)
        found = mixed.view(*tiles.shape)[at].flatten(1, 2).to(query.dtype)
        return functional.pad(found, (0, 0, 0, 0, 0, len(query) - num_rows))

    def _scores(self, layer: int, reads: _Reads, tiles: Tensor) -> Tensor:
        """[P, kv_heads, m, block_size] in float32, -inf where a query does not see a key."""
        shape = (len(reads.ranks), *tiles.shape[1:3], self._cache.block_size)
        scores = torch.empty(shape, device=tiles.device)
        for chunk in reads.chunks:
            keys = self._cache.keys(layer, reads.blocks[chunk])
            scores[chunk] = score(tiles.index_select(0, reads.ranks[chunk]), keys)
        scores.view(len(scores), *self._shape[1:], -1).add_(reads.bias)
        return scores

    def _exponentiate(self, reads: _Reads, scores: Tensor) -> Tensor:
        """Turn ``scores`` into weights; return [t, kv_heads, m], what those of a query sum to."""
        shape = (self._shape[0], *scores.shape[1:3])
        top = scores.new_full(shape, -torch.inf)
        reads.fold(torch.maximum, scores.amax(-1), top)
        scores.sub_(top.index_select(0, reads.ranks).unsqueeze(-1)).exp_()
        total = scores.new_zeros(shape)
        reads.fold(torch.add, _sum_last(scores), total)
        return total

    def _mixed(self, layer: int, reads: _Reads, weights: Tensor, width: int) -> Tensor:
        """[t, kv_heads, m, width] in float32: what the values of each tile's blocks add up to."""
        mixed = weights.new_zeros(self._shape[0], *weights.shape[1:3], width)
        for chunk in reads.chunks:
            values = self._cache.values(layer, reads.blocks[chunk])
            reads.add(chunk, mix(weights[chunk], values), mixed)
        return mixed
