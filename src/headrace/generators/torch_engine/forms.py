"""In what forms a weight matrix is held by the torch operators that multiply by it.

On a processor `Panels` and `QuantizedPanels` take their place wherever their kernels can.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headrace.models.weights import content, same_bits

FULL_ROWS = 16
"""Products of more rows are made of a multiple of this, of fewer of a power of two."""

LARGEST_INT8 = 127
"""-128 is not used, so that a weight and its negative are rounded alike."""


class Form(Protocol):
    """A matrix [outputs, inputs] and its bias, however they are held.

    They come in parts, whose outputs follow one another: ``weights`` [some outputs, inputs] and
    ``biases`` [some outputs], of which there are as many or none.
    """

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """Take their content, which is copied."""
        ...

    def contents(self) -> Sequence[int] | None:
        """Return the `content` of each weight, then of each bias, as `load` was given them.

        Read back from what products are made with; None where that says too little of them.
        """
        ...

    def holds(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
        """Return whether this is what is held, read back from what products are made with."""
        ...

    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [N, outputs] for ``hidden`` [N, inputs]: in ``out``, which is given where it fits.

        In the dtype of ``hidden`` or a wider one; ``hidden`` and ``out`` are contiguous.
        """
        ...


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return ``parts`` as one tensor; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def in_place(held: Tensor, new: Tensor) -> Tensor:
    """Return the content of ``new`` where ``held`` lies, or on its device if it does not fit there.

    What a graph has recorded the address of stays where it is.
    """
    if held.shape == new.shape and held.dtype == new.dtype:
        return held.copy_(new)
    return new.to(held.device, copy=True)


