"""The decoder's weight matrices, in the form in which the generator multiplies by them.

Matrices that read the same input lie side by side, so that one product serves them all. On a
processor they are packed once at each update, in the blocked layout of oneDNN, instead of inside
every product: at 1 to 64 rows that is 1.2 to 1.8 times as fast. Everything else of the decoder
(embedding, norms) stays in its own modules. Owns the fact that a weight is held in one form only,
but for a tied embedding, which is read row by row as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.models.decoder import Decoder

PACKED_ROWS = 64
"""Rows that the packed layout is chosen for; it serves other numbers about as well."""

FULL_ROWS = 16
"""Packed products of more rows are made of a multiple of this, of fewer of a power of two."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Unit:
    """Matrices that read the same input."""

    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    sizes: list[int]
    """Output features of each."""
    weight: Tensor | None = None
    """[sum of sizes, inputs], packed or plain."""
    bias: Tensor | None = None


class PackedProducts:
    """A `Products` over one decoder; holds nothing until the first `load`."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        self._packs = device.type == "cpu" and can_pack(dtype)
        self._device = device
        names = {module: name for name, module in decoder.named_modules()}
        self._units = {
            linears[0]: _unit([(names[linear], linear) for linear in linears])
            for linears in decoder.linears()
        }
        self._head = _Unit(
            weight_names=(decoder.output_name,), bias_names=(), sizes=[decoder.config.vocab_size]
        )

    @property
    def names(self) -> frozenset[str]:
        """Weights that are held here and not needed anywhere else."""
        units = self._units.values()
        return frozenset(n for unit in units for n in (*unit.weight_names, *unit.bias_names))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over every matrix in ``tensors``, which are copied."""
        for unit in (*self._units.values(), self._head):
            unit.weight = None  # before the new one is made: one matrix at a time is held twice
            unit.weight = self._form([tensors[name] for name in unit.weight_names])
            if unit.bias_names:
                unit.bias = torch.cat([tensors[name] for name in unit.bias_names]).to(self._device)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and plain content of every weight held here."""
        for unit in (*self._units.values(), self._head):
            assert unit.weight is not None, "read before the first load"
            plain = unit.weight.to_dense() if self._packs else unit.weight
            yield from zip(unit.weight_names, torch.split(plain, unit.sizes), strict=True)
            if unit.bias is not None:
                yield from zip(unit.bias_names, torch.split(unit.bias, unit.sizes), strict=True)

    def __call__(self, hidden: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """See `Products`."""
        unit = self._units[linears[0]]
        return torch.split(self._multiply(hidden, unit), unit.sizes, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [N, vocab] for ``hidden`` [N, hidden]."""
        return self._multiply(hidden, self._head)

    def _form(self, parts: Sequence[Tensor]) -> Tensor:
        weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return _pack(weight) if self._packs else weight.to(self._device, copy=True)

    def _multiply(self, hidden: Tensor, unit: _Unit) -> Tensor:
        assert unit.weight is not None, "used before the first load"
        if self._packs:
            return _packed_product(hidden, unit.weight, unit.bias)
        return functional.linear(hidden, unit.weight, unit.bias)


def _unit(linears: Sequence[tuple[str, nn.Linear]]) -> _Unit:
    has_bias = linears[0][1].bias is not None
    return _Unit(
        weight_names=tuple(f"{name}.weight" for name, _ in linears),
        bias_names=tuple(f"{name}.bias" for name, _ in linears) if has_bias else (),
        sizes=[linear.out_features for _, linear in linears],
    )


def _pack(weight: Tensor) -> Tensor:
    operators = torch.ops.mkldnn
    packed: Tensor = operators._reorder_linear_weight(weight, PACKED_ROWS)  # noqa: SLF001 - below
    return packed


def rounded_rows(num_rows: int) -> int:
    """Return a number of rows not below ``num_rows`` and above it by an eighth at most.

    Below `FULL_ROWS`, where time is that of reading the weights, the next power of two.
    """
    power = 1 << max(num_rows - 1, 0).bit_length()
    if num_rows <= FULL_ROWS:
        return power
    step = max(FULL_ROWS, power // 16)
    return -(-num_rows // step) * step


def _packed_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN compiles and keeps a kernel for every number of rows it meets; the running rollouts
    # become fewer one by one, which would make thousands of them.
    num_rows = len(hidden)
    hidden = functional.pad(hidden, (0, 0, 0, rounded_rows(num_rows) - num_rows))
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
