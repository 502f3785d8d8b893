"""Low-rank adapters on the decoder's matrices, and the weights that come of merging them.

Hu et al. 2021, arXiv:2106.09685, section 4.1: W x + (alpha / r) B A x, where W is frozen and B
starts at 0. Owns: with an adapter nothing else of a decoder takes a gradient, and merged weights
are made one at a time, whenever one is asked for, so that there is never a second model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from headrace.models.adapter_files import (
    ADAPTER_WEIGHTS,
    AdapterShape,
    check_adapter,
    peft_name,
    write_adapter_config,
)
from headrace.models.decoder import Decoder
from headrace.types import derive_seed


class LoraLinear(nn.Linear):
    """A frozen matrix [outputs, inputs] and the two factors that are trained beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        """Take over weight and bias of ``base`` as they are. Factors are 0 until they are set."""
        nn.Module.__init__(self)  # nn.Linear's own would allocate a second matrix
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(base.weight.new_zeros(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self.alpha, self.scale = alpha, alpha / rank

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [N, outputs] for ``hidden`` [N, inputs]; the merged matrix never exists."""
        base = functional.linear(hidden, self.weight, self.bias)
        inner = functional.linear(hidden, self.lora_a)
        return torch.addmm(base, inner, self.lora_b.t(), alpha=self.scale)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the matrix [outputs, inputs] that computes the same, in the masters' dtype."""
        return torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.scale)


def add_adapter(decoder: Decoder, shape: AdapterShape, *, seed: int) -> None:
    """Freeze ``decoder`` and give every target of ``shape`` an adapter that changes nothing yet.

    A is drawn as PEFT draws it (uniform, within 1 / sqrt(inputs)), each from its place in the seed
    tree and on the processor, so that it is the same on every device. B is 0.
    """
    decoder.requires_grad_(requires_grad=False)
    for name, linear in list(decoder.named_modules()):
        if isinstance(linear, nn.Linear) and shape.is_target(name):
            parent, _, leaf = name.rpartition(".")
            adapted = LoraLinear(linear, shape.rank, shape.alpha)
            generator = torch.Generator().manual_seed(derive_seed(seed, "learner", "lora", name))
            drawn = torch.rand(adapted.lora_a.shape, generator=generator) * 2.0 - 1.0
            adapted.lora_a.data.copy_(drawn / math.sqrt(linear.in_features))
            setattr(decoder.get_submodule(parent), leaf, adapted)


def adapted_linears(decoder: Decoder) -> Iterator[tuple[str, LoraLinear]]:
    """Yield every matrix with an adapter, and the name of its module."""
    for name, module in decoder.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def adapter_of(decoder: Decoder) -> AdapterShape | None:
    """Return what the decoder's adapter is; None where it has none."""
    adapted = list(adapted_linears(decoder))
    if not adapted:
        return None
    _, linear = adapted[0]
    return AdapterShape(
        rank=len(linear.lora_a),
        alpha=linear.alpha,
        targets=tuple(sorted({name.rpartition(".")[2] for name, _ in adapted})),
    )


def save_adapter(decoder: Decoder, directory: Path, base: Path) -> None:
    """Write the adapter as PEFT does, in the masters' dtype; ``directory`` is made if absent.

    ``base`` is where the frozen weights are found. Raises OSError or SafetensorError.
    """
    shape = adapter_of(decoder)
    assert shape is not None, "there is an adapter to save"
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: factor.detach().contiguous() for name, factor in _factors(decoder)}
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_adapter_config(directory, shape, str(base))


def read_adapter(decoder: Decoder, directory: Path) -> dict[str, Tensor]:
    """Return the factors in ``directory`` by PEFT's names, in their stored dtype.

    Raises ModelError unless they are those of an adapter like the one that ``decoder`` has.
    """
    shape = adapter_of(decoder)
    assert shape is not None, "there is an adapter to read"
    check_adapter(directory, shape, decoder.config.tensor_shapes())
    with safe_open(directory / ADAPTER_WEIGHTS, framework="pt") as file:
        return {name: file.get_tensor(name) for name, _ in _factors(decoder)}


@torch.no_grad()
def set_adapter(decoder: Decoder, factors: Mapping[str, Tensor]) -> None:
    """Replace the adapter by what `read_adapter` returned."""
    for name, factor in _factors(decoder):
        factor.copy_(factors[name])


class MergedWeights(Mapping[str, Tensor]):
    """A decoder's weights by Hugging Face name, adapters merged, in one dtype.

    Each is made when it is asked for, and again when it is asked for again. Valid until an adapter
    changes.
    """

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        compute: Callable[[Callable[[], Tensor]], Tensor] = lambda merge: merge(),
    ) -> None:
        """``compute`` does the merging, wherever a weight is asked for.

        Readers in several threads need it: with another number of cores the bits may differ.
        """
        self._dtype = dtype
        self._compute = compute
        self._adapted = {f"{name}.weight": linear for name, linear in adapted_linears(decoder)}
        self._plain = {
            name: parameter
            for name, parameter in decoder.named_parameters()
            if not name.endswith((".lora_a", ".lora_b"))
        }

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight; one without an adapter, and in ``dtype`` already, by reference."""
        linear = self._adapted.get(name)
        whole = self._plain[name].detach() if linear is None else self._compute(linear.merged)
        return whole.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


def _factors(decoder: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
    for name, linear in adapted_linears(decoder):
        yield peft_name(name, "A"), linear.lora_a
        yield peft_name(name, "B"), linear.lora_b
