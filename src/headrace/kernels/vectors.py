"""Sixteen fp32 numbers at a time, for kernels that numba compiles.

numba has no vector type of its own, and what LLVM makes of a plain loop is no match for saying what
is meant. A `Vector` is LLVM's ``<16 x float>``: one register with AVX-512, two with AVX, four with
NEON. Addresses are whole numbers in bytes, as `torch.Tensor.data_ptr` gives them; nothing here
checks a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen, config
from numba.extending import intrinsic, models, register_model

LANES = 16
LARGEST_EXPONENT, SMALLEST_EXPONENT = 88.0, -87.0
"""`exp` saturates above and is 0 below: e^88 is nearly the largest fp32, e^-87 the least normal."""

F32, I8 = ir.FloatType(), ir.IntType(8)
_I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (F32, I32, _I16))
_BYTES = ir.VectorType(I8, LANES)
SHORTS = ir.VectorType(ir.HalfType(), LANES)

compile_time: Any = intrinsic
"""What its own types say of a decorated function is what numba hands to it, not what kernels do."""

Emit = Callable[[ir.IRBuilder, Any], Any]


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector")


Vector = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def _function(result: types.Type, *arguments: types.Type) -> Callable[[Emit], Any]:
    """Make a function for kernels of what emits its code."""

    def decorate(emit: Emit) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            emitted = emit(builder, values)
            return context.get_dummy_value() if result is types.void else emitted

        def declare(_context: Any, *_kinds: Any) -> Any:
            return result(*arguments), generate

        declare.__name__, declare.__doc__ = emit.__name__, emit.__doc__
        # numba counts parameters, and would take a starred one for a single tuple.
        names = ["context", *(f"value_{index}" for index in range(len(arguments)))]
        kinds = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]
        declare.__signature__ = Signature(kinds)  # type: ignore[attr-defined]
        return compile_time(declare)

    return decorate


def constant(value: float) -> ir.Constant:
    """Return LLVM's vector with ``value`` in every lane."""
    return ir.Constant(FLOATS, [value] * LANES)


def whole(value: int) -> ir.Constant:
    """Return LLVM's vector with the 32 bits of ``value`` in every lane."""
    return ir.Constant(WORDS, [value] * LANES)


def call_llvm(builder: ir.IRBuilder, name: str, result: Any, *values: Any) -> Any:
    """Emit a call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def pointer_to(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    """Emit what makes a pointer of an address."""
    return builder.inttoptr(address, kind.as_pointer())


def in_every_lane(builder: ir.IRBuilder, number: Any, kind: ir.VectorType = FLOATS) -> Any:
    """Emit what makes a vector of one number."""
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, number, I32(0))
    lanes = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(single, undefined, lanes)


def multiply_add(builder: ir.IRBuilder, left: Any, right: Any, total: Any) -> Any:
    """Emit left * right + total, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", FLOATS, left, right, total)


def load_number(builder: ir.IRBuilder, address: Any) -> Any:
    """Emit a load of one fp32 number."""
    return builder.load(pointer_to(builder, address, F32), align=4)


@_function(Vector, types.float32)
def splat(builder: ir.IRBuilder, values: Any) -> Any:
    """(number) -> the same number in every lane."""
    return in_every_lane(builder, values[0])


@_function(Vector, Vector, Vector)
def add(builder: ir.IRBuilder, values: Any) -> Any:
    """(x, y) -> x + y."""
    return builder.fadd(*values)


@_function(Vector, Vector, Vector)
def multiply(builder: ir.IRBuilder, values: Any) -> Any:
    """(x, y) -> x * y."""
    return builder.fmul(*values)


@_function(Vector, Vector, Vector)
def divide(builder: ir.IRBuilder, values: Any) -> Any:
    """(x, y) -> x / y."""
    return builder.fdiv(*values)


@_function(Vector, Vector, Vector, Vector)
def fma(builder: ir.IRBuilder, values: Any) -> Any:
    """(x, y, z) -> x * y + z, rounded once."""
    return multiply_add(builder, *values)


@_function(Vector, Vector, Vector)
def larger_size(builder: ir.IRBuilder, values: Any) -> Any:
    """(x, y) -> |x| or |y|, the larger; NaN where one is.

    Bits of sizes are ordered as whole numbers are, and those of NaN come last.
    """
    sizes = [builder.and_(builder.bitcast(x, WORDS), whole(0x7FFFFFFF)) for x in values]
    found = builder.select(builder.icmp_signed(">", *sizes), *sizes)
    return builder.bitcast(found, FLOATS)


