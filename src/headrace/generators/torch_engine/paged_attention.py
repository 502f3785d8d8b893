"""Attention over cache blocks: prefilling parts of sequences, and decoding one token of each.

Decoding goes block by block instead of row by row: the beginning that several rollouts share is
read once, against the queries of all of them together, and a block of one rollout is read where
it lies. The scores then meet row by row for the softmax, so the result is that of reading every
rollout's own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.models.attention import AttentionMask, Padding, attend, visible
from headrace.models.decoder_config import DecoderConfig

STRETCH = 1.5
"""A stretch of the cache is read as it lies, not copied, when at most so many of its blocks count
for each one that is wanted."""
NO_BLOCK = -1
"""Fills up short beginnings; no block has this number."""
BEYOND = 1 << 40
"""Stands for the position of a cell that holds no token of a row: no query looks so far ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Leading blocks that several rows read, one run of blocks for each set of rows."""

    rows: Tensor
    """[S, m] the rows that read each run; the row past the last one reads for nobody."""
    blocks: Tensor
    """[S, L] filled up with each run's own first block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """Blocks that are read for one row each, mostly by that row alone."""

    blocks: Tensor | slice
    """[B] or, where they lie close together, the stretch that holds them."""
    rows: Tensor
    """[B] the row that reads each; the row past the last one for blocks of nobody's."""
    places: Tensor
    """[B] which of the row's own blocks it is."""


class BlockTable:
    """Which blocks each running row reads, prepared for decoding until a row or block changes."""

    def __init__(self, table: Tensor, num_blocks: Tensor, block_size: int) -> None:
        """``table`` [n, T] block numbers, of which row i uses the first ``num_blocks`` [n]."""
        self.num_rows = len(table)
        table = table[:, : int(num_blocks.max())]
        places = torch.arange(table.shape[1], device=table.device)
        used = places < num_blocks.unsqueeze(1)
        num_readers = torch.bincount(table[used])
        common = used & (num_readers[torch.where(used, table, table[:, :1])] > 1)
        # Rows share what they begin with. After a difference they may still read one block, where
        # the same tokens were computed twice; it is then read for each of them.
        num_common = common.long().cumprod(1).sum(1)
        num_own = num_blocks - num_common
        self.num_shared = int(num_common.max())
        """Blocks of the longest shared beginning: the first columns of every row's scores."""
        self.num_own = int(num_own.max())
        self.shared = self._shared(table, num_common) if self.num_shared else None
        self.own = self._own(table, used & (places >= num_common.unsqueeze(1)), num_common)
        self.positions = torch.cat(
            (
                _positions(self.num_shared, num_common, torch.zeros_like(num_common), block_size),
                _positions(self.num_own, num_own, num_common, block_size),
            ),
            dim=1,
        )
        """[n, columns] of the token in each cell of the scores."""

    def _shared(self, table: Tensor, num_common: Tensor) -> _Shared:
        readers = num_common.nonzero().flatten()
        places = torch.arange(self.num_shared, device=table.device)
        within = places < num_common[readers].unsqueeze(1)
        beginnings = torch.where(within, table[readers, : self.num_shared], NO_BLOCK)
        _, run, counts = torch.unique(beginnings, dim=0, return_inverse=True, return_counts=True)
        order = run.argsort(stable=True)
        first = counts.cumsum(0) - counts
        member = torch.arange(len(order), device=table.device) - first[run[order]]
        rows = torch.full((len(counts), int(counts.max())), self.num_rows, device=table.device)
        rows[run[order], member] = readers[order]
        leaders = rows[:, 0]
        blocks = table[leaders, : self.num_shared]
        filled = places < num_common[leaders].unsqueeze(1)
        return _Shared(rows=rows, blocks=torch.where(filled, blocks, blocks[:, :1]))

    def _own(self, table: Tensor, own: Tensor, num_common: Tensor) -> _Own:
        rows, places = own.nonzero(as_tuple=True)
        blocks = table[rows, places]
        places = places - num_common[rows]
        if not len(blocks):
            return _Own(blocks=blocks, rows=rows, places=places)
        low, high = int(blocks.min()), int(blocks.max()) + 1
        is_once = int(torch.bincount(blocks - low).max()) == 1
        if high - low > STRETCH * len(blocks) or not is_once:
            return _Own(blocks=blocks, rows=rows, places=places)
        stretch_rows = torch.full((high - low,), self.num_rows, device=table.device)
        stretch_rows[blocks - low] = rows
        stretch_places = torch.zeros_like(stretch_rows)
        stretch_places[blocks - low] = places
        return _Own(blocks=slice(low, high), rows=stretch_rows, places=stretch_places)


