"""Attention over sequences that branch from others, for training: forward and backward kernels.

N packed tokens in sequences. Each sequence sees all of the shared tokens, which lie first, all of
its prefix, which is a sequence too, and itself causally. All numbers are fp32, and rows of queries,
keys, values and their gradients are read and written where they lie: [N, heads or kv_heads,
head_dim]. Sixteen queries of one sequence and key head at a time, one in each lane of a vector, so
that no sum goes across lanes. Sums go in one order, whatever the number of threads: a piece of work
of the backward pass is a key head of a whole *tree*, a prefix and what branches from it, and writes
all gradients of its rows itself, those of the shared tokens to a place of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headrace.kernels.compiled import ONE, VECTOR, ZERO, Kernel, argument, inline, kernel
from headrace.kernels.tiles import (
    add_products,
    read_rows,
    read_turned,
    room,
    write_rows,
    zeros,
)
from headrace.kernels.vectors import (
    LANES,
    add,
    address_of,
    divide,
    exp,
    fma,
    has_feature,
    maximum,
    multiply,
    negative,
    next_item,
    read_fp32,
    read_integer,
    read_number,
    splat,
    write_fp32,
    write_number,
)

MAX_KEYS = 512
"""Keys that a query may see: the weights of sixteen queries are held on the stack."""
WIDEST_HEAD = 256
"""Numbers of a head, of which sixteen are held on the stack as well."""
FIELDS = 5
"""Whole numbers that say of each sequence: where it starts, its length, where its prefix starts,
the length of that, and how many of the shared tokens it sees."""

_TALL, _SHORT, _LEAST = (16, 8, 2) if has_feature("avx512f") else (4, 2, 1)
"""Rows of keys that are taken together: sums must fit into the processor's registers."""
_NEVER = np.float32(-np.inf)

# Where what is held of sixteen queries lies on the stack, in bytes.
_SHARES, _SLOPES = 0, VECTOR * MAX_KEYS
_LANES, _TURNED, _PULLS, _TURNED_PULLS = (
    2 * VECTOR * MAX_KEYS + VECTOR * WIDEST_HEAD * place for place in range(4)
)
_PEAKS = _TURNED_PULLS + VECTOR * WIDEST_HEAD
_PARTS, _MASK = _PEAKS + VECTOR, _PEAKS + 2 * VECTOR
_ROOM = (_MASK + 2 * VECTOR) // 4
"""Numbers of all that."""


@inline
def _dots(sums: Any, rows: int, stride: int, turned: int, size: int, out: int) -> None:
    """Write the products of some rows with the sixteen that ``turned`` [size, 16] holds."""
    for column in range(size):
        cell = read_fp32(turned + VECTOR * column)
        sums = add_products(sums, rows + 4 * column, stride, cell)
    write_rows(out, VECTOR, sums)


@inline
def _all_dots(rows: int, count: int, stride: int, turned: int, size: int, out: int) -> None:
    """Write [count, 16]: `_dots` of ``count`` rows."""
    row = 0
    while row < count:
        here, there = rows + stride * row, out + VECTOR * row
        if count - row >= _TALL:
            _dots(zeros(_TALL), here, stride, turned, size, there)
            row += _TALL
        elif count - row >= _SHORT:
            _dots(zeros(_SHORT), here, stride, turned, size, there)
            row += _SHORT
        elif count - row >= _LEAST:
            _dots(zeros(_LEAST), here, stride, turned, size, there)
            row += _LEAST
        else:
            _dots(zeros(1), here, stride, turned, size, there)
            row += 1


@inline
def _mixed(sums: Any, rows: int, count: int, stride: int, shares: int) -> Any:
    """Return ``sums``, one for each of some columns, plus ``shares`` [count, 16] times rows."""
    for row in range(count):
        sums = add_products(sums, rows + stride * row, 4, read_fp32(shares + VECTOR * row))
    return sums


@inline
def _spread(
    sums: Any, numbers: int, lanes: int, count: int, size: int, out: int, stride: int
) -> None:
    """Write ``sums``, a vector of each of some rows, plus ``numbers`` [rows, 16] times lanes."""
    for lane in range(count):
        sums = add_products(sums, numbers + 4 * lane, VECTOR, read_fp32(lanes + 4 * size * lane))
    write_rows(out, stride, sums)


