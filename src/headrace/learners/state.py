"""What a learner needs to go on exactly where it was: weights, optimizer, counters.

The policy is a complete Hugging Face directory in fp32, so it is at once the checkpoint's master
weights and something transformers loads; where only an adapter is trained, it is the adapter's
directory in PEFT's format, since nothing else has changed. The optimizer is safetensors: no pickle
is ever loaded.
Durability and naming are the checkpoint store's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from headrace.errors import CheckpointError, ModelError
from headrace.learners.value_head import ValueHead, named_parameters, read_head, save_head
from headrace.models.checkpoint import load_decoder, save_decoder
from headrace.models.foreign import ForeignDecoder, Policy, load_foreign, save_foreign
from headrace.models.lora import adapter_of, read_adapter, save_adapter, set_adapter
from headrace.models.weights import misfits

HF_DIRECTORY = "hf"
ADAPTER_DIRECTORY = "adapter"
SHARDED_DIRECTORY = "sharded"
"""Of a learner of several ranks; read by any learner."""
_OPTIMIZER = "optimizer.safetensors"
COUNTERS_FILE = "learner.json"
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


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
    decoder: Policy,
    optimizer: torch.optim.Optimizer,
    counters: LearnerCounters,
    *,
    hf_config: Mapping[str, Any],
    source_directory: Path,
    head: ValueHead | None = None,
) -> None:
    """Write everything into ``directory``, which exists and is empty. Raises CheckpointError."""
    try:
        if isinstance(decoder, ForeignDecoder):
            save_foreign(decoder, directory / HF_DIRECTORY, source_directory)
        elif adapter_of(decoder) is None:
            save_decoder(decoder, directory / HF_DIRECTORY, hf_config, source_directory)
        else:
            save_adapter(decoder, directory / ADAPTER_DIRECTORY, source_directory)
        save_file(
            dict(_optimizer_tensors(_trained(decoder, head), optimizer)), directory / _OPTIMIZER
        )
        if head is not None:
            save_head(directory, head)
        (directory / COUNTERS_FILE).write_text(
            json.dumps(asdict(counters)) + "\n", encoding="utf-8"
        )
    except (OSError, SafetensorError) as error:
        msg = f"checkpoint {directory} could not be written: {error}"
        raise CheckpointError(msg) from error


def load_state(
    directory: Path,
    decoder: Policy,
    optimizer: torch.optim.Optimizer,
    head: ValueHead | None = None,
) -> LearnerCounters:
    """Restore what `save_state` wrote, in place.

    Raises CheckpointError if any part is missing or does not fit; nothing is replaced then.
    """
    try:
        replace = _read_policy(directory, decoder)
        tensors = load_file(directory / _OPTIMIZER)
        counters = LearnerCounters(**json.loads((directory / COUNTERS_FILE).read_text("utf-8")))
        moments = _moments(_trained(decoder, head), tensors)
        saved_head = None if head is None else read_head(directory, head)
        # Everything is read and fits before anything is replaced; this is the last check.
        replace()
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError, ModelError) as error:
        msg = f"checkpoint {directory} cannot be resumed from: {error}"
        raise CheckpointError(msg) from error
    if head is not None and saved_head is not None:
        head.load_state_dict(saved_head)
    optimizer.state.clear()
    optimizer.state.update(moments)
    return counters


def _read_policy(directory: Path, decoder: Policy) -> Callable[[], object]:
    """Return what replaces the weights by those that were saved, which fit. Raises ModelError."""
    if isinstance(decoder, ForeignDecoder):
        foreign = load_foreign(directory / HF_DIRECTORY).state_dict()
        if wrong := misfits(decoder.state_dict(), foreign):
            raise ModelError(wrong)
        return lambda: decoder.load_state_dict(foreign)
    if adapter_of(decoder) is None:
        saved = load_decoder(directory / HF_DIRECTORY).state_dict()
        return lambda: decoder.load_state_dict(saved)
    factors = read_adapter(decoder, directory / ADAPTER_DIRECTORY)
    return lambda: set_adapter(decoder, factors)


def _trained(decoder: Policy, head: ValueHead | None) -> dict[str, Parameter]:
    """Return everything that is trained, by name."""
    own = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    return own | named_parameters(head)


def _optimizer_tensors(
    parameters: Mapping[str, Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            yield f"{name}:{key}", value.contiguous()


def _moments(
    parameters: Mapping[str, Parameter], tensors: Mapping[str, Tensor]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return AdamW's state by parameter, on its device.

    Raises ValueError unless every trained parameter has all of its state: resuming with a fresh
    optimizer would change the run.
    """
    names = [f"{name}:{key}" for name in parameters for key in ADAMW_STATE]
    if unfit := sorted(set(tensors) ^ set(names)):
        msg = f"{_OPTIMIZER} does not fit the model, among others {unfit[0]}"
        raise ValueError(msg)
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(":")
        parameter = parameters[name]
        if part != "step" and tensor.shape != parameter.shape:
            msg = f"{_OPTIMIZER}: {key} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            raise ValueError(msg)
        # A copy, or the moments would be a mapping of the file they came from. The step count
        # too goes where its parameter is: the fused update wants it there.
        moments.setdefault(parameter, {})[part] = tensor.to(parameter.device, copy=True)
    return moments