@_function(Vector, Vector, Vector)
def maximum(builder: ir.IRBuilder, values: Any) -> Any:
    """(x, y) -> the larger of each lane; of NaN and a number, the number."""
    return call_llvm(builder, "llvm.maxnum.v16f32", FLOATS, *values)


@_function(Vector, Vector)
def negative(builder: ir.IRBuilder, values: Any) -> Any:
    """(x) -> -x."""
    return builder.fneg(*values)


@_function(types.float32, Vector)
def total(builder: ir.IRBuilder, values: Any) -> Any:
    """(x) -> the sum of the lanes, pair by pair."""
    kind = ir.FunctionType(F32, [F32, FLOATS])
    name = "llvm.vector.reduce.fadd.v16f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [F32(-0.0), values[0]], fastmath=("reassoc",))


@_function(types.float32, Vector)
def largest(builder: ir.IRBuilder, values: Any) -> Any:
    """(x) -> the largest lane; those that are NaN do not count."""
    return call_llvm(builder, "llvm.vector.reduce.fmax.v16f32", F32, *values)


@_function(types.float32, Vector)
def largest_size(builder: ir.IRBuilder, values: Any) -> Any:
    """(x) -> the largest lane, of sizes; NaN where one is."""
    bits = builder.bitcast(values[0], WORDS)
    found = call_llvm(builder, "llvm.vector.reduce.smax.v16i32", I32, bits)
    return builder.bitcast(found, F32)


@_function(Vector, Vector)
def exp(builder: ir.IRBuilder, values: Any) -> Any:
    """(x) -> e^x within 2 units in the last place; NaN stays NaN.

    e^x = 2^n e^r with r = x - n ln 2 and a polynomial for e^r, the constants those of the Cephes
    library (Moshier 1992, expf).
    """
    given = values[0]
    kept = call_llvm(builder, "llvm.maxnum.v16f32", FLOATS, given, constant(SMALLEST_EXPONENT))
    kept = call_llvm(builder, "llvm.minnum.v16f32", FLOATS, kept, constant(LARGEST_EXPONENT))
    scaled = builder.fmul(kept, constant(1.44269504088896341))
    turns = call_llvm(builder, "llvm.rint.v16f32", FLOATS, scaled)
    # ln 2 in two parts, of which the first has so few digits that its products are exact.
    rest = multiply_add(builder, turns, constant(-0.693359375), kept)
    rest = multiply_add(builder, turns, constant(2.12194440e-4), rest)
    series = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        series = multiply_add(builder, series, rest, constant(factor))
    series = multiply_add(builder, series, builder.fmul(rest, rest), rest)
    power = builder.add(builder.fptosi(turns, WORDS), whole(127))
    power = builder.bitcast(builder.shl(power, whole(23)), FLOATS)
    found = builder.fmul(builder.fadd(series, constant(1.0)), power)
    vanishes = builder.fcmp_ordered("<", given, constant(SMALLEST_EXPONENT))
    found = builder.select(vanishes, constant(0.0), found)
    return builder.select(builder.fcmp_unordered("uno", given, given), given, found)


@_function(Vector, types.intp)
def read_fp32(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> 16 fp32 numbers."""
    return builder.load(pointer_to(builder, values[0], FLOATS), align=4)


@_function(Vector, types.intp)
def read_bf16(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> 16 bf16 numbers."""
    halves = builder.load(pointer_to(builder, values[0], HALVES), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, WORDS), whole(16)), FLOATS)