@inline
def _spread_all(
    rows: int, count: int, stride: int, numbers: int, lanes: int, num_lanes: int, size: int
) -> None:
    """Add to ``rows`` [count, size] ``numbers`` [count, 16] times ``lanes`` [num_lanes, size]."""
    row = 0
    while row < count:
        left, own = count - row, numbers + VECTOR * row
        for column in range(0, size, LANES):
            out, cells = rows + stride * row + 4 * column, lanes + 4 * column
            if left >= _TALL:
                sums = read_rows(_TALL, out, stride)
                _spread(sums, own, cells, num_lanes, size, out, stride)
            elif left >= _SHORT:
                few = read_rows(_SHORT, out, stride)
                _spread(few, own, cells, num_lanes, size, out, stride)
            else:
                one = read_rows(1, out, stride)
                _spread(one, own, cells, num_lanes, size, out, stride)
        row += _TALL if left >= _TALL else (_SHORT if left >= _SHORT else 1)


@inline
def _turn(rows: int, size: int, out: int) -> None:
    """Write ``rows`` [16, size] as [size, 16]."""
    for column in range(0, size, LANES):
        first = rows + 4 * column
        last = first + 4 * size * (LANES - 1)
        write_rows(out + VECTOR * column, VECTOR, read_turned(first, 4 * size, last))


