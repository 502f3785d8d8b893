"""Matrices of fp32 rounded to bf16, and summed before they leave the registers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from headrace.kernels.checksums import (
    AHEAD,
    CHUNK,
    LINE,
    STRIDE,
    WIDE,
    long_loop,
    weighed,
    with_words,
    zero_sums,
)
from headrace.kernels.compiled import BF16, BYTES, FP32, ROWS, Kernel, argument, kernel
from headrace.kernels.tiles import literal
from headrace.kernels.vectors import (
    FLOATS,
    I32,
    I64,
    LANES,
    add_to,
    address_of,
    ask_for,
    compile_time,
    next_item,
    pointer_to,
    rounded_to_bf16,
)

_WIDE = ir.VectorType(I64, WIDE)
_PER_WORD = 8 // BYTES[BF16]


@compile_time
def narrow_rows(
    _context: Any,
    count: Any,
    numbers: Any,
    out: Any,
    apart: Any,
    words: Any,
    of_upper: Any,
    factor: Any,
    more: Any,
) -> Any:
    """(count, numbers, out, apart, words, of_upper, factor, more) -> what rows add to a sum.

    Of ``count`` rows, each ``apart`` bytes of ``out`` after the one before and twice as many of
    ``numbers``, ``words`` words of bf16 are stored in ``out``, at multiples of `LINE` and past the
    cache: they are more than a cache holds, another process reads them, and the cache need not
    fetch what is written over. They add what `checksums.sum_row` finds of them, the first by
    ``factor`` and each following one by ``more`` more.
    """
    size = literal(count)

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        numbers, out, apart, words, of_upper, factor, more = values[1:]
        one = builder.module.add_metadata([I32(1)])
        rows = [(numbers, out, factor)]
        while len(rows) < size:
            source, target, weight = rows[-1]
            source = builder.add(source, builder.mul(apart, I64(BYTES[FP32] // BYTES[BF16])))
            rows.append((source, builder.add(target, apart), builder.add(weight, more)))

        def add(place: Any, sums: Sequence[Any]) -> list[Any]:
            offset, found = builder.mul(place, I64(8)), []
            for row, (source, target, _) in enumerate(rows):
                at = builder.add(source, builder.mul(offset, I64(BYTES[FP32] // BYTES[BF16])))
                for half in range(STRIDE // WIDE):
                    rounded = _rounded(builder, builder.add(at, I64(2 * LINE * half)))
                    cell = builder.add(builder.add(target, offset), I64(LINE * half))
                    stored = builder.store(rounded, pointer_to(builder, cell, _WIDE), align=LINE)
                    stored.set_metadata("nontemporal", one)
                    pair = 4 * row + 2 * half
                    found += with_words(builder, sums[pair : pair + 2], rounded)
            return found

        sums = long_loop(builder, words, STRIDE, zero_sums(4 * size), add)
        total = I64(0)
        for row, (_, _, weight) in enumerate(rows):
            found = weighed(builder, sums[4 * row : 4 * row + 4], of_upper, weight)
            total = builder.add(total, found)
        return total

    return types.intp(count, *(types.intp,) * 7), generate


def _rounded(builder: ir.IRBuilder, address: Any) -> Any:
    """Emit 8 words of bf16: what the 32 numbers at ``address`` are rounded to."""
    halves = []
    for vector in range(2):
        here = builder.add(address, I64(LINE * vector))
        ask_for(builder, builder.add(here, I64(AHEAD)))
        x = builder.load(pointer_to(builder, here, FLOATS), align=4)
        halves.append(rounded_to_bf16(builder, x))
    in_order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    return builder.bitcast(builder.shuffle_vector(*halves, in_order), _WIDE)


@cache
def narrowing_kernel(even: int) -> Kernel:
    """Write ``numbers`` [n, size] fp32 to ``out`` [n, size] bf16, ties to even; a NaN stays one.

    And add to ``total`` [1] int64 what `checksum_kernel` adds for ``out``. Arguments: taken, n,
    words of 64 bits in a row of ``out`` (a multiple of `STRIDE`), numbers, out (at a multiple of
    `LINE`), total. Taking the next piece makes what was stored past the cache visible to others.

    `ROWS` rows that lie apart are read side by side: memory is waited for in each of them at once.
    """

    def narrow(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, words = argument(call, 1), argument(call, 2)
        row_bytes, of_upper = 8 * words, even + 1
        apart = max(CHUNK // words // ROWS, 1)
        while True:
            first = ROWS * apart * next_item(call)
            if first >= num_rows:
                break
            found = 0
            for row in range(first, min(first + apart, num_rows)):
                numbers = argument(call, 3) + BYTES[FP32] // BYTES[BF16] * row_bytes * row
                out = argument(call, 4) + row_bytes * row
                if first + ROWS * apart <= num_rows:
                    step = row_bytes * apart
                    factor, more = even * row + 1, even * apart
                    found += narrow_rows(ROWS, numbers, out, step, words, of_upper, factor, more)
                    continue
                for other in range(row, num_rows, apart):
                    skipped = row_bytes * (other - row)
                    found += narrow_rows(
                        1,
                        numbers + BYTES[FP32] // BYTES[BF16] * skipped,
                        out + skipped,
                        0,
                        words,
                        of_upper,
                        even * other + 1,
                        0,
                    )
            add_to(argument(call, 5), found)

    return kernel(narrow)
