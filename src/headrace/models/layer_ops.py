"""Norms, gates and rotations of a decoder layer, differentiable, each as one pass over memory.

Where kernels serve (`_serves`) they are kernels; elsewhere the same in torch's operators. Torch
makes of an RMS norm and its gradient some twenty passes over tensors of a whole micro-batch, most
of them into memory it has never touched before; on a processor that was a quarter of an update.
Under autocast the outputs have its dtype, rounded once. In inference mode it is always torch: that
is a generator's engine, which has kernels of its own or captures graphs of torch's operators.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter, functional

from headrace.kernels.calls import Call
from headrace.kernels.compiled import BF16, FP32
from headrace.kernels.vectors import LANES
from headrace.models.layer_kernels import (
    WEIGHT_ROWS,
    gate_backward_kernel,
    gate_kernel,
    norm_backward_kernel,
    norm_kernel,
    rotate_kernel,
)
from headrace.models.rope import apply_rope

_STORAGE = {torch.float32: FP32, torch.bfloat16: BF16}
_SIGNS = np.array([1.0, -1.0], dtype=np.float32)
"""Of a rotation and of the one that undoes it; kernels are given addresses."""

_Context: TypeAlias = Any
"""Torch gives the context of a function no public type."""


def add_and_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return ``hidden`` + ``delta`` and its RMS norm times ``weight``; [N, size] each.

    Without a ``delta`` the first is ``hidden`` itself; use it all the same for what comes after,
    and the two gradients are added where the norm's is made.
    """
    dtype = _product_dtype(hidden)
    deltas_fit = delta is None or (delta.dtype == dtype and _is_plain(delta))
    if _serves(hidden, dtype, weight, hidden.dtype == weight.dtype == torch.float32, deltas_fit):
        residual, normed = _AddAndNorm.apply(hidden, delta, weight, epsilon, dtype)  # type: ignore[no-untyped-call]
        return residual, normed
    residual = hidden if delta is None else hidden + delta
    return residual, functional.rms_norm(residual, weight.shape, weight, epsilon)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; [N, size] each."""
    if _serves(gate, gate.dtype, up, gate.dtype == up.dtype):
        out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
        return out
    return functional.silu(gate) * up


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `apply_rope` of ``states`` [N, heads, head_dim]."""
    fits = states.shape[-1] % (2 * LANES) == 0 and cos.dtype == torch.float32
    if _serves(states, states.dtype, cos, fits, sin.is_contiguous()):
        out: Tensor = _Rotated.apply(states, cos, sin)  # type: ignore[no-untyped-call]
        return out
    return apply_rope(states, cos, sin)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Return what matrix products will read ``hidden`` as."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _serves(states: Tensor, dtype: torch.dtype, other: Tensor, *conditions: bool) -> bool:
    """Whether kernels take ``states`` [N, ..., size] and ``other``, rows in ``dtype``."""
    is_whole = states.shape[-1] % LANES == 0 and states.numel() > 0
    is_here = states.device.type == "cpu" and not torch.is_inference_mode_enabled()
    return (
        is_here
        and is_whole
        and dtype in _STORAGE
        and _is_plain(states)
        and _is_plain(other)
        and all(conditions)
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a tensor in one piece of memory, and not, say, one of several ranks'."""
    return type(tensor) in {Tensor, Parameter} and tensor.is_contiguous()


def _run(call: Call, arguments: tuple[int | Tensor | None, ...], num_vectors: int) -> None:
    """Run a kernel over tensors, of which None stands for an address of 0."""
    for index, value in enumerate(arguments, start=1):
        address = value.data_ptr() if isinstance(value, Tensor) else value
        call[index] = 0 if address is None else address
    call.run(torch.get_num_threads(), num_vectors)


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        epsilon: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[-1]
        num_rows = hidden.numel() // size
        residual = hidden if delta is None else torch.empty_like(hidden)
        out, scales = torch.empty_like(hidden, dtype=dtype), hidden.new_empty(num_rows)
        numbers = np.array([epsilon], dtype=np.float32)
        call = Call(norm_kernel(storage=_STORAGE[dtype]), 10)
        own = (num_rows, size, hidden, delta, residual, weight, out, scales, numbers.ctypes.data)
        _run(call, own, hidden.numel() // 4)
        ctx.save_for_backward(residual, weight, scales)
        ctx.delta_dtype = None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return residual, out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, passed: Tensor | None, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        residual, weight, scales = ctx.saved_tensors
        if gradient is None:
            of_hidden, of_weight = passed, None
        else:
            of_hidden, of_weight = _norm_gradients(gradient, residual, weight, scales, passed)
        of_delta = None
        if ctx.delta_dtype is not None and of_hidden is not None:
            of_delta = of_hidden.to(ctx.delta_dtype)
        return of_hidden, of_delta, of_weight, None, None


def _norm_gradients(
    gradient: Tensor, residual: Tensor, weight: Tensor, scales: Tensor, passed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of what was normed, ``passed`` added, and of the weight."""
    gradient = gradient.contiguous()
    passed = None if passed is None else passed.contiguous()
    num_rows, size = len(scales), residual.shape[-1]
    of_hidden = torch.empty_like(residual)
    parts = residual.new_empty(-(-num_rows // WEIGHT_ROWS), size)
    call = Call(norm_backward_kernel(storage=_STORAGE[gradient.dtype]), 10)
    own = (num_rows, size, gradient, residual, weight, scales, passed, of_hidden, parts)
    _run(call, own, residual.numel() // 2)
    return of_hidden, parts.sum(0)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        size = gate.shape[-1]
        call = Call(gate_kernel(storage=_STORAGE[gate.dtype]), 6)
        _run(call, (gate.numel() // size, size, gate, up, out), gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        size = gate.shape[-1]
        call = Call(gate_backward_kernel(storage=_STORAGE[gate.dtype]), 8)
        own = (gate.numel() // size, size, gradient.contiguous(), gate, up, of_gate, of_up)
        _run(call, own, 2 * gate.numel())
        return of_gate, of_up


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(states, cos, sin, is_back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient.contiguous(), cos, sin, is_back=True), None, None


def _turned(states: Tensor, cos: Tensor, sin: Tensor, *, is_back: bool) -> Tensor:
    out = torch.empty_like(states)
    num_rows, heads, head_dim = states.shape
    sign = _SIGNS.ctypes.data + 4 * is_back
    call = Call(rotate_kernel(storage=_STORAGE[states.dtype]), 9)
    _run(call, (num_rows, heads, head_dim, states, cos, sin, out, sign), states.numel() // 4)
    return out