@_function(Vector, types.intp)
def read_fp16(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> 16 fp16 numbers."""
    return builder.fpext(builder.load(pointer_to(builder, values[0], SHORTS), align=2), FLOATS)


@_function(types.void, types.intp, Vector)
def write_fp32(builder: ir.IRBuilder, values: Any) -> Any:
    """(address, x): store 16 fp32 numbers."""
    builder.store(values[1], pointer_to(builder, values[0], FLOATS), align=4)


def rounded_to_bf16(builder: ir.IRBuilder, numbers: Any) -> Any:
    """Emit what rounds fp32 to the bits of bf16: to nearest, ties to even; a NaN stays one.

    Not by the instruction that some processors have, which takes the smallest numbers for zeros.
    """
    bits = builder.bitcast(numbers, WORDS)
    is_odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
    rounded = builder.add(bits, builder.add(is_odd, whole(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    rounded = builder.select(is_nan, builder.or_(bits, whole(0x400000)), rounded)
    return builder.trunc(builder.lshr(rounded, whole(16)), HALVES)


@_function(types.void, types.intp, Vector)
def write_bf16(builder: ir.IRBuilder, values: Any) -> Any:
    """(address, x): store 16 bf16 numbers, rounded to nearest, ties to even."""
    halves = rounded_to_bf16(builder, values[1])
    builder.store(halves, pointer_to(builder, values[0], HALVES), align=2)


@_function(types.void, types.intp, Vector)
def write_fp16(builder: ir.IRBuilder, values: Any) -> Any:
    """(address, x): store 16 fp16 numbers, rounded to nearest, ties to even."""
    short = builder.fptrunc(values[1], SHORTS)
    builder.store(short, pointer_to(builder, values[0], SHORTS), align=2)


@_function(Vector, Vector)
def round_whole(builder: ir.IRBuilder, values: Any) -> Any:
    """(x) -> x rounded to whole numbers, ties to even."""
    return call_llvm(builder, "llvm.rint.v16f32", FLOATS, values[0])


@_function(types.void, types.intp, Vector)
def write_byte(builder: ir.IRBuilder, values: Any) -> Any:
    """(address, x): store whole numbers as 16 bytes; signed or not, what fits in one."""
    narrow = builder.trunc(builder.fptosi(values[1], WORDS), _BYTES)
    builder.store(narrow, pointer_to(builder, values[0], _BYTES), align=1)


@_function(Vector, types.intp)
def read_int32(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> 16 signed whole numbers of 32 bits, as fp32."""
    return builder.sitofp(builder.load(pointer_to(builder, values[0], WORDS), align=4), FLOATS)


@_function(types.float32, types.intp)
def read_number(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> one fp32 number."""
    return load_number(builder, values[0])


@_function(types.void, types.intp, types.float32)
def write_number(builder: ir.IRBuilder, values: Any) -> Any:
    """(address, number): store one fp32 number."""
    builder.store(values[1], pointer_to(builder, values[0], F32), align=4)


@_function(types.void, types.intp, types.intp)
def copy_word(builder: ir.IRBuilder, values: Any) -> Any:
    """(target, source): move four bytes."""
    moved = builder.load(pointer_to(builder, values[1], I32), align=1)
    builder.store(moved, pointer_to(builder, values[0], I32), align=1)


@_function(types.void, types.intp, types.intp)
def copy_half(builder: ir.IRBuilder, values: Any) -> Any:
    """(target, source): move two bytes."""
    moved = builder.load(pointer_to(builder, values[1], _I16), align=1)
    builder.store(moved, pointer_to(builder, values[0], _I16), align=1)


@_function(types.intp, types.intp)
def read_word(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> the unsigned whole number in four bytes."""
    return builder.zext(builder.load(pointer_to(builder, values[0], I32), align=1), I64)


@_function(types.intp, types.intp)
def read_integer(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> one whole number of 64 bits."""
    return builder.load(pointer_to(builder, values[0], I64), align=8)


@_function(types.intp, types.intp)
def next_item(builder: ir.IRBuilder, values: Any) -> Any:
    """(address) -> the number there, which grows by 1 in the same stroke: whose turn is it?"""
    return builder.atomic_rmw("add", pointer_to(builder, values[0], I64), I64(1), "monotonic")


@_function(types.void, types.intp, types.intp)
def add_to(builder: ir.IRBuilder, values: Any) -> Any:
    """(address, number): add to the whole number of 64 bits there, in one stroke."""
    builder.atomic_rmw("add", pointer_to(builder, values[0], I64), values[1], "monotonic")


def ask_for(builder: ir.IRBuilder, address: Any) -> None:
    """Emit what has the cache line at ``address`` on its way, to be read soon."""
    pointer = pointer_to(builder, address, I8)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, I32(0), I32(3), I32(1)])


@_function(types.void, types.intp)
def prefetch(builder: ir.IRBuilder, values: Any) -> Any:
    """(address): ask for the cache line there, to be read soon."""
    ask_for(builder, values[0])


@_function(types.intp, types.voidptr)
def address_of(builder: ir.IRBuilder, values: Any) -> Any:
    """(pointer) -> its address."""
    return builder.ptrtoint(values[0], I64)


@cache
def has_feature(name: str) -> bool:
    """Return whether kernels may use LLVM's ``name`` of what a processor has.

    What numba compiles for: this processor, unless its environment variables say otherwise.
    """
    features: str | None = vars(config)["CPU_FEATURES"]  # made when numba is imported
    if features is None:
        features = codegen.get_host_cpu_features()
    return f"+{name}" in features.split(",")
