"""The decoder's weight matrices, in the form in which the generator multiplies by them.

Matrices that read the same input lie side by side, so that one product serves them all. On a
processor they are packed once at each update, in the blocked layout of oneDNN, instead of inside
every product: at 1 to 64 rows that is 1.2 to 1.8 times as fast. Or they are held in eight bits.
Everything else of the decoder (embedding, norms) stays in its own modules. Owns the fact that a
weight is held in one form only, but for a tied embedding, which is read row by row as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.errors import ConfigError
from headrace.models.decoder import Decoder
from headrace.models.weights import same_bits

PACKED_ROWS = 64
"""Rows that the packed layout is chosen for; it serves other numbers about as well."""

FULL_ROWS = 16
"""Packed products of more rows are made of a multiple of this, of fewer of a power of two."""

LARGEST_INT8 = 127
"""-128 is not used, so that a weight and its negative are rounded alike."""


class Form(Protocol):
    """One matrix [outputs, inputs], however it is held."""

    def load(self, weight: Tensor) -> None:
        """Take the content of ``weight``, which is copied."""
        ...

    def holds(self, weight: Tensor) -> bool:
        """Return whether this is ``weight``, read back from what products are made with."""
        ...

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return [N, outputs] for ``hidden`` [N, inputs], in its dtype or a wider one."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Unit:
    """Matrices that read the same input."""

    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    sizes: list[int]
    """Output features of each."""
    form: Form
    """Of all of them side by side."""
    bias: Tensor | None = None


class FusedProducts:
    """A `Products` over one decoder; holds nothing until the first `load`."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_quantized: bool = False,
    ) -> None:
        """``is_quantized``: hold matrices in eight bits, and everything else in ``dtype``.

        Raises ConfigError where this machine's products of eight bits are not exact.
        """
        if is_quantized and not can_multiply_int8(device):
            raise ConfigError(NO_INT8)
        self._device = device
        self._is_tied = decoder.config.tie_word_embeddings
        names = {module: name for name, module in decoder.named_modules()}

        def form(outputs: int, inputs: int) -> Form:
            if is_quantized and takes_eight_bits(device, outputs, inputs):
                return _Quantized(device)
            return _Packed() if device.type == "cpu" and can_pack(dtype) else _Plain(device)

        self._units = {
            linears[0]: _unit(
                [(names[linear], linear) for linear in linears],
                form(sum(linear.out_features for linear in linears), linears[0].in_features),
            )
            for linears in decoder.linears()
        }
        self._head = _Unit(
            weight_names=(decoder.output_name,),
            bias_names=(),
            sizes=[decoder.config.vocab_size],
            form=form(decoder.config.vocab_size, decoder.config.hidden_size),
        )

    @property
    def names(self) -> frozenset[str]:
        """Weights that are held here and not needed anywhere else."""
        units = [*self._units.values(), *([] if self._is_tied else [self._head])]
        return frozenset(n for unit in units for n in (*unit.weight_names, *unit.bias_names))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over every matrix in ``tensors``, which are copied."""
        for unit in (*self._units.values(), self._head):
            unit.form.load(_side_by_side(unit.weight_names, tensors))
            if unit.bias_names:
                held = torch.empty(0, device=self._device) if unit.bias is None else unit.bias
                unit.bias = _in_place(held, _side_by_side(unit.bias_names, tensors))

    def differing(self, tensors: Mapping[str, Tensor], *, turn: int, turns: int) -> Iterator[str]:
        """Yield names of matrices that are not held as ``tensors`` has them.

        Reading back costs more than loading, so one unit in ``turns`` is looked at, the next ones
        with the next ``turn``.
        """
        for number, unit in enumerate((*self._units.values(), self._head)):
            if number % turns != turn % turns:
                continue
            if not unit.form.holds(_side_by_side(unit.weight_names, tensors)):
                yield " or ".join(unit.weight_names)
            if unit.bias is not None:
                bias = _side_by_side(unit.bias_names, tensors)
                if not same_bits(unit.bias, bias):
                    yield " or ".join(unit.bias_names)

    def __call__(self, hidden: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """See `Products`."""
        unit = self._units[linears[0]]
        product = unit.form.multiply(hidden, unit.bias).to(hidden.dtype)
        return torch.split(product, unit.sizes, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [N, vocab] for ``hidden`` [N, hidden], in its dtype or a wider one."""
        return self._head.form.multiply(hidden, None)


