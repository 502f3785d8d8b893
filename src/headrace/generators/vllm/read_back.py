"""What a vLLM model holds, compared with what was published.

Three kinds of parameters: those held as published (norms, embeddings, everything on a GPU) are
compared whole, fused ones with their parts in a row. Matrices that vLLM has packed for a processor
have no readable form; one-hot rows sent through their own product return columns of the matrix
exactly, and some of these are compared. Where there is both, the two must agree. Split over
devices, a worker holds parts only, and nothing is compared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NUM_PROBES = 8
"""Columns of each packed matrix that are compared."""


def read_back(
    model: nn.Module, published: Mapping[str, Tensor], *, tensor_parallel: bool
) -> dict[str, int]:
    """Return how many published tensors were compared whole, by columns, and not at all.

    Raises ValueError naming the first that the model holds differently.
    """
    counts = {"num_compared": 0, "num_probed": 0, "num_unread": 0}
    seen: set[str] = set()
    for name, module, leaf, parts in [] if tensor_parallel else _held(model, published):
        expected = torch.cat([published[part] for part in parts])
        weight = getattr(module, leaf)
        if weight.numel() >= expected.numel():
            # An embedding may have padding rows below those of the vocabulary.
            same = torch.equal(weight[: len(expected)].cpu(), expected)
            kind = "num_compared"
        else:
            same, kind = _columns_agree(module, expected), "num_probed"
        if not same:
            msg = f"{name} as the engine holds it is not what was published"
            raise ValueError(msg)
        counts[kind] += len(parts)
        seen.update(parts)
    for module in packed_and_readable(model):
        if not _columns_agree(module, module.get_parameter("weight")):
            msg = f"the product of a {type(module).__name__} is not that of the weight it holds"
            raise ValueError(msg)
    counts["num_unread"] = len(published.keys() - seen)
    return counts


def packed_and_readable(model: nn.Module) -> list[nn.Module]:
    """Return the layers that hold a weight as it is and packed for a processor as well."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear") and module.get_parameter("weight").numel() > 0
    ]


def _held(
    model: nn.Module, published: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, str, list[str]]]:
    """Yield name, module, attribute and published parts of every parameter that has any."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        above, _, last = owner.rpartition(".")
        parts = [f"{above}.{part}.{leaf}" for part in fused.get(last, ())]
        if name in published:
            parts = [name]
        if parts and all(part in published for part in parts):
            yield name, model.get_submodule(owner), leaf, parts


def _columns_agree(module: nn.Module, expected: Tensor) -> bool:
    """Send one-hot rows through the layer's product: [n, in] -> n columns of [out, in]."""
    width = expected.shape[1]
    columns = torch.linspace(0, width - 1, min(NUM_PROBES, width)).long()
    rows = torch.zeros(len(columns), width, dtype=expected.dtype)
    rows[torch.arange(len(columns)), columns] = 1.0
    layer: Any = module
    product = layer.quant_method.apply(layer, rows, None)
    return torch.equal(product, expected.T[columns])
