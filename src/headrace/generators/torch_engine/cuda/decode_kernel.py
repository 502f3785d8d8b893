"""Paged decode attention as a Triton kernel: one query token per row, read through a block table.

The only module that imports triton, and only a runner on a CUDA device imports it. A row's
sequence is cut into splits, so that few long rows occupy a device as many short ones do: each
split is an online softmax of its own (Milakov and Gimelshein 2018, arXiv 1805.02867), and a second
kernel weighs the splits (Dao et al. 2023, "Flash-Decoding"). All sums are in fp32. How the work is
cut depends on shapes alone and on no value that lies on the device, so that a graph can be captured
of it.

Left out: a beginning that several rows share is read once for each of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Tokens whose scores are computed at once."""
LEAST_ROWS = 16
"""Rows of the smallest product of tensor cores; a group of query heads is filled up to it."""
LEAST_COLUMNS = 16
"""As `LEAST_ROWS`, of a head's width."""
MOST_SPLITS = 16
ENOUGH_PROGRAMS = 512
"""About what occupies a large device: splits are added until there are so many programs."""
STAGES = 2
"""Tiles on their way at once."""
WIDEST = 512
"""Bytes of a head's key, filled up, of which `TILE` fit the shared memory of every device."""


@triton.jit
def _split_kernel(
    query,
    keys,
    values,
    table,
    positions,
    partial,
    largest,
    total,
    scale,
    window,
    num_kv_heads,
    block_size,
    table_row,
    num_splits,
    REPEATS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One row, one key head, one split. HEADS and COLUMNS are REPEATS and WIDTH filled up."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    end = position + 1
    begin = tl.maximum(end - window, 0)
    tiles = tl.cdiv(tl.cdiv(end - begin, TOKENS), num_splits)
    low = begin + split * tiles * TOKENS
    high = tl.minimum(low + tiles * TOKENS, end)
    heads, columns = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    is_cell = (heads < REPEATS)[:, None] & is_column[None, :]
    own = (row.to(tl.int64) * num_kv_heads + kv_head) * REPEATS + heads
    asked = tl.load(query + own[:, None] * WIDTH + columns[None, :], mask=is_cell, other=0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, COLUMNS], tl.float32)
    for start in range(low, high, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        is_token = tokens < high
        places = row.to(tl.int64) * table_row + tokens // block_size
        blocks = tl.load(table + places, mask=is_token, other=0).to(tl.int64)
        cells = (blocks * num_kv_heads + kv_head) * block_size + tokens % block_size
        held = is_token[:, None] & is_column[None, :]
        key = tl.load(keys + cells[:, None] * WIDTH + columns[None, :], mask=held, other=0.0)
        value = tl.load(values + cells[:, None] * WIDTH + columns[None, :], mask=held, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        share = tl.exp(scores - higher[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        taken = tl.dot(share.to(value.dtype), value, input_precision="ieee")
        mixed = mixed * shrink[:, None] + taken
        top = higher
    place = (row.to(tl.int64) * num_kv_heads + kv_head) * num_splits + split
    lines = place * REPEATS + heads
    tl.store(partial + lines[:, None] * WIDTH + columns[None, :], mixed, mask=is_cell)
    tl.store(largest + lines, top, mask=heads < REPEATS)
    tl.store(total + lines, weight, mask=heads < REPEATS)


@triton.jit
def _join_kernel(
    partial,
    largest,
    total,
    mixed,
    num_splits,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One query head of one row. SPLITS is ``num_splits`` filled up."""
    group, head = tl.program_id(0), tl.program_id(1)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    is_split, is_column = splits < num_splits, columns < WIDTH
    lines = (group.to(tl.int64) * num_splits + splits) * REPEATS + head
    top = tl.load(largest + lines, mask=is_split, other=float("-inf"))
    # A split without tokens has -inf and counts for nothing; the newest token is in one of them.
    factor = tl.exp(top - tl.max(top, 0))
    weight = tl.sum(factor * tl.load(total + lines, mask=is_split, other=0.0), 0)
    cells = lines[:, None] * WIDTH + columns[None, :]
    parts = tl.load(partial + cells, mask=is_split[:, None] & is_column[None, :], other=0.0)
    found = tl.sum(factor[:, None] * parts, 0) / weight
    line = group.to(tl.int64) * REPEATS + head
    tl.store(mixed + line * WIDTH + columns, found.to(mixed.dtype.element_ty), mask=is_column)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    window: int | None,
) -> Tensor:
    """Return [n, heads, D]: each query [n, heads, D] mixes the values of its row's tokens.

    ``keys`` and ``values`` [blocks, kv_heads, block_size, D] hold token t of row i in block
    ``table[i, t // block_size]``, up to and with the query's own token at ``positions[i]``. Of a
    window the last ``window`` tokens count. Blocks past a row's last one are not looked at.
    """
    num_rows, num_heads, width = query.shape
    _, num_kv_heads, block_size, _ = keys.shape
    assert keys.is_contiguous(), "keys lie as their shape says"
    assert values.is_contiguous(), "values lie as their shape says"
    repeats = num_heads // num_kv_heads
    num_splits = splits_for(num_rows * num_kv_heads)
    shape = (num_rows, num_kv_heads, num_splits, repeats)
    partial = torch.empty(*shape, width, dtype=torch.float32, device=query.device)
    largest, total = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
    mixed = torch.empty(num_rows, num_heads, width, dtype=query.dtype, device=query.device)
    columns = max(triton.next_power_of_2(width), LEAST_COLUMNS)
    _split_kernel[(num_rows, num_kv_heads, num_splits)](
        query.contiguous(),
        keys,
        values,
        table,
        positions,
        partial,
        largest,
        total,
        width**-0.5,
        window or torch.iinfo(torch.int32).max,
        num_kv_heads,
        block_size,
        table.stride(0),
        num_splits,
        REPEATS=repeats,
        HEADS=max(triton.next_power_of_2(repeats), LEAST_ROWS),
        WIDTH=width,
        COLUMNS=columns,
        TOKENS=tile_for(columns, keys.element_size()),
        num_stages=STAGES,
    )
    _join_kernel[(num_rows * num_kv_heads, repeats)](
        partial,
        largest,
        total,
        mixed,
        num_splits,
        REPEATS=repeats,
        WIDTH=width,
        COLUMNS=columns,
        SPLITS=triton.next_power_of_2(num_splits),
    )
    return mixed


def tile_for(columns: int, itemsize: int) -> int:
    """Return the tokens of a tile where a key has ``columns`` numbers of ``itemsize`` bytes."""
    return TILE if columns * itemsize <= WIDEST else TILE // 2


def splits_for(num_programs: int) -> int:
    """Return into how many splits to cut each of ``num_programs`` sequences and heads."""
    return min(MOST_SPLITS, max(1, ENOUGH_PROGRAMS // num_programs))
