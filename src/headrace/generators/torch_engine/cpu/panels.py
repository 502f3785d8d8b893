"""Weight matrices in panels: what the kernels of products multiply by, as a `Form` each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.generators.torch_engine.cpu.product_kernels import (
    OUTPUTS,
    UNSIGNED,
    content_kernel,
    pack_kernel,
    product_kernel,
    quantize_kernel,
)
from headrace.generators.torch_engine.forms import side_by_side
from headrace.kernels.amx import may_use_tiles
from headrace.kernels.calls import Call
from headrace.kernels.compiled import BF16, FP16, FP32
from headrace.kernels.sequences import run_together
from headrace.kernels.vectors import LANES, has_feature
from headrace.models.weights import EVEN, content, same_bits

WORD = 4
"""Bytes of the unit in which panels are laid out."""

STORAGE = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
"""What kernels call the dtypes that they take."""

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _name(dtype: torch.dtype) -> str:
    name = _NAMES[dtype]
    return f"{name} in tiles" if name == "bf16" and may_use_tiles() else name


def can_hold(dtype: torch.dtype, device: torch.device, inputs: int) -> bool:
    """Return whether `Panels` take matrices of so many ``inputs``."""
    return device.type == "cpu" and dtype in STORAGE and inputs * dtype.itemsize % WORD == 0


def can_hold_int8(dtype: torch.dtype, device: torch.device, inputs: int) -> bool:
    """Return whether `QuantizedPanels` take them, whose products are exact.

    Processors without these instructions add pairs of products in 16 bits, which saturate.
    """
    return can_hold(dtype, device, inputs) and inputs % LANES == 0 and has_feature("avx512vnni")


class Panels:
    """A matrix of fp32, bf16 or fp16, see `Form`."""

    def __init__(self, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        """``out_dtype``: of the products, ``dtype`` or fp32."""
        self._dtype = dtype
        self._store, self._bias = _Store(), _Bias()
        self._product = _Product(_name(dtype), out_dtype)
        self._zeros = torch.zeros(OUTPUTS)
        self._product.call[7] = self._zeros.data_ptr()

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """See `Form`."""
        self._store.load(weights)
        self._bias.load(biases)

    def holds(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
        """See `Form`."""
        return self._store.holds(weights) and self._bias.holds(biases)

    def contents(self) -> Sequence[int] | None:
        """See `Form`: sums over the panels, if rows are of whole words of 64 bits."""
        if self._store.words % 2:
            return None
        return [*self._store.contents(), *self._bias.contents(self._dtype, self._store.sizes)]

    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Form`."""
        return self._product.of(hidden, self._store, self._bias, out)


