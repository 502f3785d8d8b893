"""What a decoder layer does between its matrix products, as kernels.

All arithmetic is in fp32; numbers are stored as ``storage`` says. Rows are packed tokens, and every
row's bits depend on that row alone. Keys lie transposed in their cache blocks, [head_dim, 16], so
that one vector holds one number of each of a block's tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headrace.kernels.compiled import (
    BYTES,
    FP32,
    ONE,
    ROWS,
    VECTOR,
    ZERO,
    Kernel,
    argument,
    inline,
    kernel,
    read,
    write,
)
from headrace.kernels.rows import inverse_rms, sigmoid
from headrace.kernels.tiles import (
    add_products,
    read_rows,
    room,
    scale_rows,
    write_rows,
    zeros,
)
from headrace.kernels.vectors import (
    LANES,
    add,
    address_of,
    copy_half,
    copy_word,
    exp,
    fma,
    largest,
    multiply,
    next_item,
    prefetch,
    read_fp32,
    read_integer,
    read_number,
    splat,
    total,
    write_fp32,
    write_number,
)

CACHE_LINE = 64
"""Bytes."""

_NEVER = np.float32(-np.inf)
"""The score of a token that is not seen. In every block that is looked at, one is."""


@cache
def norm_kernel(size: int, *, storage: int) -> Kernel:
    """Add ``delta`` [n, size] to ``residual`` [n, size] fp32, and write its RMS norm to ``out``.

    out = residual / rms(residual) * weight. Arguments: taken, n, residual, delta (0: none), weight,
    out, epsilon (address of an fp32).
    """
    bytes_of = BYTES[storage]

    def norm(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, delta, weight = argument(call, 1), argument(call, 3), argument(call, 4)
        epsilon = read_number(argument(call, 6))
        while True:
            first = ROWS * next_item(call)
            if first >= num_rows:
                break
            for row in range(first, min(first + ROWS, num_rows)):
                residual = argument(call, 2) + 4 * size * row
                if delta != 0:
                    for column in range(0, size, LANES):
                        x = read(delta + bytes_of * (size * row + column), storage)
                        write_fp32(residual + 4 * column, add(read_fp32(residual + 4 * column), x))
                scale = inverse_rms(residual, size, epsilon)
                out = argument(call, 5) + bytes_of * size * row
                for column in range(0, size, LANES):
                    x = multiply(read_fp32(residual + 4 * column), scale)
                    x = multiply(x, read(weight + bytes_of * column, storage))
                    write(out + bytes_of * column, x, storage)

    return kernel(norm)


@cache
def silu_kernel(*, storage: int) -> Kernel:
    """Write silu(gate) * up to ``out`` [n, size], of ``inputs`` [n, 2 * size]: gate, then up.

    Arguments: taken, n, size, inputs, out.
    """
    bytes_of = BYTES[storage]

    def silu(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, size = argument(call, 1), argument(call, 2)
        while True:
            first = ROWS * next_item(call)
            if first >= num_rows:
                break
            for row in range(first, min(first + ROWS, num_rows)):
                gates = argument(call, 3) + bytes_of * 2 * size * row
                out = argument(call, 4) + bytes_of * size * row
                for column in range(0, size, LANES):
                    gate = read(gates + bytes_of * column, storage)
                    up = read(gates + bytes_of * (size + column), storage)
                    active = multiply(gate, sigmoid(gate))
                    write(out + bytes_of * column, multiply(active, up), storage)

    return kernel(silu)


@inline
def _turn(head: int, size: int, cos: int, sin: int, factor: float) -> None:
    """Rotate the fp32 numbers at ``head``, and multiply them by ``factor``; see `apply_rope`."""
    half = size // 2
    scale = splat(factor)
    for column in range(0, half, LANES):
        left, right = read_fp32(head + 4 * column), read_fp32(head + 4 * (half + column))
        cosine, sine = read_fp32(cos + 4 * column), read_fp32(sin + 4 * column)
        turned = fma(left, cosine, multiply(right, sine))
        write_fp32(head + 4 * column, multiply(turned, scale))
        cosine, sine = read_fp32(cos + 4 * (half + column)), read_fp32(sin + 4 * (half + column))
        turned = fma(right, cosine, multiply(left, sine))
        write_fp32(head + 4 * (half + column), multiply(turned, scale))


@inline
def _widen(source: int, target: int, size: int, storage: int) -> None:
    """Copy numbers to fp32."""
    for column in range(0, size, LANES):
        write_fp32(target + 4 * column, read(source + BYTES[storage] * column, storage))


@inline
def _norm_head(head: int, size: int, weight: int, epsilon: float, storage: int) -> None:
    """Norm the fp32 numbers at ``head`` in place."""
    scale = inverse_rms(head, size, epsilon)
    for column in range(0, size, LANES):
        x = multiply(read_fp32(head + 4 * column), scale)
        x = multiply(x, read(weight + BYTES[storage] * column, storage))
        write_fp32(head + 4 * column, x)


@inline
def _store_key(turned: int, keys: int, size: int, storage: int) -> None:
    """Put fp32 numbers into one column of a block of keys; ``turned`` is overwritten."""
    bytes_of = BYTES[storage]
    for column in range(0, size, LANES):
        # In place: a vector is read whole before it is written, and what is written is no longer.
        write(turned + bytes_of * column, read_fp32(turned + 4 * column), storage)
    for column in range(size):
        target, source = keys + bytes_of * LANES * column, turned + bytes_of * column
        if storage == FP32:
            copy_word(target, source)
        else:
            copy_half(target, source)


@cache
def rotate_kernel(head_dim: int, *, has_norm: bool, storage: int) -> Kernel:
    """Rotate queries and keys by position; put keys and values into the cache.

    ``inputs`` [n, (heads + 2 * kv_heads) * head_dim]: queries, keys, values of each token. Token i
    is at ``positions[i]`` of the sequence whose blocks are row ``sequences[i]`` of ``table`` [m,
    width]. Queries are written to ``queries`` [n, heads, head_dim] fp32, scaled for the softmax.
    Keys and values: [blocks, kv_heads, head_dim, 16] and [blocks, kv_heads, 16, head_dim].
    ``has_norm``: each head is normed before, by ``query_norm`` and ``key_norm`` [head_dim].

    Arguments: taken, n, heads, kv_heads, inputs, positions, sequences, table, width, cos, sin (both
    [positions, head_dim] fp32, as `rope_table` makes them), queries, keys, values, scale and
    epsilon (addresses of fp32 numbers), query_norm, key_norm.
    """
    bytes_of = BYTES[storage]
    row_bytes = bytes_of * head_dim

    def rotate(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, heads, kv_heads = argument(call, 1), argument(call, 2), argument(call, 3)
        table, width = argument(call, 7), argument(call, 8)
        scale, epsilon = read_number(argument(call, 14)), read_number(argument(call, 15))
        turned = room(head_dim)
        while True:
            row = next_item(call)
            if row >= num_rows:
                break
            position = read_integer(argument(call, 5) + 8 * row)
            sequence = read_integer(argument(call, 6) + 8 * row)
            place = read_integer(table + 8 * (sequence * width + position // LANES)) * kv_heads
            slot = position % LANES
            cos = argument(call, 9) + 4 * head_dim * position
            sin = argument(call, 10) + 4 * head_dim * position
            source = argument(call, 4) + row_bytes * (heads + 2 * kv_heads) * row
            query = argument(call, 11) + 4 * head_dim * heads * row
            for _ in range(heads):
                _widen(source, query, head_dim, storage)
                if has_norm:
                    _norm_head(query, head_dim, argument(call, 16), epsilon, storage)
                _turn(query, head_dim, cos, sin, scale)
                query += 4 * head_dim
                source += row_bytes
            for head in range(kv_heads):
                _widen(source, turned, head_dim, storage)
                if has_norm:
                    _norm_head(turned, head_dim, argument(call, 17), epsilon, storage)
                _turn(turned, head_dim, cos, sin, ONE)
                keys = argument(call, 12) + LANES * row_bytes * (place + head)
                _store_key(turned, keys + bytes_of * slot, head_dim, storage)
                source += row_bytes
            for head in range(kv_heads):
                values = argument(call, 13) + row_bytes * (LANES * (place + head) + slot)
                for column in range(0, head_dim, LANES):
                    numbers = read(source + bytes_of * column, storage)
                    write(values + bytes_of * column, numbers, storage)
                source += row_bytes

    return kernel(rotate)


@inline
def _block_scores(
    query: int, keys: int, weights: int, head_dim: int, even: Any, odd: Any, storage: int
) -> None:
    """Write the scores [heads, 16] of a block's tokens to ``weights``; ``even``, ``odd``: zeros."""
    bytes_of = BYTES[storage]
    for column in range(0, head_dim, 2):
        # Two sums each: one alone would wait for its own last addition.
        here, key = query + 4 * column, keys + bytes_of * LANES * column
        even = add_products(even, here, 4 * head_dim, read(key, storage))
        odd = add_products(odd, here + 4, 4 * head_dim, read(key + bytes_of * LANES, storage))
    write_rows(weights, VECTOR, even)
    for head in range(len(odd)):
        scores = weights + VECTOR * head
        write_fp32(scores, add(read_fp32(scores), odd[head]))


