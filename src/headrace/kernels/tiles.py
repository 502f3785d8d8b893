"""Several vectors at a time: rows that lie apart, sums that grow together, tiles of products.

How many there are is a number that a kernel is compiled for, so that each vector is a register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue

from headrace.kernels.vectors import (
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    LANES,
    SHORTS,
    WORDS,
    Vector,
    ask_for,
    call_llvm,
    compile_time,
    constant,
    has_feature,
    in_every_lane,
    load_number,
    multiply_add,
    pointer_to,
    whole,
)


@compile_time
def room(_context: Any, count: Any) -> Any:
    """(count) -> the address of ``count`` fp32 numbers, any, on the caller's own stack."""
    size = literal(count)

    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        # Not numba's own way, which writes zeros, number by number: LLVM takes minutes over many.
        with builder.goto_entry_block():
            memory = builder.alloca(F32, size=I64(size))
        return builder.ptrtoint(memory, I64)

    return types.intp(count), generate


@compile_time
def zeros(_context: Any, count: Any) -> Any:
    """(count) -> a tuple of so many vectors of zeros."""
    size = literal(count)

    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        return cgutils.pack_array(builder, [constant(0.0)] * size)

    return types.UniTuple(Vector, size)(count), generate


@compile_time
def read_rows(_context: Any, count: Any, address: Any, stride: Any) -> Any:
    """(count, address, stride) -> a tuple of fp32 vectors that lie ``stride`` bytes apart."""
    size = literal(count)

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, found = values[1], []
        for _ in range(size):
            found.append(builder.load(pointer_to(builder, at, FLOATS), align=4))
            at = builder.add(at, values[2])
        return cgutils.pack_array(builder, found)

    return types.UniTuple(Vector, size)(count, types.intp, types.intp), generate


