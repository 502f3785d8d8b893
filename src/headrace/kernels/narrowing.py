"""Matrices of fp32 rounded to bf16 and summed on the way, while a row is in the nearest cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headrace.kernels.checksums import CHUNK, add_row, sum_lanes
from headrace.kernels.compiled import BF16, BYTES, FP32, Kernel, argument, kernel, read, write
from headrace.kernels.vectors import LANES, add_to, address_of, next_item, splat


@cache
def narrowing_kernel(even: int) -> Kernel:
    """Write ``numbers`` [n, size] fp32 to ``out`` [n, size] bf16, ties to even; a NaN stays one.

    And add to ``total`` [1] int64 what `checksum_kernel` adds for ``out``. Arguments: taken, n,
    words of 64 bits in a row of ``out`` (a multiple of `STRIDE`), numbers, out, total.
    """
    per_word = 8 // BYTES[BF16]

    def narrow(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, words = argument(call, 1), argument(call, 2)
        size = per_word * words
        num_taken = max(CHUNK // words, 1)
        while True:
            first = num_taken * next_item(call)
            if first >= num_rows:
                break
            found = splat(np.float32(0.0))
            for row in range(first, min(first + num_taken, num_rows)):
                numbers = argument(call, 3) + BYTES[FP32] * size * row
                out = argument(call, 4) + BYTES[BF16] * size * row
                for place in range(0, size, LANES):
                    x = read(numbers + BYTES[FP32] * place, FP32)
                    write(out + BYTES[BF16] * place, x, BF16)
                found = add_row(found, out, words, even + 1, even * row + 1)
            add_to(argument(call, 5), sum_lanes(found))

    return kernel(narrow)
