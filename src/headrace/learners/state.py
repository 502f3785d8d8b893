"""What a learner needs to go on exactly where it was: weights, optimizer, counters.

The policy is a complete Hugging Face directory in fp32, so it is at once the checkpoint's master
weights and something transformers loads. The optimizer is safetensors: no pickle is ever loaded.
Durability and naming are the checkpoint store's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import CheckpointError, ModelError
from headrace.models.checkpoint import load_decoder, save_decoder
from headrace.models.decoder import Decoder

HF_DIRECTORY = "hf"
_OPTIMIZER = "optimizer.safetensors"
_COUNTERS = "learner.json"


@dataclass(slots=True)
class LearnerCounters:
    """Everything the learner counts; no clock and no random state, since there is none."""

    policy_version: int = 0
    """Optimizer updates made; also the position in the schedule."""
    num_nonfinite: int = 0
    """Steps in a row with a non-finite gradient."""
    num_no_signal: int = 0
    """Steps in a row without any group to learn from."""


def save_state(
    directory: Path,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    counters: LearnerCounters,
    *,
    hf_config: Mapping[str, Any],
    source_directory: Path,
) -> None:
    """Write everything into ``directory``, which exists and is empty. Raises CheckpointError."""
    save_decoder(decoder, directory / HF_DIRECTORY, hf_config, source_directory)
    try:
        save_file(dict(_optimizer_tensors(decoder, optimizer)), directory / _OPTIMIZER)
        (directory / _COUNTERS).write_text(json.dumps(asdict(counters)) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        msg = f"checkpoint {directory} could not be written: {error}"
        raise CheckpointError(msg) from error


def load_state(
    directory: Path, decoder: Decoder, optimizer: torch.optim.Optimizer
) -> LearnerCounters:
    """Restore what `save_state` wrote, in place. Raises CheckpointError if any part is missing."""
    try:
        saved = load_decoder(directory / HF_DIRECTORY)
        decoder.load_state_dict(saved.state_dict())
        tensors = load_file(directory / _OPTIMIZER)
        counters = LearnerCounters(**json.loads((directory / _COUNTERS).read_text("utf-8")))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError, ModelError) as error:
        msg = f"checkpoint {directory} cannot be resumed from: {error}"
        raise CheckpointError(msg) from error
    _restore_optimizer(directory, decoder, optimizer, tensors)
    return counters


def _optimizer_tensors(
    decoder: Decoder, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in decoder.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}:{key}", value.contiguous()


def _restore_optimizer(
    directory: Path,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
) -> None:
    """Put every moment back where it was. All parameters have a state, or none has (version 0)."""
    optimizer.state.clear()
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(":")
        found.setdefault(name, {})[part] = tensor
    parameters = dict(decoder.named_parameters())
    if found and set(found) != set(parameters):
        missing = sorted(set(parameters) ^ set(found))
        msg = (
            f"checkpoint {directory}: optimizer state does not fit the model: {missing[:5]}; "
            "resuming with a fresh optimizer would change the run, so it is refused"
        )
        raise CheckpointError(msg)
    for name, state in found.items():
        # Moments live where their parameter does; the step count stays where AdamW keeps it.
        optimizer.state[parameters[name]] = {
            key: value if key == "step" else value.to(parameters[name].device)
            for key, value in state.items()
        }
