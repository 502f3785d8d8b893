"""Sums over the words of a matrix, at the speed at which memory is read."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from headrace.kernels.compiled import Kernel, argument, kernel
from headrace.kernels.vectors import (
    FLOATS,
    I64,
    Vector,
    add_to,
    address_of,
    call_llvm,
    compile_time,
    in_every_lane,
    next_item,
    pointer_to,
    splat,
)

WIDE = 8
"""Words of 64 bits in a vector."""
STRIDE = 2 * WIDE
"""Words that are added at a time, to two sums."""
CHUNK = 1 << 13
"""Words that are taken at a time, about."""

_WIDE = ir.VectorType(I64, WIDE)


@compile_time
def add_row(_context: Any, total: Any, address: Any, count: Any, of_upper: Any, factor: Any) -> Any:
    """(total, address, count, of_upper, factor) -> total, 8 sums, and what a row adds to them.

    ``count`` words of 64 bits, a multiple of `STRIDE`: each of them and ``of_upper`` times its
    upper half, which is signed, all times ``factor``. Sums wrap around.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        total, address, count, of_upper, factor = values
        zeros = ir.Constant(_WIDE, [0] * WIDE)
        before = builder.block
        loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        place, *sums = (builder.phi(kind) for kind in (I64, *[_WIDE] * 4))
        grown = [builder.add(place, I64(STRIDE))]
        at = builder.add(address, builder.mul(place, I64(8)))
        for half in range(2):
            start = pointer_to(builder, builder.add(at, I64(8 * WIDE * half)), _WIDE)
            words = builder.load(start, align=8)
            upper = builder.ashr(words, ir.Constant(_WIDE, [32] * WIDE))
            grown += [builder.add(sums[2 * half], words), builder.add(sums[2 * half + 1], upper)]
        for phi, begin, end in zip((place, *sums), (I64(0), *[zeros] * 4), grown, strict=True):
            phi.add_incoming(begin, before)
            phi.add_incoming(end, loop)
        builder.cbranch(builder.icmp_signed("<", grown[0], count), loop, after)
        builder.position_at_end(after)
        whole, upper = (builder.add(grown[1 + half], grown[3 + half]) for half in range(2))
        upper = builder.mul(upper, in_every_lane(builder, of_upper, _WIDE))
        row = builder.mul(builder.add(whole, upper), in_every_lane(builder, factor, _WIDE))
        return builder.bitcast(builder.add(builder.bitcast(total, _WIDE), row), FLOATS)

    return Vector(Vector, *(types.intp,) * 4), generate


@compile_time
def sum_lanes(_context: Any, total: Any) -> Any:
    """(total) -> the sum of 8 words."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return call_llvm(
            builder, "llvm.vector.reduce.add.v8i64", I64, builder.bitcast(values[0], _WIDE)
        )

    return types.intp(Vector), generate


@cache
def checksum_kernel(even: int) -> Kernel:
    """Add to ``total`` [1] int64 what `headrace.models.weights` sums of a matrix [n, words].

    The sum of each row's words and ``even`` + 1 times that of their upper halves, times
    ``even`` * row + 1; all of it wraps around at 64 bits. Arguments: taken, n, words (a multiple of
    `STRIDE`), matrix, total.
    """

    def checksum(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, words = argument(call, 1), argument(call, 2)
        num_taken = max(CHUNK // words, 1)
        while True:
            first = num_taken * next_item(call)
            if first >= num_rows:
                break
            found = splat(np.float32(0.0))
            for row in range(first, min(first + num_taken, num_rows)):
                here = argument(call, 3) + 8 * words * row
                found = add_row(found, here, words, even + 1, even * row + 1)
            add_to(argument(call, 4), sum_lanes(found))

    return kernel(checksum)
