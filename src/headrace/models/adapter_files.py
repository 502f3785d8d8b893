"""An adapter's directory in the format that PEFT publishes, without torch.

``adapter_config.json`` says what kind of adapter it is and ``adapter_model.safetensors`` holds two
factors for every matrix, under names of PEFT's. What this package does not compute (DoRA, ranks
that differ between matrices, trained biases) is refused and never left out silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.hf_files import read_object, stored_shapes

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""PEFT wraps the model twice and names parameters by the way to them."""

_MAX_NAMED = 3
"""Tensors that one message lists."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "alora_invocation_tokens": (None, []),
    "alpha_pattern": (None, {}),
    "arrow_config": (None,),
    "bias": (None, "none"),
    "exclude_modules": (None, [], ""),
    "fan_in_fan_out": (None, False),
    # Others begin by changing the frozen weights, which the adapter's files do not hold.
    "init_lora_weights": (None, True, False, "gaussian"),
    "layer_replication": (None, []),
    "layers_pattern": (None, [], ""),
    "layers_to_transform": (None, []),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "monteclora_config": (None,),
    "rank_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_rslora": (None, False),
    "velora_config": (None,),
}
"""Option of PEFT's that changes what an adapter computes -> values that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """What the mathematics of an adapter depends on beside its factors."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of matrices within a layer."""

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank

    def is_target(self, module: str) -> bool:
        """Whether the matrix of the module of that full name gets an adapter."""
        return module.rpartition(".")[2] in self.targets

    def factor_shapes(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return PEFT's name -> shape of every factor, for a model of these ``weights``."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in weights.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and self.is_target(module):
                outputs, inputs = shape
                shapes[peft_name(module, "A")] = (self.rank, inputs)
                shapes[peft_name(module, "B")] = (outputs, self.rank)
        return shapes


def peft_name(module: str, factor: str) -> str:
    """Return PEFT's name of factor ``A`` or ``B`` of a module."""
    return f"{_PREFIX}{module}.lora_{factor}.weight"


def write_adapter_config(directory: Path, shape: AdapterShape, base: str) -> None:
    """Write ``adapter_config.json``; ``base`` is where the model is that the adapter is for."""
    content = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(shape.alpha) if shape.alpha.is_integer() else shape.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": shape.rank,
        "target_modules": sorted(shape.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    text = json.dumps(content, indent=2) + "\n"
    (directory / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def read_adapter_shape(directory: Path) -> AdapterShape:
    """Return what ``adapter_config.json`` says.

    Raises ModelError if it is absent or damaged, or of an adapter that is not computed here.
    """
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        msg = f"{directory} has no {ADAPTER_CONFIG}, so it is no directory of an adapter of PEFT's"
        raise ModelError(msg)
    content = read_object(path)
    if refused := list(_refusals(content)):
        msg = f"{path}: {'; '.join(refused)}"
        raise ModelError(msg)
    return AdapterShape(
        rank=content["r"],
        alpha=float(content["lora_alpha"]),
        targets=tuple(sorted(content["target_modules"])),
    )


def base_model(directory: Path) -> str:
    """Return where the model is that the adapter in ``directory`` is for.

    Raises ModelError if the adapter does not say.
    """
    named = read_object(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        msg = f"{directory / ADAPTER_CONFIG} does not name the model that it is for; give --base"
        raise ModelError(msg)
    return named


def check_adapter(
    directory: Path, shape: AdapterShape, weights: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that ``directory`` holds an adapter of ``shape`` for a model of these ``weights``.

    ``weights``: name -> shape. Reads headers only. Raises ModelError saying what differs.
    """
    found = read_adapter_shape(directory)
    if found.rank != shape.rank or found.alpha != shape.alpha:
        msg = (
            f"{directory} has rank {found.rank} and alpha {found.alpha:g}, not rank {shape.rank} "
            f"and alpha {shape.alpha:g}; set them as the adapter has them"
        )
        raise ModelError(msg)
    expected = shape.factor_shapes(weights)
    stored = _stored_shapes(directory / ADAPTER_WEIGHTS)
    misfits = [f"{name} is missing" for name in expected if name not in stored]
    misfits += [f"{name} is unexpected" for name in stored if name not in expected]
    misfits += [
        f"{name} is {stored[name]}, not {size}"
        for name, size in expected.items()
        if stored.get(name, size) != size
    ]
    if misfits:
        more = len(misfits) - _MAX_NAMED
        shown = "; ".join(misfits[:_MAX_NAMED]) + f"; and {more} more" * (more > 0)
        msg = (
            f"{directory}: the adapter does not fit model and targets "
            f"{', '.join(sorted(shape.targets))}: {shown}"
        )
        raise ModelError(msg)


def _refusals(content: Mapping[str, Any]) -> Iterator[str]:
    if content.get("peft_type") != "LORA":
        yield f'peft_type = {content.get("peft_type")!r}; only "LORA" is computed'
    for name, neutral in _NEUTRAL.items():
        if content.get(name) not in neutral:
            yield f"{name} = {content[name]!r} is not computed"
    rank, alpha, targets = (content.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        yield f"r = {rank!r} must be a positive whole number"
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0:
        yield f"lora_alpha = {alpha!r} must be a number above 0"
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        yield f"target_modules = {targets!r} must be a list of names"


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.is_file():
        msg = f"{path.parent} has no {path.name}; other formats of adapters are not read"
        raise ModelError(msg)
    return stored_shapes(path)
