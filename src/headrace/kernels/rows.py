"""What kernels do with rows of fp32 numbers, whoever computes: generator or learner."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.kernels.compiled import ONE, ZERO, inline
from headrace.kernels.vectors import (
    LANES,
    add,
    divide,
    exp,
    fma,
    negative,
    read_fp32,
    splat,
    total,
)


@inline
def inverse_rms(row: int, size: int, epsilon: float) -> Any:
    """Return 1 / rms of ``size`` fp32 numbers, in every lane."""
    squares = splat(ZERO)
    for column in range(0, size, LANES):
        x = read_fp32(row + 4 * column)
        squares = fma(x, x, squares)
    return splat(ONE / np.sqrt(total(squares) / np.float32(size) + epsilon))


@inline
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x)."""
    one = splat(ONE)
    return divide(one, add(one, exp(negative(x))))
