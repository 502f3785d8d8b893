"""What is known, without its weights, of a model that transformers computes, not the decoder.

Kept apart from the model itself: `headrace check` needs this much, and every part of the generator
that counts tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from headrace.errors import ModelError
from headrace.models.decoder_config import DecoderConfig, Family
from headrace.models.hf_files import stored_shapes, weight_files

UNBOUNDED_POSITIONS = 1 << 31
"""Of a model that names no limit, such as one without position embeddings."""


class PolicyLimits(Protocol):
    """What a prompt and its completion must fit."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of prompt and completion together, at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    """A `PolicyLimits` of a model directory that transformers' AutoModelForCausalLM reads."""

    directory: Path
    family: str
    """``model_type`` of config.json."""
    vocab_size: int
    max_positions: int
    num_parameters: int

    @classmethod
    def read(cls, directory: Path) -> ForeignConfig:
        """Read config and headers of the weights. Raises ModelError naming what is wrong."""
        text = hf_config_of(directory).get_text_config()
        shapes = [
            shape for path in weight_files(directory) for shape in stored_shapes(path).values()
        ]
        positions = getattr(text, "max_position_embeddings", None)
        return cls(
            directory=directory,
            family=text.model_type,
            vocab_size=text.vocab_size,
            max_positions=positions if isinstance(positions, int) else UNBOUNDED_POSITIONS,
            num_parameters=sum(map(math.prod, shapes)),
        )


def is_foreign(hf_config: Mapping[str, Any]) -> bool:
    """Whether ``hf_config`` is of a family that the decoder does not compute, whichever that is."""
    return hf_config.get("model_type") not in get_args(Family)


def read_policy_config(
    directory: Path, hf_config: Mapping[str, Any]
) -> DecoderConfig | ForeignConfig:
    """Return the config of the model in ``directory``, by who computes it. Raises ModelError."""
    if is_foreign(hf_config):
        return ForeignConfig.read(directory)
    return DecoderConfig.from_hf(hf_config, origin=f"{directory}/config.json")


def hf_config_of(directory: Path) -> Any:  # noqa: ANN401 - transformers has no types
    """Return transformers' config object of a causal language model. Raises ModelError.

    Code that comes with a model is never run.
    """
    # Imported here: it takes seconds, which a model of the decoder's need not wait for.
    from transformers import AutoConfig  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    supported = ", ".join(get_args(Family))
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).splitlines()[0]
        msg = (
            f"{directory}/config.json: neither one of the families headrace computes ({supported}) "
            f"nor one that transformers knows: {first}"
        )
        raise ModelError(msg) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        msg = (
            f"{directory}/config.json: model_type {config.model_type!r} is not one of the families "
            f"headrace computes ({supported}), and no causal language model to transformers"
        )
        raise ModelError(msg)
    if getattr(config, "quantization_config", None):
        msg = f"{directory}: quantized weights cannot be trained; use the unquantized checkpoint"
        raise ModelError(msg)
    return config