@inline
def _hide(weights: int, repeats: int, first: int, end: int) -> None:
    """Let no query see the tokens of a block before ``first`` and from ``end`` on."""
    for token in range(LANES):
        if not first <= token < end:
            for head in range(repeats):
                write_number(weights + VECTOR * head + 4 * token, _NEVER)


@inline
def _soften(weights: int, peak: int, whole: int, shrink: int) -> None:
    """Turn the scores of a head into shares; write by what all that was summed before shrinks."""
    scores, before = read_fp32(weights), read_number(peak)
    raised, shrunk = max(before, largest(scores)), ONE
    if raised != before:
        shrunk = largest(exp(splat(before - raised)))
    shares = exp(add(scores, splat(-raised)))
    write_fp32(weights, shares)
    write_number(peak, raised)
    write_number(shrink, shrunk)
    write_number(whole, read_number(whole) * shrunk + total(shares))


@inline
def _mix(
    here: Any, there: Any, mixed: int, head_dim: int, weights: int, values: int, storage: int
) -> None:
    """Write two vectors of every head, to which a block's values are added by their shares.

    Two, because sums of one would wait for their own additions.
    """
    bytes_of = BYTES[storage]
    for token in range(LANES):
        value, share = values + bytes_of * head_dim * token, weights + 4 * token
        here = add_products(here, share, VECTOR, read(value, storage))
        there = add_products(there, share, VECTOR, read(value + bytes_of * LANES, storage))
    write_rows(mixed, 4 * head_dim, here)
    write_rows(mixed + VECTOR, 4 * head_dim, there)


