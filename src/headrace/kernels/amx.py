"""Products of bf16 in the tile registers of Intel's AMX: 16 rows by 16 columns an instruction.

Owns: the registers are asked for before a kernel uses them (Linux refuses them otherwise), and a
kernel that used them gives them back. See Intel's Software Developer's Manual, volume 2, TDPBF16PS
and LDTILECFG.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from headrace.kernels.vectors import (
    I8,
    I64,
    LANES,
    call_llvm,
    compile_time,
    has_feature,
    pointer_to,
)

TALLEST_TILES = 32
"""Rows that `multiply_tiles` takes at once."""
PANEL_VECTORS = 2
"""Of the panels that it multiplies by."""
TILE_WORDS = 16
"""Words along the inputs that one instruction adds up."""

_ROW_BYTES = 64
_NUM_TILES = 8
_VOID = ir.VoidType()
_LEFT, _RIGHT, _SUMS = (0, 1), (2, 3), ((4, 5), (6, 7))
"""Registers: of the upper and lower rows, of a panel's vectors, of the sums of each pair."""

_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
"""Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""


@cache
def may_use_tiles() -> bool:
    """Ask for the registers; return whether kernels of this process may use them."""
    if sys.platform != "linux" or not (has_feature("amx-tile") and has_feature("amx-bf16")):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


@compile_time
def multiply_tiles(
    _context: Any, num_rows: Any, rows: Any, stride: Any, panel: Any, words: Any, out: Any
) -> Any:
    """(num_rows, rows, stride, panel, words, out): up to 32 rows times a panel of two vectors.

    As `tiles.dot_rows` with bf16; ``words`` is a multiple of 16. Sums grow in the same order
    wherever a row lies and however many there are.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        num_rows, *rest = values
        half = I64(LANES)
        is_tall = builder.icmp_signed(">", num_rows, half)
        upper = builder.select(is_tall, half, num_rows)
        # A register that is not used must have a row all the same.
        lower = builder.select(is_tall, builder.sub(num_rows, half), I64(1))
        _configure(builder, upper, lower)
        with builder.if_else(is_tall) as (tall, short):
            with tall:
                _multiply(builder, 2, *rest)
            with short:
                _multiply(builder, 1, *rest)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 6), generate


@compile_time
def release_tiles(_context: Any) -> Any:
    """(): the registers hold nothing any more, and switching threads need not save them."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        call_llvm(builder, "llvm.x86.tilerelease", _VOID)
        return context.get_dummy_value()

    return types.void(), generate


def _configure(builder: ir.IRBuilder, upper: Any, lower: Any) -> None:
    """Say how many rows each register has; 64 bytes in each row."""
    setting = cgutils.alloca_once(builder, ir.ArrayType(I8, 64))
    cgutils.memset(builder, setting, I64(64), 0)
    base = builder.ptrtoint(setting, I64)

    def store(offset: int, value: Any) -> None:
        builder.store(value, pointer_to(builder, builder.add(base, I64(offset)), I8), align=1)

    store(0, I8(1))
    heights = {_LEFT[0]: upper, _LEFT[1]: lower, **dict.fromkeys(_RIGHT, I64(TILE_WORDS))}
    heights |= dict.fromkeys(_SUMS[0], upper) | dict.fromkeys(_SUMS[1], lower)
    for tile in range(_NUM_TILES):
        store(16 + 2 * tile, I8(_ROW_BYTES))
        store(48 + tile, builder.trunc(heights[tile], I8))
    pointer = builder.bitcast(setting, I8.as_pointer())
    call_llvm(builder, "llvm.x86.ldtilecfg", _VOID, pointer)


def _multiply(
    builder: ir.IRBuilder, halves: int, rows: Any, stride: Any, panel: Any, words: Any, out: Any
) -> None:
    used = [(half, vector) for half in range(halves) for vector in range(2)]
    for half, vector in used:
        call_llvm(builder, "llvm.x86.tilezero", _VOID, I8(_SUMS[half][vector]))
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("tiles", "after_tiles"))
    builder.branch(loop)
    builder.position_at_end(loop)
    word = builder.phi(I64)
    left = builder.add(rows, builder.mul(word, I64(4)))
    for half in range(halves):
        at = builder.add(left, builder.mul(stride, I64(LANES * half)))
        _load(builder, _LEFT[half], at, stride)
    right = builder.add(panel, builder.mul(word, I64(2 * _ROW_BYTES)))
    for vector in range(2):
        at = builder.add(right, I64(_ROW_BYTES * vector))
        _load(builder, _RIGHT[vector], at, I64(2 * _ROW_BYTES))
    for half, vector in used:
        registers = (_SUMS[half][vector], _LEFT[half], _RIGHT[vector])
        call_llvm(builder, "llvm.x86.tdpbf16ps", _VOID, *map(I8, registers))
    following = builder.add(word, I64(TILE_WORDS))
    word.add_incoming(I64(0), before)
    word.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, words), loop, after)
    builder.position_at_end(after)
    for half, vector in used:
        at = builder.add(out, I64(2 * _ROW_BYTES * LANES * half + _ROW_BYTES * vector))
        pointer = pointer_to(builder, at, I8)
        name, tile = "llvm.x86.tilestored64", I8(_SUMS[half][vector])
        call_llvm(builder, name, _VOID, tile, pointer, I64(2 * _ROW_BYTES))


def _load(builder: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    pointer = pointer_to(builder, address, I8)
    call_llvm(builder, "llvm.x86.tileloadd64", _VOID, I8(tile), pointer, stride)