def _unit(linears: Sequence[tuple[str, nn.Linear]], form: Form) -> _Unit:
    has_bias = linears[0][1].bias is not None
    return _Unit(
        weight_names=tuple(f"{name}.weight" for name, _ in linears),
        bias_names=tuple(f"{name}.bias" for name, _ in linears) if has_bias else (),
        sizes=[linear.out_features for _, linear in linears],
        form=form,
    )


def _side_by_side(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensors of ``names`` as one; a single one as it is."""
    return tensors[names[0]] if len(names) == 1 else torch.cat([tensors[name] for name in names])


def _in_place(held: Tensor, new: Tensor) -> Tensor:
    """Return the content of ``new`` where ``held`` lies, or on its device if it does not fit there.

    What a graph has recorded the address of stays where it is.
    """
    if held.shape == new.shape and held.dtype == new.dtype:
        return held.copy_(new)
    return new.to(held.device, copy=True)


class _Plain:
    """The matrix as it is published."""

    def __init__(self, device: torch.device) -> None:
        self._weight = torch.empty(0, device=device)

    def load(self, weight: Tensor) -> None:
        """See `Form`."""
        self._weight = _in_place(self._weight, weight)

    def holds(self, weight: Tensor) -> bool:
        """See `Form`."""
        return same_bits(self._weight, weight)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """See `Form`."""
        return functional.linear(hidden, self._weight, bias)


class _Packed:
    """The matrix in oneDNN's blocked layout."""

    def __init__(self) -> None:
        self._weight: Tensor | None = None

    def load(self, weight: Tensor) -> None:
        """See `Form`."""
        self._weight = None  # before the new one is made: one matrix at a time is held twice
        self._weight = _pack(weight)

    def holds(self, weight: Tensor) -> bool:
        """See `Form`."""
        return self._weight is not None and same_bits(self._weight.to_dense(), weight)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """See `Form`."""
        assert self._weight is not None, "used before the first load"
        return _packed_product(hidden, self._weight, bias)


class _Quantized:
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

    def load(self, weight: Tensor) -> None:
        """See `Form`."""
        steps, scale = _in_steps(weight.to(self._scale.device))
        if self._weight.shape != weight.t().shape:
            self._weight = torch.empty_like(steps, dtype=torch.int8).t()
        self._weight.t().copy_(steps)
        self._scale = _in_place(self._scale, scale.squeeze(1))

    def holds(self, weight: Tensor) -> bool:
        """See `Form`: it is what ``weight`` is rounded to."""
        if self._weight.shape != weight.t().shape:
            return False
        quantized, scale = _quantized(weight.to(self._scale.device))
        return same_bits(self._weight.t(), quantized) and same_bits(self._scale, scale.squeeze(1))

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """See `Form`."""
        num_rows = len(hidden)
        rounded = max(rounded_rows(num_rows), LEAST_INT8_ROWS if hidden.is_cuda else 1)
        quantized, scale = _quantized(_filled_up(hidden, rounded))
        # torch's one public way to an int8 product is still spelled with an underscore.
        sums = torch._int_mm(quantized, self._weight)[:num_rows]  # noqa: SLF001
        product = torch.mul(sums, self._scale).mul_(scale[:num_rows])
        return product if bias is None else product.add_(bias)


NO_INT8 = (
    'generator.dtype = "int8": the products of eight bits that torch offers on this processor are '
    'not exact (it lacks VNNI instructions); use "bfloat16" or "float32"'
)


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


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
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


def _pack(weight: Tensor) -> Tensor:
    operators = torch.ops.mkldnn
    packed: Tensor = operators._reorder_linear_weight(weight, PACKED_ROWS)  # noqa: SLF001 - below
    return packed


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


def _packed_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN compiles and keeps a kernel for every number of rows it meets; the running rollouts
    # become fewer one by one, which would make thousands of them.
    num_rows = len(hidden)
    hidden = _filled_up(hidden, rounded_rows(num_rows))
    # torch names the operators of its compiled models with an underscore; `can_pack` asks for them.
    operators = torch.ops.mkldnn
    product: Tensor = operators._linear_pointwise(hidden, weight, bias, "none", [], "")  # noqa: SLF001
    return product[:num_rows]


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this machine's oneDNN multiplies by packed matrices of ``dtype``.

    Asked by doing it: the operators are torch's own for compiled models, and which types they take
    depends on the processor.
    """
    identity, rows = torch.eye(16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    try:
        return torch.equal(_packed_product(rows, _pack(identity), None), rows)
    except (AttributeError, RuntimeError):
        return False
