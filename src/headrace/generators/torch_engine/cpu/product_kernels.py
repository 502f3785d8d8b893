"""Matrix products as kernels: weights in panels, any number of rows, each row's bits its own.

A matrix [outputs, inputs] is held panel by panel: 16 or 32 outputs each, and within one word by
word along the inputs. A word is four bytes: one number of fp32, two of bf16, four of eight bits.
A tile of some rows and one panel then needs one load for each word of each, and no number is read
from memory twice for rows that are multiplied together.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headrace.generators.torch_engine.forms import LARGEST_INT8
from headrace.kernels.amx import (
    PANEL_VECTORS,
    TALLEST_TILES,
    TILE_WORDS,
    multiply_tiles,
    release_tiles,
)
from headrace.kernels.checksums import sum_columns
from headrace.kernels.compiled import (
    BYTES,
    ONE,
    ROWS,
    VECTOR,
    ZERO,
    Kernel,
    argument,
    inline,
    kernel,
    known,
    read,
    write,
)
from headrace.kernels.tiles import (
    PRODUCTS,
    count_differences,
    dot_rows,
    read_turned,
    room,
    stream_rows,
)
from headrace.kernels.vectors import (
    LANES,
    add,
    add_to,
    address_of,
    copy_word,
    has_feature,
    larger_size,
    largest_size,
    multiply,
    next_item,
    read_fp32,
    read_int32,
    read_number,
    read_word,
    round_whole,
    splat,
    write_byte,
    write_number,
)

WIDTH = 2 if has_feature("avx512f") else 1
"""Vectors of a panel: sums of `TALLEST` rows must fit into the processor's registers."""
TALLEST = 12 if has_feature("avx512f") else 6
"""Rows of the tallest tile."""
SHORTER, LEAST = 4, 2
"""Rows of those for what is left over; a last one is alone."""
CHUNK = 20 * TALLEST
"""Rows that stay in the cache while all panels pass by."""
OUTPUTS = WIDTH * LANES
"""Of one panel."""

_TILE = max(TALLEST, TALLEST_TILES) * OUTPUTS
UNSIGNED = 128
"""Added to a byte of a row, since processors multiply unsigned by signed ones."""


@cache
def pack_kernel(*, is_check: bool) -> Kernel:
    """Store ``matrix`` [n, words] in ``panels``; or count in ``differences`` what is not there.

    Outputs of the last panel that the matrix does not have repeat its last one. Arguments: taken,
    number of panels, n, words of a row, matrix, panels, differences (address of an integer).
    """

    def pack(pointer: Any) -> None:
        call = address_of(pointer)
        num_panels, num_rows, words = argument(call, 1), argument(call, 2), argument(call, 3)
        matrix, row_bytes = argument(call, 4), 4 * words
        last = matrix + row_bytes * (num_rows - 1)
        while True:
            panel = next_item(call)
            if panel >= num_panels:
                break
            target = argument(call, 5) + row_bytes * OUTPUTS * panel
            for vector in range(WIDTH):
                first = matrix + row_bytes * (OUTPUTS * panel + LANES * vector)
                for word in range(0, words - words % LANES, LANES):
                    turned = read_turned(first + 4 * word, row_bytes, last + 4 * word)
                    cell = target + VECTOR * (WIDTH * word + vector)
                    if is_check:
                        found = count_differences(cell, WIDTH * VECTOR, turned)
                        if found:
                            add_to(argument(call, 6), found)
                    else:
                        stream_rows(cell, WIDTH * VECTOR, turned)
                for word in range(words - words % LANES, words):
                    for lane in range(LANES):
                        source = min(first + row_bytes * lane, last) + 4 * word
                        cell = target + VECTOR * (WIDTH * word + vector) + 4 * lane
                        if not is_check:
                            copy_word(cell, source)
                        elif read_word(cell) != read_word(source):
                            add_to(argument(call, 6), 1)

    return kernel(pack)


@cache
def content_kernel(even: int) -> Kernel:
    """Add to ``total`` [1] int64 what `checksum_kernel` finds of rows of a matrix in ``panels``.

    Arguments: taken, first panel, number of panels, words of a row (of 32 bits; an even number),
    panels, first row, number of rows, total. The panels hold all of these rows, and others too.
    """

    def sum_panels(pointer: Any) -> None:
        call = address_of(pointer)
        first, num_panels, words = argument(call, 1), argument(call, 2), argument(call, 3)
        while True:
            panel = next_item(call)
            if panel >= num_panels:
                break
            panel += first
            here = argument(call, 4) + 4 * words * OUTPUTS * panel
            row, num_rows = OUTPUTS * panel - argument(call, 5), argument(call, 6)
            found = sum_columns(WIDTH, here, words, row, num_rows, even + 1, even)
            add_to(argument(call, 7), found)

    return kernel(sum_panels)


@inline
def _store_tile(
    tile: int,
    out: int,
    stride: int,
    num_rows: int,
    num_vectors: int,
    row_scales: int,
    scales: int,
    bias: int,
    storage: int,
) -> None:
    """Write a tile's sums to ``out``: scaled where they are whole numbers, the bias added."""
    bytes_of = BYTES[storage]
    for row in range(num_rows):
        for vector in range(min(WIDTH, num_vectors)):
            cell = tile + VECTOR * (WIDTH * row + vector)
            if row_scales != 0:
                x = multiply(read_int32(cell), splat(read_number(row_scales + 4 * row)))
                x = multiply(x, read_fp32(scales + VECTOR * vector))
            else:
                x = read_fp32(cell)
            if bias != 0:
                x = add(x, read_fp32(bias + VECTOR * vector))
            write(out + stride * row + bytes_of * LANES * vector, x, storage)


