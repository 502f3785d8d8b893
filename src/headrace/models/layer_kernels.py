"""Kernels of what a decoder layer does beside matrix products and attention, for training.

Residuals, weights, cos and sin are fp32; what products read and give is fp32 or bf16 (``storage``).
Each is one pass over its rows where torch's own operators make five to ten, and nothing between
input and output is kept for the backward pass. Sums go row by row in one order, whatever the
number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headrace.kernels.compiled import (
    BYTES,
    ONE,
    ROWS,
    ZERO,
    Kernel,
    argument,
    kernel,
    read,
    write,
)
from headrace.kernels.rows import inverse_rms, sigmoid
from headrace.kernels.vectors import (
    LANES,
    add,
    address_of,
    fma,
    multiply,
    negative,
    next_item,
    read_fp32,
    read_number,
    splat,
    total,
    write_fp32,
    write_number,
)

WEIGHT_ROWS = 32
"""Rows whose part of the gradient of a norm's weight is summed by one thread."""


@cache
def norm_kernel(*, storage: int) -> Kernel:
    """Write ``hidden`` + ``delta`` [n, size] to ``residual``, and its RMS norm to ``out``.

    out = residual / rms(residual) * weight. Arguments: taken, n, size, hidden, delta (0: none, and
    no residual is written), residual, weight, out, scales ([n] fp32: 1 / rms), epsilon (address of
    an fp32). ``delta`` and ``out`` are in storage.
    """
    bytes_of = BYTES[storage]

    def norm(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, size, delta = argument(call, 1), argument(call, 2), argument(call, 4)
        weight, epsilon = argument(call, 6), read_number(argument(call, 9))
        while True:
            first = ROWS * next_item(call)
            if first >= num_rows:
                break
            for row in range(first, min(first + ROWS, num_rows)):
                hidden = argument(call, 3) + 4 * size * row
                if delta != 0:
                    residual = argument(call, 5) + 4 * size * row
                    for column in range(0, size, LANES):
                        x = read(delta + bytes_of * (size * row + column), storage)
                        write_fp32(residual + 4 * column, add(read_fp32(hidden + 4 * column), x))
                    hidden = residual
                scale = inverse_rms(hidden, size, epsilon)
                write_number(argument(call, 8) + 4 * row, total(scale) / np.float32(LANES))
                out = argument(call, 7) + bytes_of * size * row
                for column in range(0, size, LANES):
                    x = multiply(read_fp32(hidden + 4 * column), scale)
                    x = multiply(x, read_fp32(weight + 4 * column))
                    write(out + bytes_of * column, x, storage)

    return kernel(norm)


@cache
def norm_backward_kernel(*, storage: int) -> Kernel:
    """Write the gradient of `norm_kernel`'s input [n, size] fp32, and parts of its weight's.

    With s = 1 / rms and g the gradient of the norm times the weight, dx = s g - s^3 x mean(g x),
    to which ``passed`` (0: none), the gradient of the residual, is added. ``parts``
    [ceil(n / WEIGHT_ROWS), size] fp32 add up to the gradient of the weight. Arguments: taken, n,
    size, gradient (in storage), residual, weight, scales, passed, out, parts.
    """
    bytes_of = BYTES[storage]

    def norm_backward(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, size = argument(call, 1), argument(call, 2)
        weight, passed = argument(call, 5), argument(call, 7)
        while True:
            item = next_item(call)
            first = WEIGHT_ROWS * item
            if first >= num_rows:
                break
            part = argument(call, 9) + 4 * size * item
            for column in range(0, size, LANES):
                write_fp32(part + 4 * column, splat(ZERO))
            for row in range(first, min(first + WEIGHT_ROWS, num_rows)):
                gradient = argument(call, 3) + bytes_of * size * row
                place = 4 * size * row
                residual, out = argument(call, 4) + place, argument(call, 8) + place
                scale = read_number(argument(call, 6) + 4 * row)
                dots = splat(ZERO)
                for column in range(0, size, LANES):
                    g = read(gradient + bytes_of * column, storage)
                    x = read_fp32(residual + 4 * column)
                    own = part + 4 * column
                    write_fp32(own, fma(multiply(g, x), splat(scale), read_fp32(own)))
                    dots = fma(multiply(g, read_fp32(weight + 4 * column)), x, dots)
                pull = splat(-scale * scale * scale * total(dots) / np.float32(size))
                for column in range(0, size, LANES):
                    g = read(gradient + bytes_of * column, storage)
                    g = multiply(multiply(g, read_fp32(weight + 4 * column)), splat(scale))
                    g = fma(read_fp32(residual + 4 * column), pull, g)
                    if passed != 0:
                        g = add(g, read_fp32(passed + 4 * (size * row + column)))
                    write_fp32(out + 4 * column, g)

    return kernel(norm_backward)


@cache
def gate_kernel(*, storage: int) -> Kernel:
    """Write silu(gate) * up to ``out``; all [n, size] in storage.

    Arguments: taken, n, size, gate, up, out.
    """
    bytes_of = BYTES[storage]

    def gated(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, size = argument(call, 1), argument(call, 2)
        while True:
            first = ROWS * next_item(call)
            if first >= num_rows:
                break
            start, end = size * first, size * min(first + ROWS, num_rows)
            for place in range(bytes_of * start, bytes_of * end, bytes_of * LANES):
                gate = read(argument(call, 3) + place, storage)
                up = read(argument(call, 4) + place, storage)
                write(
                    argument(call, 5) + place,
                    multiply(multiply(gate, sigmoid(gate)), up),
                    storage,
                )

    return kernel(gated)


@cache
def gate_backward_kernel(*, storage: int) -> Kernel:
    """Write the gradients of gate and up; all [n, size] in storage.

    With s = sigmoid(gate): d up = d gate s, d gate = d up (s + gate s (1 - s)), where d is the
    gradient of the output. Arguments: taken, n, size, gradient, gate, up, of_gate, of_up.
    """
    bytes_of = BYTES[storage]

    def gate_backward(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, size = argument(call, 1), argument(call, 2)
        while True:
            first = ROWS * next_item(call)
            if first >= num_rows:
                break
            start, end = size * first, size * min(first + ROWS, num_rows)
            for place in range(bytes_of * start, bytes_of * end, bytes_of * LANES):
                gradient = read(argument(call, 3) + place, storage)
                gate = read(argument(call, 4) + place, storage)
                up = read(argument(call, 5) + place, storage)
                share = sigmoid(gate)
                active = multiply(gate, share)
                slope = fma(active, add(splat(ONE), negative(share)), share)
                write(argument(call, 6) + place, multiply(multiply(gradient, up), slope), storage)
                write(argument(call, 7) + place, multiply(gradient, active), storage)

    return kernel(gate_backward)


@cache
def rotate_kernel(*, storage: int) -> Kernel:
    """Rotate the heads of each row by its angles; see `headrace.models.rope.apply_rope`.

    ``source`` [n, heads, head_dim] in storage, ``cos`` and ``sin`` [n, head_dim] fp32; ``out`` as
    source. ``sign`` (address of an fp32): -1 turns back, which is the backward pass. ``head_dim``
    is a multiple of 32. Arguments: taken, n, heads, head_dim, source, cos, sin, out, sign.
    """
    bytes_of = BYTES[storage]

    def rotate(pointer: Any) -> None:
        call = address_of(pointer)
        num_rows, heads, size = argument(call, 1), argument(call, 2), argument(call, 3)
        half, sign = size // 2, splat(read_number(argument(call, 8)))
        while True:
            first = ROWS * next_item(call)
            if first >= num_rows:
                break
            for row in range(first, min(first + ROWS, num_rows)):
                cos = argument(call, 5) + 4 * size * row
                sin = argument(call, 6) + 4 * size * row
                for head in range(heads * row, heads * (row + 1)):
                    source = argument(call, 4) + bytes_of * size * head
                    out = argument(call, 7) + bytes_of * size * head
                    for column in range(0, half, LANES):
                        left = read(source + bytes_of * column, storage)
                        right = read(source + bytes_of * (half + column), storage)
                        # The first half of sin is negated, so that of the second serves both.
                        cosine = read_fp32(cos + 4 * column)
                        sine = multiply(read_fp32(sin + 4 * (half + column)), sign)
                        turned = fma(left, cosine, negative(multiply(right, sine)))
                        write(out + bytes_of * column, turned, storage)
                        turned = fma(right, cosine, multiply(left, sine))
                        write(out + bytes_of * (half + column), turned, storage)

    return kernel(rotate)