def _positions(width: int, counts: Tensor, skipped: Tensor, block_size: int) -> Tensor:
    """[n, width * block_size] positions of ``counts`` [n] blocks after ``skipped`` [n] others."""
    columns = torch.arange(width * block_size, device=counts.device)
    held = columns < (counts * block_size).unsqueeze(1)
    return torch.where(held, (skipped * block_size).unsqueeze(1) + columns, BEYOND)


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
        split = table.num_shared * cache.block_size
        blocks = (table.num_own, cache.block_size)
        # The last row reads for nobody: with weights of 0 it adds nothing to what is read.
        scores, weights = torch.zeros(2, *heads, table.positions.shape[1], device=cache.device)
        self._scores, self._weights = scores[:-1], weights[:-1]
        self._shared_scores, self._shared_weights = scores[..., :split], weights[..., :split]
        self._own_scores = scores[..., split:].unflatten(-1, blocks)
        self._own_weights = weights[..., split:].unflatten(-1, blocks)
        self._mixed = torch.zeros(*heads, config.head_dim, device=cache.device)
        self._query = torch.zeros_like(self._mixed, dtype=cache.dtype)

    def _bias(self, positions: Tensor, window: int | None) -> Tensor:
        """[n, 1, 1, columns]: 0 where a row's query may look, -inf elsewhere."""
        distance = positions.unsqueeze(1) - self._table.positions
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return bias[:, None, None, :]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        self._cache.write(layer, self._targets, self._offsets, key, value)
        grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
        torch.mul(grouped, self._scale, out=self._query[:-1])
        own = self._table.own
        own_keys, own_values = self._cache.read(layer, own.blocks)
        self._own_scores[own.rows, :, :, own.places] = self._score(own.rows, own_keys)
        shared, shared_values = self._table.shared, None
        if shared is not None:
            shared_keys, shared_values = self._cache.read_runs(layer, shared.blocks)
            self._shared_scores[shared.rows] = self._score_shared(shared.rows, shared_keys)
        self._scores += self._biases[self._windows[layer]]
        torch.softmax(self._scores, -1, out=self._weights)
        self._mixed.zero_()
        if shared is not None and shared_values is not None:
            self._mixed[shared.rows] = self._mix_shared(shared.rows, shared_values)
        weights = self._own_weights[own.rows, :, :, own.places].to(own_values.dtype)
        self._mixed.index_add_(0, own.rows, (weights @ own_values).float())
        return self._mixed[:-1].flatten(1, 2).to(query.dtype)

    def _score(self, rows: Tensor, keys: Tensor) -> Tensor:
        """[B, kv_heads, repeats, block_size]: scores of each block's one reader."""
        scores: Tensor = self._query.index_select(0, rows) @ keys.transpose(-1, -2)
        return scores.float()

    def _score_shared(self, rows: Tensor, keys: Tensor) -> Tensor:
        """[S, m, kv_heads, repeats, L]: the queries of all readers of a run in one product."""
        query = self._query[rows].transpose(1, 2)
        scores: Tensor = query.flatten(2, 3) @ keys.transpose(-1, -2)
        scores = scores.view(*query.shape[:4], -1).transpose(1, 2)
        return scores.float()

    def _mix_shared(self, rows: Tensor, values: Tensor) -> Tensor:
        """[S, m, kv_heads, repeats, D]: what every reader takes from the values of its run."""
        weights = self._shared_weights[rows].to(values.dtype).transpose(1, 2)
        mixed: Tensor = weights.flatten(2, 3) @ values
        mixed = mixed.view(*weights.shape[:4], -1).transpose(1, 2)
        return mixed.float()


def filled_table(tables: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Return the first ``width`` blocks of each of ``tables`` [B, width] int64.

    Short ones are filled up with their own first block, which no query may look at there.
    """
    filled = [[*table[:width], *[table[0]] * (width - len(table))] for table in tables]
    return torch.tensor(filled, device=device)


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
        self._cache = cache
        self._table = filled_table(tables, width, device)
        self._padding = Padding(lengths, device=device)
        first = torch.tensor(starts, device=device).unsqueeze(1)
        columns = torch.arange(self._padding.shape[1], device=device)
        self._windows = tuple(config.windows)
        keys = torch.arange(width * size, device=device)
        queries = first + columns
        self._masks = {w: AttentionMask(visible(queries, keys, w)) for w in set(self._windows)}
        positions = self._padding.unpad(queries)
        rows = torch.arange(len(tables), device=device).repeat_interleave(
            torch.tensor(lengths, device=device)
        )
        self._targets, self._offsets = self._table[rows, positions // size], positions % size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        self._cache.write(layer, self._targets, self._offsets, key, value)
        keys, values = self._cache.read_runs(layer, self._table)
        mixed = attend(
            self._padding.pad(query),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self._masks[self._windows[layer]],
        )
        return self._padding.unpad(mixed)