class QuantizedPanels:
    """A matrix in eight bits, one scale for each output; inputs get one for each row.

    As `Quantized`, of which it has the mathematics. Inputs are held with 128 added, for processors
    multiply unsigned by signed bytes; the sums begin with what that adds up to, negative.
    """

    def __init__(self, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        """``dtype``: of what is multiplied. ``out_dtype``: of the products, ``dtype`` or fp32."""
        self._store, self._bias = _Store(), _Bias()
        self._product = _Product("int8", out_dtype)
        self._round = Call(quantize_kernel(storage=STORAGE[dtype], is_unsigned=True), 6)
        self._scales = torch.empty(0)
        """[padded outputs] in fp32: the weight that a step of 1 stands for."""
        self._first = torch.empty(0, dtype=torch.int32)
        """[padded outputs]: -128 times the sum of each output's weights."""

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """See `Form`."""
        steps, self._scales, self._first = _rounded_matrix(weights)
        self._store.load([steps])
        self._bias.load(biases)
        call = self._product.call
        call[7], call[9] = self._first.data_ptr(), self._scales.data_ptr()

    def holds(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
        """See `Form`: it is what ``weights`` are rounded to."""
        steps, scales, first = _rounded_matrix(weights)
        held = self._store.holds([steps]) and same_bits(self._scales, scales)
        return held and torch.equal(first, self._first) and self._bias.holds(biases)

    def contents(self) -> Sequence[int] | None:
        """See `Form`: they are not held as they came."""
        return None

    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Form`."""
        rows = torch.empty(hidden.shape, dtype=torch.uint8)
        scales = torch.empty(len(hidden))
        _round(self._round, hidden, rows, scales)
        self._product.call[8] = scales.data_ptr()
        return self._product.of(rows, self._store, self._bias, out)


class _Product:
    """A call of `product_kernel`."""

    def __init__(self, product: str, out_dtype: torch.dtype) -> None:
        self._out_dtype = out_dtype
        self.call = Call(product_kernel(product, storage=STORAGE[out_dtype]), 11)

    def of(self, rows: Tensor, store: _Store, bias: _Bias, out: Tensor | None) -> Tensor:
        """Return [N, outputs], in ``out`` if given."""
        call, num_rows, vectors = self.call, len(rows), -(-store.num_outputs // LANES)
        is_whole = store.num_outputs == vectors * LANES
        if out is not None and is_whole:
            target = out
        else:
            target = torch.empty(num_rows, vectors * LANES, dtype=self._out_dtype)
        call[1], call[2], call[3] = num_rows, store.words, vectors
        call[4], call[5], call[6] = rows.data_ptr(), store.panels.data_ptr(), target.data_ptr()
        call[10] = bias.address
        call.run(torch.get_num_threads(), num_rows * store.panels.numel() // LANES)
        if is_whole:
            return target
        found = target[:, : store.num_outputs]
        return found.contiguous() if out is None else out.copy_(found)


class _Store:
    """The panels of one matrix."""

    def __init__(self) -> None:
        self.panels = torch.empty(0, dtype=torch.int32)
        self.words = self.num_outputs = 0
        self.sizes: list[int] = []
        """Outputs of each part."""

    def load(self, parts: Sequence[Tensor]) -> None:
        """Take the content of ``parts`` [some outputs, inputs]."""
        self.sizes = [len(part) for part in parts]
        self.num_outputs = sum(self.sizes)
        self.words = parts[0].shape[1] * parts[0].element_size() // WORD
        size = _padded_size(self.num_outputs) * self.words
        if self.panels.numel() != size:
            # One matrix at a time is held twice, and memory that is there is used again.
            self.panels = torch.empty(0, dtype=torch.int32)
            self.panels = torch.empty(size, dtype=torch.int32)
        self._pack(parts, is_check=False, differences=0)

    def holds(self, parts: Sequence[Tensor]) -> bool:
        """Return whether every word is where `load` would put it."""
        num_outputs = sum(len(part) for part in parts)
        words = parts[0].shape[1] * parts[0].element_size() // WORD
        if (num_outputs, words) != (self.num_outputs, self.words):
            return False
        differences = np.zeros(1, dtype=np.int64)
        self._pack(parts, is_check=True, differences=differences.ctypes.data)
        return not differences[0]

    def contents(self) -> list[int]:
        """Return the `content` of each part, read back."""
        totals, calls, row = np.zeros(len(self.sizes), dtype=np.int64), [], 0
        for number, size in enumerate(self.sizes):
            calls.append(call := Call(content_kernel(EVEN), 8))
            first, end = row // OUTPUTS, -(-(row + size) // OUTPUTS)
            call[1], call[2], call[3] = first, end - first, self.words
            call[4], call[5], call[6] = self.panels.data_ptr(), row, size
            call[7] = totals[number:].ctypes.data
            row += size
        run_together(calls, torch.get_num_threads(), row * self.words // LANES * 2)
        return [int(total) for total in totals]

    def _pack(self, parts: Sequence[Tensor], *, is_check: bool, differences: int) -> None:
        if any(len(part) % OUTPUTS for part in parts[:-1]):
            parts = [side_by_side(parts)]  # else a part would end inside a panel
        target, calls = self.panels.data_ptr(), []
        matrices = [part.detach().contiguous() for part in parts]
        for part, matrix in zip(parts, matrices, strict=True):
            calls.append(call := Call(pack_kernel(is_check=is_check), 7))
            call[6] = differences
            call[1], call[2], call[3] = _padded_size(len(part)) // OUTPUTS, len(part), self.words
            call[4], call[5] = matrix.data_ptr(), target
            target += WORD * self.words * _padded_size(len(part))
        run_together(calls, torch.get_num_threads(), self.num_outputs * self.words // LANES * 4)


class _Bias:
    """A bias in fp32, which holds every number of the narrower types."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        """[padded outputs]"""

    @property
    def address(self) -> int:
        """0 without one."""
        return 0 if self._numbers is None else self._numbers.data_ptr()

    def load(self, biases: Sequence[Tensor]) -> None:
        self._numbers = _padded(side_by_side(biases).float()) if biases else None

    def holds(self, biases: Sequence[Tensor]) -> bool:
        if self._numbers is None or not biases:
            return self._numbers is None and not biases
        return same_bits(self._numbers, _padded(side_by_side(biases).float()))

    def contents(self, dtype: torch.dtype, sizes: Sequence[int]) -> list[int]:
        """Return the `content` of each part in ``dtype``, which is what it came in."""
        if self._numbers is None:
            return []
        numbers = self._numbers[: sum(sizes)]
        if dtype == torch.bfloat16:
            # Its bits are the upper half; rounding would make one NaN of all.
            numbers = (numbers.view(torch.int32) >> 16).short().view(dtype)
        return [content(part) for part in torch.split(numbers.to(dtype), list(sizes))]


def _rounded_matrix(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``weights`` [n, k] in steps, and the padded columns [n] that products need of them.

    The scale of each output, and what its sums begin with.
    """
    weight = side_by_side(weights).detach().contiguous()
    steps, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    kernel = quantize_kernel(storage=STORAGE[weight.dtype], is_unsigned=False)
    _round(Call(kernel, 6), weight, steps, scales)
    first = steps.sum(1, dtype=torch.int32) * -UNSIGNED
    return steps, _padded(scales), _padded(first)


def _round(call: Call, rows: Tensor, steps: Tensor, scales: Tensor) -> None:
    call[1], call[2] = rows.shape
    call[3], call[4], call[5] = rows.data_ptr(), steps.data_ptr(), scales.data_ptr()
    call.run(torch.get_num_threads(), rows.numel() // LANES * 8)


def _padded_size(num_outputs: int) -> int:
    return -(-num_outputs // OUTPUTS) * OUTPUTS


def _padded(column: Tensor) -> Tensor:
    """Return ``column`` [outputs] in memory of its own, with zeros up to whole panels."""
    return functional.pad(column.detach(), (0, _padded_size(len(column)) - len(column))).clone()