@inline
def _load(
    rows: int, stride: int, first: int, count: int, repeats: int, size: int, factor: float, out: int
) -> None:
    """Copy the queries ``first`` and after, times ``factor``; zeros where there are no more.

    Query i is the head i % repeats of row i // repeats.
    """
    scale = splat(factor)
    for lane in range(LANES):
        target = out + 4 * size * lane
        index = first + lane
        source = rows + stride * (index // repeats) + 4 * size * (index % repeats)
        for column in range(0, size, LANES):
            cell = splat(ZERO)
            if lane < count:
                cell = multiply(read_fp32(source + 4 * column), scale)
            write_fp32(target + 4 * column, cell)


@inline
def _store(
    turned: int, rows: int, stride: int, first: int, count: int, repeats: int, size: int
) -> None:
    """Write ``turned`` [size, 16] to the queries' rows, as `_load` reads them."""
    for column in range(0, size, LANES):
        start = turned + VECTOR * column
        cells = read_turned(start, VECTOR, start + VECTOR * (LANES - 1))
        write_rows(start, VECTOR, cells)
        for lane in range(count):
            index = first + lane
            target = rows + stride * (index // repeats) + 4 * size * (index % repeats)
            write_fp32(target + 4 * column, read_fp32(start + VECTOR * lane))


@inline
def _hide(scores: int, count: int, first: int, repeats: int, mask: int) -> None:
    """Let no query see the rows of its sequence that come after it."""
    for row in range((first // repeats) + 1, count):
        hidden = min(row * repeats - first, LANES)
        cell = scores + VECTOR * row
        write_fp32(cell, add(read_fp32(cell), read_fp32(mask + 4 * (LANES - hidden))))


@inline
def _make_mask(mask: int) -> None:
    write_fp32(mask, splat(_NEVER))
    write_fp32(mask + VECTOR, splat(ZERO))


@inline
def _scores(
    rows: int, sequence: int, seen: int, stride: int, turned: int, size: int, out: int
) -> None:
    """Write [keys, 16] products of the keys, or values, that ``sequence`` sees: see `FIELDS`.

    Of its own rows the first ``seen``.
    """
    start, prefix = read_integer(sequence), read_integer(sequence + 16)
    length, shared = read_integer(sequence + 24), read_integer(sequence + 32)
    _all_dots(rows, shared, stride, turned, size, out)
    _all_dots(rows + stride * prefix, length, stride, turned, size, out + VECTOR * shared)
    out += VECTOR * (shared + length)
    _all_dots(rows + stride * start, seen, stride, turned, size, out)


@inline
def _mix(
    rows: int, sequence: int, seen: int, stride: int, shares: int, size: int, factor: Any, out: int
) -> None:
    """Write [size, 16]: the rows that ``sequence`` sees by ``shares`` [keys, 16], times factor."""
    start, prefix = read_integer(sequence), read_integer(sequence + 16)
    length, shared = read_integer(sequence + 24), read_integer(sequence + 32)
    for column in range(0, size, _TALL):
        here = rows + 4 * column
        sums = _mixed(zeros(_TALL), here, shared, stride, shares)
        own = shares + VECTOR * shared
        sums = _mixed(sums, here + stride * prefix, length, stride, own)
        own += VECTOR * length
        sums = _mixed(sums, here + stride * start, seen, stride, own)
        write_rows(out + VECTOR * column, VECTOR, sums)
    for column in range(size):
        cell = out + VECTOR * column
        write_fp32(cell, multiply(read_fp32(cell), factor))


@inline
def _keep(peak: Any, part: Any, memory: int, statistics: int, distance: int, count: int) -> None:
    """Write one number of each of ``count`` queries, twice, ``distance`` bytes apart."""
    write_fp32(memory + _PEAKS, peak)
    write_fp32(memory + _PARTS, part)
    for lane in range(0, 4 * count, 4):
        write_number(statistics + lane, read_number(memory + _PEAKS + lane))
        write_number(statistics + distance + lane, read_number(memory + _PARTS + lane))


@inline
def _recall(memory: int, statistics: int, distance: int, count: int) -> None:
    """Read what `_keep` wrote; zeros where there are no more queries: they weigh nothing."""
    write_fp32(memory + _PEAKS, splat(ZERO))
    write_fp32(memory + _PARTS, splat(ZERO))
    for lane in range(0, 4 * count, 4):
        write_number(memory + _PEAKS + lane, read_number(statistics + lane))
        write_number(memory + _PARTS + lane, read_number(statistics + distance + lane))


@inline
def _shares(shares: int, num_keys: int, peak: Any) -> Any:
    """Turn scores into e to the power of them, less ``peak``; return the sums of those."""
    whole = splat(ZERO)
    for row in range(num_keys):
        cell = shares + VECTOR * row
        share = exp(add(read_fp32(cell), negative(peak)))
        write_fp32(cell, share)
        whole = add(whole, share)
    return whole


@inline
def _peak(scores: int, num_keys: int) -> Any:
    peak = splat(_NEVER)
    for row in range(num_keys):
        peak = maximum(peak, read_fp32(scores + VECTOR * row))
    return peak


@inline
def _attend(call: int, memory: int, sequence: int, head: int, first: int) -> None:
    """Do the work of `branch_kernel` for the sixteen queries from ``first`` on."""
    kv_heads, size, repeats = argument(call, 3), argument(call, 11), argument(call, 12)
    start, length = read_integer(sequence), read_integer(sequence + 8)
    before = read_integer(sequence + 24) + read_integer(sequence + 32)
    count = min(length * repeats - first, LANES)
    seen = (first + count - 1) // repeats + 1
    own, stride = 4 * size * head, 4 * size * kv_heads
    step = repeats * stride
    rows = step * start + repeats * own
    scale = read_number(argument(call, 10))
    lanes, turned, shares = memory + _LANES, memory + _TURNED, memory + _SHARES
    _load(argument(call, 4) + rows, step, first, count, repeats, size, scale, lanes)
    _turn(lanes, size, turned)
    _scores(argument(call, 5) + own, sequence, seen, stride, turned, size, shares)
    _hide(shares + VECTOR * before, seen, first, repeats, memory + _MASK)
    peak = _peak(shares, before + seen)
    part = divide(splat(ONE), _shares(shares, before + seen, peak))
    _mix(argument(call, 6) + own, sequence, seen, stride, shares, size, part, turned)
    _store(turned, argument(call, 7) + rows, step, first, count, repeats, size)
    num_queries = argument(call, 9) * repeats
    statistics = argument(call, 8) + 4 * (num_queries * head + start * repeats + first)
    _keep(peak, part, memory, statistics, 4 * kv_heads * num_queries, count)


@cache
def branch_kernel() -> Kernel:
    """Mix the values that each query sees.

    ``statistics`` [2, kv_heads, N * repeats]: of each query the largest score, and 1 / the sum of
    e to the power of scores less that. ``sequences`` [n, FIELDS] int64; see there. Arguments:
    taken, n, sequences, kv_heads, queries, keys, values, out, statistics, N, scale (address of an
    fp32), head_dim, repeats.
    """

    def branch(pointer: Any) -> None:
        call = address_of(pointer)
        kv_heads, repeats = argument(call, 3), argument(call, 12)
        memory = room(_ROOM)
        _make_mask(memory + _MASK)
        while True:
            item = next_item(call)
            if item >= argument(call, 1) * kv_heads:
                break
            sequence = argument(call, 2) + 8 * FIELDS * (item // kv_heads)
            for first in range(0, read_integer(sequence + 8) * repeats, LANES):
                _attend(call, memory, sequence, item % kv_heads, first)

    return kernel(branch)


@inline
def _slopes(shares: int, slopes: int, num_keys: int, peak: Any, part: Any) -> None:
    """Turn scores into shares, and gradients of shares (``slopes``) into those of scores."""
    whole = splat(ZERO)
    for row in range(num_keys):
        cell = shares + VECTOR * row
        share = multiply(exp(add(read_fp32(cell), negative(peak))), part)
        write_fp32(cell, share)
        whole = fma(share, read_fp32(slopes + VECTOR * row), whole)
    for row in range(num_keys):
        cell = slopes + VECTOR * row
        slope = add(read_fp32(cell), negative(whole))
        write_fp32(cell, multiply(read_fp32(shares + VECTOR * row), slope))


@inline
def _pull(
    rows: int,
    shared_rows: int,
    sequence: int,
    seen: int,
    stride: int,
    numbers: int,
    lanes: int,
    count: int,
    size: int,
) -> None:
    """Add to the rows that ``sequence`` sees ``numbers`` [keys, 16] times ``lanes``."""
    start, prefix = read_integer(sequence), read_integer(sequence + 16)
    length, shared = read_integer(sequence + 24), read_integer(sequence + 32)
    _spread_all(shared_rows, shared, stride, numbers, lanes, count, size)
    numbers += VECTOR * shared
    _spread_all(rows + stride * prefix, length, stride, numbers, lanes, count, size)
    numbers += VECTOR * length
    _spread_all(rows + stride * start, seen, stride, numbers, lanes, count, size)


@inline
def _attend_back(
    call: int, memory: int, sequence: int, head: int, first: int, shared_rows: int
) -> None:
    """Do the work of `branch_backward_kernel` for the sixteen queries from ``first`` on.

    ``shared_rows``: of the tree's own gradients of shared keys, for ``head``.
    """
    kv_heads, size, repeats = argument(call, 4), argument(call, 17), argument(call, 18)
    start, length = read_integer(sequence), read_integer(sequence + 8)
    before = read_integer(sequence + 24) + read_integer(sequence + 32)
    count = min(length * repeats - first, LANES)
    seen = (first + count - 1) // repeats + 1
    own, stride = 4 * size * head, 4 * size * kv_heads
    step = repeats * stride
    rows = step * start + repeats * own
    scale = read_number(argument(call, 11))
    lanes, turned, shares = memory + _LANES, memory + _TURNED, memory + _SHARES
    pulls, turned_pulls, slopes = memory + _PULLS, memory + _TURNED_PULLS, memory + _SLOPES
    _load(argument(call, 5) + rows, step, first, count, repeats, size, scale, lanes)
    _load(argument(call, 8) + rows, step, first, count, repeats, size, ONE, pulls)
    _turn(lanes, size, turned)
    _turn(pulls, size, turned_pulls)
    _scores(argument(call, 6) + own, sequence, seen, stride, turned, size, shares)
    _scores(argument(call, 7) + own, sequence, seen, stride, turned_pulls, size, slopes)
    _hide(shares + VECTOR * before, seen, first, repeats, memory + _MASK)
    num_queries = argument(call, 10) * repeats
    statistics = argument(call, 9) + 4 * (num_queries * head + start * repeats + first)
    _recall(memory, statistics, 4 * kv_heads * num_queries, count)
    peak, part = read_fp32(memory + _PEAKS), read_fp32(memory + _PARTS)
    _slopes(shares, slopes, before + seen, peak, part)
    _mix(argument(call, 6) + own, sequence, seen, stride, slopes, size, splat(scale), turned)
    _store(turned, argument(call, 12) + rows, step, first, count, repeats, size)
    of_keys, of_values = argument(call, 13) + own, argument(call, 14) + own
    _pull(of_keys, shared_rows, sequence, seen, stride, slopes, lanes, count, size)
    shared_rows += stride * argument(call, 16) * argument(call, 1)
    _pull(of_values, shared_rows, sequence, seen, stride, shares, pulls, count, size)


@cache
def branch_backward_kernel() -> Kernel:
    """Write the gradients of queries, and add those of keys and values, which hold zeros.

    ``trees`` [m + 1] int64: where in ``sequences`` each tree begins, and the end. ``shared``
    [2, m, num_shared, kv_heads, head_dim], zeros: what each tree adds to keys and values of the
    shared tokens. Arguments: taken, m, trees, sequences, kv_heads, queries, keys, values, gradient
    (of what `branch_kernel` wrote), statistics, N, scale, of_queries, of_keys, of_values, shared,
    num_shared, head_dim, repeats.
    """

    def branch_backward(pointer: Any) -> None:
        call = address_of(pointer)
        kv_heads, size, repeats = argument(call, 4), argument(call, 17), argument(call, 18)
        memory = room(_ROOM)
        _make_mask(memory + _MASK)
        while True:
            item = next_item(call)
            if item >= argument(call, 1) * kv_heads:
                break
            tree, head = item // kv_heads, item % kv_heads
            trees = argument(call, 2) + 8 * tree
            shared_rows = 4 * size * (kv_heads * argument(call, 16) * tree + head)
            shared_rows += argument(call, 15)
            for number in range(read_integer(trees), read_integer(trees + 8)):
                sequence = argument(call, 3) + 8 * FIELDS * number
                for first in range(0, read_integer(sequence + 8) * repeats, LANES):
                    _attend_back(call, memory, sequence, head, first, shared_rows)

    return kernel(branch_backward)
