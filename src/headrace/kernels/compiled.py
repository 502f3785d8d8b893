"""How kernels are compiled and kept, and what all of them use.

A kernel is a C function of one pointer: to whole numbers, of which the first counts the pieces of
work that were taken (`Call` fills them in). Whoever runs it takes piece after piece until none is
left, so any number of threads may run the same call at once. Compiled code is kept on disk beside
the source, or where numba keeps it for a user who may not write there; where it finds no place, it
is compiled in each process. Kernels raise nothing: an error would need Python's lock, which the
thread that waits for them may hold, so what is divided by zero is not finite, and no more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from ctypes import CFUNCTYPE, PYFUNCTYPE, c_void_p
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numba import cfunc, literally, njit, types

from headrace.kernels.vectors import (
    LANES,
    read_bf16,
    read_fp16,
    read_fp32,
    read_integer,
    write_bf16,
    write_fp16,
    write_fp32,
)

FP32, BF16, FP16 = range(3)
"""How numbers are stored. Whole numbers: numba keeps compiled code by what a kernel is made for."""

ZERO: Any = np.float32(0.0)
ONE: Any = np.float32(1.0)

VECTOR = 4 * LANES
"""Bytes of a vector in fp32."""

BYTES = (4, 2, 2)
"""Of one number, by how it is stored."""

ROWS = 4
"""Rows that are taken at a time where a row is little work."""

_REVISION = zlib.crc32(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
)
"""numba looks at one file to see whether what it kept is stale; kernels are made of several."""


_SIGNATURE = types.void(types.voidptr)
_ERRORS: Literal["numpy"] = "numpy"


class Kernel:
    """A compiled kernel: where it lies, and how it is called on this thread."""

    __slots__ = ("_compiled", "address", "alone", "alone_for_long")

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # the code lives as long as this does
        self.address: int = compiled.address
        self.alone = PYFUNCTYPE(None, c_void_p)(compiled.address)
        self.alone_for_long = CFUNCTYPE(None, c_void_p)(compiled.address)
        """Lets other threads run Python meanwhile."""


def kernel(function: Callable[..., Any]) -> Kernel:
    """Compile a function of one pointer, or find what was compiled before."""
    function.__qualname__ += f"_{_REVISION:08x}"
    try:
        compiled = cfunc(_SIGNATURE, cache=True, error_model=_ERRORS)(function)
    except RuntimeError:  # numba may write nowhere
        compiled = cfunc(_SIGNATURE, error_model=_ERRORS)(function)
    return Kernel(compiled)


inline = njit(inline="never", error_model=_ERRORS)
"""A part of kernels; LLVM decides what becomes of it."""

known: Any = literally
"""(argument of an `inline`): compile that once for each number that is handed in."""


@inline
def argument(call: int, index: int) -> int:
    """Return one of the numbers that a kernel is called with."""
    return read_integer(call + 8 * index)


@inline
def read(address: int, storage: int) -> Any:
    """Read 16 numbers; ``storage`` is one of `FP32`, `BF16`, `FP16`."""
    if storage == BF16:
        return read_bf16(address)
    if storage == FP16:
        return read_fp16(address)
    return read_fp32(address)


@inline
def write(address: int, numbers: Any, storage: int) -> None:
    """Store 16 numbers, rounded to ``storage``."""
    if storage == BF16:
        write_bf16(address, numbers)
    elif storage == FP16:
        write_fp16(address, numbers)
    else:
        write_fp32(address, numbers)
