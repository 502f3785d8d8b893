"""The decoder's weight matrices, in the form in which the generator multiplies by them.

Matrices that read the same input lie side by side, so that one product serves them all. On a
processor they are held in panels, for kernels of our own, or in eight bits. Everything else of the
decoder (embedding, norms) stays in its own modules. Owns the fact that a weight is held in one form
only, but for a tied embedding, which is read row by row as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.generators.torch_engine.cpu.panels import (
    Panels,
    QuantizedPanels,
    can_hold,
    can_hold_int8,
)
from headrace.generators.torch_engine.forms import (
    Form,
    Plain,
    Quantized,
    can_multiply_int8,
    takes_eight_bits,
)
from headrace.models.decoder import Decoder

NO_INT8 = (
    'generator.dtype = "int8": the products of eight bits that torch offers on this processor are '
    'not exact (it lacks VNNI instructions); use "bfloat16" or "float32"'
)


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """Matrices that read the same input."""

    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    sizes: list[int]
    """Output features of each."""
    form: Form
    """Of all of them side by side."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the matrices in ``tensors``."""
        self.form.load(*self._parts(tensors))

    def contents(self) -> Mapping[str, int] | None:
        """Return the `content` of each matrix and bias by name, see `Form`."""
        found = self.form.contents()
        return None if found is None else dict(zip(self.names, found, strict=True))

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the matrices are those of ``tensors``."""
        return self.form.holds(*self._parts(tensors))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its weights and biases."""
        return (*self.weight_names, *self.bias_names)

    def _parts(self, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        weights = [tensors[name] for name in self.weight_names]
        return weights, [tensors[name] for name in self.bias_names]


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
        config = decoder.config
        self._is_tied = config.tie_word_embeddings
        names = {module: name for name, module in decoder.named_modules()}

        def form(outputs: int, inputs: int, out_dtype: torch.dtype) -> Form:
            if is_quantized and takes_eight_bits(device, outputs, inputs):
                if can_hold_int8(dtype, device, inputs):
                    return QuantizedPanels(dtype, out_dtype)
                if not can_multiply_int8(device):
                    raise ConfigError(NO_INT8)
                return Quantized(device)
            if can_hold(dtype, device, inputs):
                return Panels(dtype, out_dtype)
            return Plain(device)

        self._units = {
            linears[0]: _unit(
                [(names[linear], linear) for linear in linears],
                form(sum(linear.out_features for linear in linears), linears[0].in_features, dtype),
            )
            for linears in decoder.linears()
        }
        self._head = Unit(
            weight_names=(decoder.output_name,),
            bias_names=(),
            sizes=[config.vocab_size],
            # Log-probs are taken of logits in fp32; they need not be rounded before.
            form=form(config.vocab_size, config.hidden_size, torch.float32),
        )

    @property
    def names(self) -> frozenset[str]:
        """Weights that are held here and not needed anywhere else."""
        units = [*self._units.values(), *([] if self._is_tied else [self._head])]
        return frozenset(name for unit in units for name in unit.names)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over every matrix in ``tensors``, which are copied."""
        for unit in self.units:
            unit.load(tensors)

    @property
    def units(self) -> Sequence[Unit]:
        """All of them, in the order in which they are loaded."""
        return (*self._units.values(), self._head)

    def __call__(self, hidden: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """See `Products`."""
        unit = self._units[linears[0]]
        product = unit.form.multiply(hidden.contiguous()).to(hidden.dtype)
        return torch.split(product, unit.sizes, dim=-1)

    def form(self, first: nn.Linear) -> Form:
        """Return what multiplies by the matrices that read the same input, ``first`` the first."""
        return self._units[first].form

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Return [N, vocab] for ``hidden`` [N, hidden], in ``out`` of that shape in fp32."""
        return self._head.form.multiply(hidden.contiguous(), out)


def _unit(linears: Sequence[tuple[str, nn.Linear]], form: Form) -> Unit:
    has_bias = linears[0][1].bias is not None
    return Unit(
        weight_names=tuple(f"{name}.weight" for name, _ in linears),
        bias_names=tuple(f"{name}.bias" for name, _ in linears) if has_bias else (),
        sizes=[linear.out_features for _, linear in linears],
        form=form,
    )