@inline
def _height(left: int) -> int:
    """Return how many of the ``left`` rows the next tile takes."""
    if left >= TALLEST:
        return TALLEST
    if left >= SHORTER:
        return SHORTER
    return LEAST if left >= LEAST else 1


@inline
def _pace(num_rows: int) -> int:
    """Return the bytes of the next panel to ask for with each word.

    Where a chunk goes over its panel several times, each asks for a part of the next one: the first
    time over that would else wait for memory.
    """
    passes = min(num_rows, CHUNK) // TALLEST
    return 4 * OUTPUTS // passes if passes > 1 else 0


@inline
def _fill_tile(
    tall: int,
    kind: int,
    rows: int,
    step: int,
    panel: int,
    words: int,
    base: int,
    tile: int,
    soon: int,
    pace: int,
) -> None:
    """Compute a tile of ``tall`` rows, see `dot_rows`; ``kind`` is known to the compiler."""
    if tall == TALLEST:
        dot_rows(TALLEST, WIDTH, known(kind), rows, step, panel, words, base, tile, soon, pace)
    elif tall == SHORTER:
        dot_rows(SHORTER, WIDTH, known(kind), rows, step, panel, words, base, tile, soon, pace)
    elif tall == LEAST:
        dot_rows(LEAST, WIDTH, known(kind), rows, step, panel, words, base, tile, soon, pace)
    else:
        dot_rows(1, WIDTH, known(kind), rows, step, panel, words, base, tile, soon, pace)


@cache
def product_kernel(product: str, *, storage: int) -> Kernel:
    """Write ``rows`` [n, words] times the matrix in ``panels`` to ``out`` [n, 16 * vectors].

    ``product``: see `PRODUCTS`. With int8, rows are unsigned with 128 added, ``first`` is int32
    [outputs]: what takes that off again, and sums are multiplied by ``row_scales`` [n] and
    ``scales`` [outputs]; otherwise ``first`` is zeros and ``row_scales`` is 0. ``bias`` [outputs]
    in fp32, or 0. ``storage``: of ``out``.

    Arguments: taken, n, words, vectors, rows, panels, out, first, row_scales, scales, bias.
    """
    kind, bytes_of = PRODUCTS.index(product), BYTES[storage]
    has_tiles = product == "bf16 in tiles"
    assert not has_tiles or WIDTH == PANEL_VECTORS

    def multiply_rows(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, words, vectors = argument(call, 1), argument(call, 2), argument(call, 3)
        row_scales, scales, bias = argument(call, 8), argument(call, 9), argument(call, 10)
        step, out_stride = 4 * words, bytes_of * LANES * vectors
        num_panels = (vectors + WIDTH - 1) // WIDTH
        num_items = num_panels * ((num_rows + CHUNK - 1) // CHUNK)
        tile = room(_TILE)
        in_tiles = has_tiles and words % TILE_WORDS == 0
        pace = _pace(num_rows)
        following = next_item(call)
        while following < num_items:
            item, following = following, next_item(call)
            soon = argument(call, 5) + step * OUTPUTS * (following % num_panels)
            number = item % num_panels
            panel = argument(call, 5) + step * OUTPUTS * number
            base = argument(call, 7) + (4 * OUTPUTS * number if row_scales != 0 else 0)
            row = item // num_panels * CHUNK
            end = min(row + CHUNK, num_rows)
            while row < end:
                rows = argument(call, 4) + step * row
                if in_tiles:
                    tall = min(end - row, TALLEST_TILES)
                    multiply_tiles(tall, rows, step, panel, words, tile)
                else:
                    tall = _height(end - row)
                    _fill_tile(tall, kind, rows, step, panel, words, base, tile, soon, pace)
                _store_tile(
                    tile,
                    argument(call, 6) + out_stride * row + bytes_of * OUTPUTS * number,
                    out_stride,
                    tall,
                    vectors - WIDTH * number,
                    row_scales + 4 * row if row_scales != 0 else 0,
                    scales + 4 * OUTPUTS * number,
                    bias + 4 * OUTPUTS * number if bias != 0 else 0,
                    storage,
                )
                row += tall
                soon += pace * words
        if in_tiles:
            release_tiles()

    return kernel(multiply_rows)


@cache
def quantize_kernel(*, storage: int, is_unsigned: bool) -> Kernel:
    """Round ``rows`` [n, size] to whole numbers up to `LARGEST_INT8`, each row by its own scale.

    ``is_unsigned``: 128 is added to what is stored. Arguments: taken, n, size, rows, out (bytes),
    scales (fp32 [n]: what a step of 1 stands for).
    """
    bytes_of, shift = BYTES[storage], UNSIGNED if is_unsigned else 0
    share = 1.0 / LARGEST_INT8

    def quantize(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, size = argument(call, 1), argument(call, 2)
        shifts = splat(np.float32(shift))
        while True:
            first = ROWS * next_item(call)
            if first >= num_rows:
                break
            for row in range(first, min(first + ROWS, num_rows)):
                source = argument(call, 3) + bytes_of * size * row
                out = argument(call, 4) + size * row
                peaks = splat(ZERO)
                for column in range(0, size, LANES):
                    peaks = larger_size(peaks, read(source + bytes_of * column, storage))
                # A row of zeros stays one, and NaN anywhere in a row is in all of its products.
                scale = max(largest_size(peaks) * np.float32(share), np.float32(1.2e-38))
                write_number(argument(call, 5) + 4 * row, scale)
                steps = splat(ONE / scale)
                for column in range(0, size, LANES):
                    x = multiply(read(source + bytes_of * column, storage), steps)
                    write_byte(out + column, add(round_whole(x), shifts))

    return kernel(quantize)
