"""Sums over the words of a matrix, at the speed at which memory is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from headrace.kernels.compiled import Kernel, argument, kernel
from headrace.kernels.tiles import literal
from headrace.kernels.vectors import (
    I64,
    LANES,
    WORDS,
    add_to,
    address_of,
    ask_for,
    call_llvm,
    compile_time,
    in_every_lane,
    next_item,
    pointer_to,
)

WIDE = 8
"""Words of 64 bits in a vector."""
STRIDE = 2 * WIDE
"""Words that are added at a time, to two sums."""
CHUNK = 1 << 13
"""Words that are taken at a time, about."""
AHEAD = 1024
"""Bytes ahead of those that are read, which are asked for: a page's beginning is not foreseen."""
LINE = 64
"""Bytes that are asked for at once."""

_WIDE, _LONG = ir.VectorType(I64, WIDE), ir.VectorType(I64, LANES)


def long_loop(
    builder: ir.IRBuilder,
    count: Any,
    step: int,
    begin: Sequence[Any],
    body: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """Emit ``body`` (place, values) -> values for places 0, step, 2 step ... below ``count`` > 0.

    Return what the values, which are ``begin`` at first, are at the end.
    """
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    phis = [builder.phi(value.type) for value in (I64(0), *begin)]
    grown = [builder.add(phis[0], I64(step)), *body(phis[0], phis[1:])]
    for phi, first, following in zip(phis, (I64(0), *begin), grown, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", grown[0], count), loop, after)
    builder.position_at_end(after)
    return grown[1:]


def zero_sums(count: int, kind: ir.VectorType = _WIDE) -> list[Any]:
    """Return so many vectors of sums that have just begun."""
    return [ir.Constant(kind, [0] * kind.count)] * count


def with_words(builder: ir.IRBuilder, sums: Sequence[Any], words: Any) -> list[Any]:
    """Emit (sum of words, sum of signed upper halves) with 8 ``words`` added."""
    upper = builder.ashr(words, ir.Constant(_WIDE, [32] * WIDE))
    return [builder.add(sums[0], words), builder.add(sums[1], upper)]


def weighed(builder: ir.IRBuilder, sums: Sequence[Any], of_upper: Any, factor: Any) -> Any:
    """Emit the one number that pairs of `with_words` come to: see `sum_row`."""
    total = zero_sums(1)[0]
    for whole, upper in zip(sums[::2], sums[1::2], strict=True):
        more = builder.mul(upper, in_every_lane(builder, of_upper, _WIDE))
        total = builder.add(total, builder.add(whole, more))
    return builder.mul(call_llvm(builder, "llvm.vector.reduce.add.v8i64", I64, total), factor)


@compile_time
def sum_row(_context: Any, address: Any, count: Any, of_upper: Any, factor: Any) -> Any:
    """(address, count, of_upper, factor) -> what a row adds to a sum, which wraps around.

    ``count`` words of 64 bits, a multiple of `STRIDE`: each of them and ``of_upper`` times its
    upper half, which is signed, all times ``factor``.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        address, count, of_upper, factor = values

        def add(place: Any, sums: Sequence[Any]) -> list[Any]:
            at, found = builder.add(address, builder.mul(place, I64(8))), []
            for half in range(2):
                here = builder.add(at, I64(8 * WIDE * half))
                ask_for(builder, builder.add(here, I64(AHEAD)))
                words = builder.load(pointer_to(builder, here, _WIDE), align=8)
                found += with_words(builder, sums[2 * half : 2 * half + 2], words)
            return found

        sums = long_loop(builder, count, STRIDE, zero_sums(4), add)
        return weighed(builder, sums, of_upper, factor)

    return types.intp(*(types.intp,) * 4), generate


@compile_time
def sum_columns(
    _context: Any,
    width: Any,
    address: Any,
    words: Any,
    row: Any,
    num_rows: Any,
    of_upper: Any,
    even: Any,
) -> Any:
    """(width, address, words, row, num_rows, of_upper, even) -> what rows add that lie in columns.

    At ``address`` are ``width`` vectors for each of ``words`` words of 32 bits: one word of each of
    16 rows. They are the rows from number ``row`` on, of which those count that lie in
    [0, num_rows): each as `sum_row` with a factor of ``even`` * its number + 1 finds it.
    """
    vectors = literal(width)

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        address, words, row, num_rows, of_upper, even = values[1:]

        def add(place: Any, sums: Sequence[Any]) -> list[Any]:
            at, found = builder.add(address, builder.mul(place, I64(LINE * vectors))), []
            for vector in range(vectors):
                lower, upper = sums[2 * vector : 2 * vector + 2]
                cells = [
                    builder.add(at, I64(LINE * (vectors * half + vector))) for half in range(2)
                ]
                for cell in cells:
                    ask_for(builder, builder.add(cell, I64(AHEAD)))
                halves = [
                    builder.load(pointer_to(builder, cell, WORDS), align=LINE) for cell in cells
                ]
                found.append(builder.add(lower, builder.zext(halves[0], _LONG)))
                found.append(builder.add(upper, builder.sext(halves[1], _LONG)))
            return found

        sums = long_loop(builder, words, 2, zero_sums(2 * vectors, _LONG), add)
        # An upper half counts 2^32 times in its word, whatever its sign, once that wraps around.
        of_upper = in_every_lane(builder, builder.add(of_upper, I64(1 << 32)), _LONG)
        total = nothing = zero_sums(1, _LONG)[0]
        for vector in range(vectors):
            lanes = ir.Constant(_LONG, [LANES * vector + lane for lane in range(LANES)])
            numbers = builder.add(in_every_lane(builder, row, _LONG), lanes)
            factors = builder.mul(numbers, in_every_lane(builder, even, _LONG))
            factors = builder.add(factors, ir.Constant(_LONG, [1] * LANES))
            found = builder.add(sums[2 * vector], builder.mul(sums[2 * vector + 1], of_upper))
            # Unsigned, so that numbers below 0 lie beyond all of them.
            counts = builder.icmp_unsigned("<", numbers, in_every_lane(builder, num_rows, _LONG))
            found = builder.select(counts, builder.mul(found, factors), nothing)
            total = builder.add(total, found)
        return call_llvm(builder, "llvm.vector.reduce.add.v16i64", I64, total)

    return types.intp(width, *(types.intp,) * 6), generate


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
            found = 0
            for row in range(first, min(first + num_taken, num_rows)):
                here = argument(call, 3) + 8 * words * row
                found += sum_row(here, words, even + 1, even * row + 1)
            add_to(argument(call, 4), found)

    return kernel(checksum)