@compile_time
def write_rows(_context: Any, address: Any, stride: Any, rows: Any) -> Any:
    """(address, stride, rows): store a tuple of vectors as fp32, ``stride`` bytes apart."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at = values[0]
        for row in cgutils.unpack_tuple(builder, values[2], len(rows)):
            builder.store(row, pointer_to(builder, at, FLOATS), align=4)
            at = builder.add(at, values[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, rows), generate


@compile_time
def stream_rows(_context: Any, address: Any, stride: Any, rows: Any) -> Any:
    """Do as `write_rows`, past the cache; vectors lie at multiples of 64 bytes.

    For what is not read again soon: the cache need not fetch what is written over.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, one = values[0], builder.module.add_metadata([I32(1)])
        for row in cgutils.unpack_tuple(builder, values[2], len(rows)):
            stored = builder.store(row, pointer_to(builder, at, FLOATS), align=4 * LANES)
            stored.set_metadata("nontemporal", one)
            at = builder.add(at, values[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, rows), generate


@compile_time
def add_products(_context: Any, sums: Any, numbers: Any, stride: Any, other: Any) -> Any:
    """(sums, numbers, stride, x) -> sums, the i-th plus x times the number at i strides."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, found = values[1], []
        for held in cgutils.unpack_tuple(builder, values[0], len(sums)):
            found.append(
                multiply_add(
                    builder, in_every_lane(builder, load_number(builder, at)), values[3], held
                )
            )
            at = builder.add(at, values[2])
        return cgutils.pack_array(builder, found)

    return sums(sums, types.intp, types.intp, Vector), generate


@compile_time
def scale_rows(_context: Any, rows: Any, numbers: Any) -> Any:
    """(rows, numbers) -> rows, the i-th times the i-th of the fp32 numbers at ``numbers``."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        found = []
        for index, row in enumerate(cgutils.unpack_tuple(builder, values[0], len(rows))):
            number = load_number(builder, builder.add(values[1], I64(4 * index)))
            found.append(builder.fmul(row, in_every_lane(builder, number)))
        return cgutils.pack_array(builder, found)

    return rows(rows, types.intp), generate


@compile_time
def read_turned(_context: Any, address: Any, stride: Any, last: Any) -> Any:
    """(address, stride, last) -> the columns of 16 rows of 16 words, ``stride`` bytes apart.

    Of rows that would lie beyond ``last``, the one there is read instead.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, rows = values[0], []
        for _ in range(LANES):
            inside = builder.icmp_signed("<=", at, values[2])
            kept = builder.select(inside, at, values[2])
            rows.append(builder.load(pointer_to(builder, kept, FLOATS), align=1))
            at = builder.add(at, values[1])
        return cgutils.pack_array(builder, _turned(builder, rows))

    kind = types.UniTuple(Vector, LANES)
    return kind(types.intp, types.intp, types.intp), generate


def _turned(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors: exchange halves of pairs of rows, then quarters, and so on."""
    distance = LANES // 2
    while distance:
        found = list(rows)
        for upper in range(LANES):
            if upper & distance:
                continue
            lower = upper | distance
            pair = rows[upper], rows[lower]
            # A lane of the second row is number LANES + lane of a shuffle's input.
            left = [LANES + (lane ^ distance) if lane & distance else lane for lane in range(LANES)]
            right = [LANES + lane if lane & distance else lane | distance for lane in range(LANES)]
            found[upper] = builder.shuffle_vector(*pair, ir.Constant(WORDS, left))
            found[lower] = builder.shuffle_vector(*pair, ir.Constant(WORDS, right))
        rows, distance = found, distance // 2
    return rows


@compile_time
def count_differences(_context: Any, address: Any, stride: Any, rows: Any) -> Any:
    """(address, stride, rows) -> how many of the rows' words are not what `write_rows` stored."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, total = values[0], whole(0)
        for row in cgutils.unpack_tuple(builder, values[2], len(rows)):
            held = builder.load(pointer_to(builder, at, WORDS), align=4)
            differs = builder.icmp_unsigned("!=", held, builder.bitcast(row, WORDS))
            total = builder.add(total, builder.zext(differs, WORDS))
            at = builder.add(at, values[1])
        count = call_llvm(builder, "llvm.vector.reduce.add.v16i32", I32, total)
        return builder.zext(count, I64)

    return types.intp(types.intp, types.intp, rows), generate


PRODUCTS = ("fp32", "bf16", "fp16", "int8", "bf16 in tiles")
"""What `dot_rows` multiplies: one, two, two, four or two numbers in each word. The last is for
`amx.multiply_tiles`, and for what that cannot take."""


@compile_time
def dot_rows(
    _context: Any,
    num_rows: Any,
    width: Any,
    product: Any,
    rows: Any,
    stride: Any,
    panel: Any,
    words: Any,
    first: Any,
    out: Any,
    ahead: Any,
    pace: Any,
) -> Any:
    """(num_rows, width, product, rows, stride, panel, words, first, out, ahead, pace): a product.

    ``rows``: so many rows of ``words`` words, ``stride`` bytes apart. ``panel``: for each word of a
    row, ``width`` vectors with one word each of 16 columns. ``first``: what the sums begin with,
    ``width`` vectors for all rows. ``out``: [num_rows, width, 16], in fp32, of int8 in int32.
    ``ahead``: memory to be read later, of which ``pace`` bytes are asked for with each word.
    Sums grow word by word, in whichever tile a row lies, so its bits depend on nothing else.
    """
    size, vectors = literal(num_rows), literal(width)
    product_of = _MULTIPLY_ADD[PRODUCTS[literal(product)]]

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        rows, stride, panel, words, first, out, ahead, pace = values[3:]
        bases = [rows]
        while len(bases) < size:
            bases.append(builder.add(bases[-1], stride))
        starts = [_vector_at(builder, first, vector) for vector in range(vectors)] * size
        before = builder.block
        loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        word, *sums = (builder.phi(kind) for kind in (I64, *[WORDS] * len(starts)))
        ask_for(builder, builder.add(ahead, builder.mul(word, pace)))
        grown = [builder.add(word, I64(1)), *_grown(builder, product_of, sums, bases, panel, word)]
        for phi, begin, end in zip((word, *sums), (I64(0), *starts), grown, strict=True):
            phi.add_incoming(begin, before)
            phi.add_incoming(end, loop)
        builder.cbranch(builder.icmp_signed("<", grown[0], words), loop, after)
        builder.position_at_end(after)
        for number, total in enumerate(grown[1:]):
            at = builder.add(out, I64(4 * LANES * number))
            builder.store(total, pointer_to(builder, at, WORDS), align=4)
        return context.get_dummy_value()

    integers = (types.intp,) * 8
    return types.void(num_rows, width, product, *integers), generate


def _grown(
    builder: ir.IRBuilder,
    product_of: Callable[..., Any],
    sums: list[Any],
    rows: list[Any],
    panel: Any,
    word: Any,
) -> list[Any]:
    """Return the sums of a tile, row by row, with the products of one word added."""
    width = len(sums) // len(rows)
    column = builder.add(panel, builder.mul(word, I64(4 * LANES * width)))
    weights = [_vector_at(builder, column, vector) for vector in range(width)]
    offset, found = builder.mul(word, I64(4)), []
    for number, row in enumerate(rows):
        at = pointer_to(builder, builder.add(row, offset), I32)
        wide = in_every_lane(builder, builder.load(at, align=1), WORDS)
        held = sums[number * width : (number + 1) * width]
        for total, weight in zip(held, weights, strict=True):
            found.append(product_of(builder, total, wide, weight))
    return found


def _vector_at(builder: ir.IRBuilder, address: Any, index: int) -> Any:
    at = builder.add(address, I64(4 * LANES * index))
    return builder.load(pointer_to(builder, at, WORDS), align=4)


def _fp32_product(builder: ir.IRBuilder, total: Any, left: Any, right: Any) -> Any:
    floats = (builder.bitcast(value, FLOATS) for value in (left, right, total))
    return builder.bitcast(multiply_add(builder, *floats), WORDS)


def _bf16_product(builder: ir.IRBuilder, total: Any, left: Any, right: Any) -> Any:
    """Add two products of bf16; by one instruction where the processor has it."""
    if has_feature("avx512bf16"):
        pairs = [
            builder.bitcast(value, ir.VectorType(_Bf16(), 2 * LANES)) for value in (left, right)
        ]
        held = builder.bitcast(total, FLOATS)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return builder.bitcast(call_llvm(builder, name, FLOATS, held, *pairs), WORDS)
    low = [builder.shl(value, whole(16)) for value in (left, right)]
    high = [builder.and_(value, whole(-65536)) for value in (left, right)]
    return _fp32_product(builder, _fp32_product(builder, total, *low), *high)


def _fp16_product(builder: ir.IRBuilder, total: Any, left: Any, right: Any) -> Any:
    """Add two products of fp16."""
    for shift in (0, 16):
        halves = [builder.trunc(builder.lshr(x, whole(shift)), HALVES) for x in (left, right)]
        wide = [builder.fpext(builder.bitcast(x, SHORTS), FLOATS) for x in halves]
        total = _fp32_product(builder, total, *wide)
    return total


def _int8_product(builder: ir.IRBuilder, total: Any, left: Any, right: Any) -> Any:
    """Add four products of an unsigned and a signed byte."""
    return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, left, right)


_MULTIPLY_ADD: dict[str, Callable[..., Any]] = {
    "fp32": _fp32_product,
    "bf16": _bf16_product,
    "fp16": _fp16_product,
    "int8": _int8_product,
    "bf16 in tiles": _bf16_product,
}


class _Bf16(ir.Type):
    """LLVM's type, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bf16)

    def __hash__(self) -> int:
        return hash(_Bf16)


def literal(kind: Any) -> int:
    """Return the number that a kernel is compiled for. Raises RequireLiteralValue."""
    if not isinstance(kind, types.IntegerLiteral):
        msg = "must be known when the kernel is compiled"
        raise RequireLiteralValue(msg)
    return int(kind.literal_value)