@inline
def _begin(mixed: int, num_mixed: int, peaks: int, wholes: int, heads: int) -> None:
    """Nothing is mixed yet, and no score was seen."""
    for column in range(0, num_mixed, LANES):
        write_fp32(mixed + 4 * column, splat(ZERO))
    for head in range(heads):
        write_number(peaks + 4 * head, _NEVER)
        write_number(wholes + 4 * head, ZERO)


@inline
def _finish(mixed: int, whole: int, out: int, head_dim: int, storage: int) -> None:
    """Write what a head mixed, divided by all its shares."""
    share = splat(ONE / read_number(whole))
    for column in range(0, head_dim, LANES):
        cell = multiply(read_fp32(mixed + 4 * column), share)
        write(out + BYTES[storage] * column, cell, storage)


@inline
def _ask_for(address: int, size: int) -> None:
    """Have so many bytes on their way while something else is computed."""
    for line in range(0, size, CACHE_LINE):
        prefetch(address + line)


@cache
def attention_kernel(head_dim: int, repeats: int, *, storage: int) -> Kernel:
    """Mix the values that each query may look at, block by block, with a running softmax.

    ``queries`` [n, kv_heads * repeats, head_dim] fp32, scaled. Query i sits at ``positions[i]`` of
    the sequence whose blocks are row ``sequences[i]`` of ``table`` [m, width], and sees itself and
    what is before it, ``window`` tokens in all. ``out``: as queries, in storage. The softmax goes
    by Milakov and Gimelshein 2018 (arXiv 1805.02867), as in FlashAttention.

    Arguments: taken, n, kv_heads, queries, positions, sequences, table, width, keys, values, out,
    window.
    """
    bytes_of = BYTES[storage]
    head_bytes, row_bytes = 4 * head_dim, bytes_of * head_dim
    block_bytes, num_mixed, num_weights = LANES * row_bytes, repeats * head_dim, repeats * LANES

    def attention(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, kv_heads = argument(call, 1), argument(call, 2)
        table, width, window = argument(call, 6), argument(call, 7), argument(call, 11)
        mixed, weights = room(num_mixed), room(num_weights)
        peaks, wholes, shrinks = room(repeats), room(repeats), room(repeats)
        while True:
            item = next_item(call)
            if item >= num_rows * kv_heads:
                break
            row, kv_head = item // kv_heads, item % kv_heads
            length = read_integer(argument(call, 4) + 8 * row) + 1
            blocks = table + 8 * width * read_integer(argument(call, 5) + 8 * row)
            query = argument(call, 3) + head_bytes * repeats * item
            _begin(mixed, num_mixed, peaks, wholes, repeats)
            unseen = max(length - window, 0)
            for place in range(unseen // LANES, (length + LANES - 1) // LANES):
                block = block_bytes * (read_integer(blocks + 8 * place) * kv_heads + kv_head)
                keys, values = argument(call, 8) + block, argument(call, 9) + block
                if LANES * (place + 1) < length:
                    following = read_integer(blocks + 8 * (place + 1)) * kv_heads + kv_head
                    _ask_for(argument(call, 8) + block_bytes * following, block_bytes)
                    _ask_for(argument(call, 9) + block_bytes * following, block_bytes)
                _block_scores(
                    query, keys, weights, head_dim, zeros(repeats), zeros(repeats), storage
                )
                if LANES * place < unseen or length < LANES * (place + 1):
                    _hide(weights, repeats, unseen - LANES * place, length - LANES * place)
                for head in range(repeats):
                    here = 4 * head
                    _soften(weights + VECTOR * head, peaks + here, wholes + here, shrinks + here)
                for column in range(0, head_dim, 2 * LANES):
                    left = mixed + 4 * column
                    here = scale_rows(read_rows(repeats, left, head_bytes), shrinks)
                    there = scale_rows(read_rows(repeats, left + VECTOR, head_bytes), shrinks)
                    value = values + bytes_of * column
                    _mix(here, there, left, head_dim, weights, value, storage)
            out = argument(call, 10) + row_bytes * repeats * item
            for head in range(repeats):
                there = out + row_bytes * head
                _finish(mixed + head_bytes * head, wholes + 4 * head, there, head_dim, storage)

    return kernel(attention)
