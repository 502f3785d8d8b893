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
from headrace.kernels.compiled import BF16, BYTES, FP32, Kernel, argument, kernel
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
def narrow_row(
    _context: Any, numbers: Any, out: Any, words: Any, of_upper: Any, factor: Any
) -> Any:
    """(numbers, out, words, of_upper, factor) -> what `checksums.sum_row` finds of ``out``.

    There, at a multiple of `LINE`, ``words`` words of bf16 are stored, past the cache: they are as
    much memory as a processor's cache, another process reads them, and the cache need not fetch
    what is written over.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        numbers, out, words, of_upper, factor = values
        one = builder.module.add_metadata([I32(1)])

        def add(place: Any, sums: Sequence[Any]) -> list[Any]:
            source = builder.add(numbers, builder.mul(place, I64(BYTES[FP32] * _PER_WORD)))
            target = builder.add(out, builder.mul(place, I64(8)))
            found = []
            for half in range(STRIDE // WIDE):
                halves = []
                for vector in range(2):
                    here = builder.add(source, I64(LINE * (2 * half + vector)))
                    ask_for(builder, builder.add(here, I64(AHEAD)))
                    x = builder.load(pointer_to(builder, here, FLOATS), align=4)
                    halves.append(rounded_to_bf16(builder, x))
                in_order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
                rounded = builder.bitcast(builder.shuffle_vector(*halves, in_order), _WIDE)
                place_of = builder.add(target, I64(8 * WIDE * half))
                stored = builder.store(rounded, pointer_to(builder, place_of, _WIDE), align=LINE)
                stored.set_metadata("nontemporal", one)
                found += with_words(builder, sums[2 * half : 2 * half + 2], rounded)
            return found

        sums = long_loop(builder, words, STRIDE, zero_sums(4), add)
        return weighed(builder, sums, of_upper, factor)

    return types.intp(*(types.intp,) * 5), generate


@cache
def narrowing_kernel(even: int) -> Kernel:
    """Write ``numbers`` [n, size] fp32 to ``out`` [n, size] bf16, ties to even; a NaN stays one.

    And add to ``total`` [1] int64 what `checksum_kernel` adds for ``out``. Arguments: taken, n,
    words of 64 bits in a row of ``out`` (a multiple of `STRIDE`), numbers, out (at a multiple of
    `LINE`), total. Taking the next piece makes what was stored past the cache visible to others.
    """

    def narrow(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, words = argument(call, 1), argument(call, 2)
        size = _PER_WORD * words
        num_taken = max(CHUNK // words, 1)
        while True:
            first = num_taken * next_item(call)
            if first >= num_rows:
                break
            found = 0
            for row in range(first, min(first + num_taken, num_rows)):
                numbers = argument(call, 3) + BYTES[FP32] * size * row
                out = argument(call, 4) + BYTES[BF16] * size * row
                found += narrow_row(numbers, out, words, even + 1, even * row + 1)
            add_to(argument(call, 5), found)

    return kernel(narrow)