class Plain:
    """The matrix as it is published."""

    def __init__(self, device: torch.device) -> None:
        self._weight = torch.empty(0, device=device)
        self._bias: Tensor | None = None
        self._sizes: list[int] = []
        """Outputs of each part."""

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """See `Form`."""
        self._sizes = [len(weight) for weight in weights]
        self._weight = in_place(self._weight, side_by_side(weights))
        self._bias = _loaded_bias(self._bias, self._weight.device, biases)

    def contents(self) -> Sequence[int] | None:
        """See `Form`."""
        held = [self._weight, *([] if self._bias is None else [self._bias])]
        return [content(part) for whole in held for part in torch.split(whole, self._sizes)]

    def holds(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
        """See `Form`."""
        same = same_bits(self._weight, side_by_side(weights))
        return same and _holds_bias(self._bias, biases)

    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Form`."""
        if out is not None and self._bias is None and out.dtype == hidden.dtype:
            return torch.mm(hidden, self._weight.t(), out=out)
        product = functional.linear(hidden, self._weight, self._bias)
        return product if out is None else out.copy_(product)


def _loaded_bias(
    held: Tensor | None, device: torch.device, biases: Sequence[Tensor]
) -> Tensor | None:
    if not biases:
        return None
    return in_place(torch.empty(0, device=device) if held is None else held, side_by_side(biases))


def _holds_bias(held: Tensor | None, biases: Sequence[Tensor]) -> bool:
    return not biases if held is None else same_bits(held, side_by_side(biases))


class Quantized:
    """The matrix in eight bits, one scale for each output; inputs get one for each row.

    W8A8 as in Dettmers et al. 2022 (arXiv 2208.07339), section 2.1, without its outliers: symmetric
    absolute-maximum scales, products summed exactly in 32 bits. What rounding changes is not made
    up for here: log-probs are recorded of the distribution really sampled from, and the learner's
    importance correction weighs them.
    """

    def __init__(self, device: torch.device) -> None:
        self._weight = torch.empty(0, dtype=torch.int8, device=device)
        """[inputs, outputs], of which the transpose is contiguous."""
        self._scale = torch.empty(0, device=device)
        """[outputs] in fp32: the weight that a step of 1 stands for."""
        self._bias: Tensor | None = None

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """See `Form`."""
        weight = side_by_side(weights)
        steps, scale = _in_steps(weight.to(self._scale.device))
        if self._weight.shape != weight.t().shape:
            self._weight = torch.empty_like(steps, dtype=torch.int8).t()
        self._weight.t().copy_(steps)
        self._scale = in_place(self._scale, scale.squeeze(1))
        self._bias = _loaded_bias(self._bias, self._scale.device, biases)

    def contents(self) -> Sequence[int] | None:
        """See `Form`: they are not held as they came."""
        return None

    def holds(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
        """See `Form`: it is what ``weights`` are rounded to."""
        weight = side_by_side(weights)
        if self._weight.shape != weight.t().shape:
            return False
        quantized, scale = quantized_rows(weight.to(self._scale.device))
        same = same_bits(self._weight.t(), quantized) and same_bits(self._scale, scale.squeeze(1))
        return same and _holds_bias(self._bias, biases)

    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Form`."""
        num_rows = len(hidden)
        rounded = max(rounded_rows(num_rows), LEAST_INT8_ROWS if hidden.is_cuda else 1)
        quantized, scale = quantized_rows(_filled_up(hidden, rounded))
        # torch's one public way to an int8 product is still spelled with an underscore.
        sums = torch._int_mm(quantized, self._weight)[:num_rows]  # noqa: SLF001
        product = torch.mul(sums, self._scale).mul_(scale[:num_rows])
        if self._bias is not None:
            product.add_(self._bias)
        return product if out is None else out.copy_(product)


@cache
def can_multiply_int8(device: torch.device) -> bool:
    """Return whether `torch._int_mm` sums exactly on ``device``.

    Without VNNI instructions, oneDNN adds pairs of products in 16 bits, which saturate.
    """
    rows = torch.full((LEAST_INT8_ROWS, 64), LARGEST_INT8, dtype=torch.int8)
    columns = torch.full((64, 16), LARGEST_INT8, dtype=torch.int8)
    columns[:, ::2] *= -1
    expected = rows.int() @ columns.int()
    try:
        found = torch._int_mm(rows.to(device), columns.t().contiguous().t().to(device))  # noqa: SLF001
    except RuntimeError:
        return False
    return torch.equal(found.cpu(), expected)


LEAST_INT8_ROWS = 32
"""cuBLAS refuses int8 products of 16 rows or fewer."""

INT8_STEP = 8
"""cuBLAS refuses int8 matrices with a side that is no multiple of this."""


def takes_eight_bits(device: torch.device, outputs: int, inputs: int) -> bool:
    """Return whether ``device`` multiplies by a matrix [outputs, inputs] in eight bits."""
    return device.type != "cuda" or (outputs % INT8_STEP == 0 and inputs % INT8_STEP == 0)


def quantized_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rows`` [n, k] in int8, and the fp32 scale [n, 1] that multiplies each row back."""
    steps, scale = _in_steps(rows)
    return steps.to(torch.int8), scale


def _in_steps(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rows`` [n, k] as whole numbers of at most `LARGEST_INT8`, and the scale of each.

    The scale [n, 1] is in fp32. A row of zeros stays one.
    """
    scale = rows.abs().amax(1, keepdim=True).float().mul_(1.0 / LARGEST_INT8)
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.mul(rows, scale.reciprocal()).round_(), scale


def rounded_rows(num_rows: int) -> int:
    """Return a number of rows not below ``num_rows``, and above it by 15 or an eighth at most.

    Below `FULL_ROWS`, where time is that of reading the weights, the next power of two.
    """
    power = 1 << max(num_rows - 1, 0).bit_length()
    if num_rows <= FULL_ROWS:
        return power
    step = max(FULL_ROWS, power // 16)
    return -(-num_rows // step) * step


def _filled_up(rows: Tensor, num_rows: int) -> Tensor:
    """Return ``rows`` with rows of zeros after them, ``num_rows`` in all; no copy without need."""
    missing = num_rows - len(rows)
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
