"""From a run's checkpoint to a Hugging Face model directory, an adapter merged into its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from headrace.errors import ModelError
from headrace.learners import CheckpointStore
from headrace.learners.state import ADAPTER_DIRECTORY, HF_DIRECTORY, SHARDED_DIRECTORY
from headrace.models.adapter_files import ADAPTER_CONFIG, base_model, read_adapter_shape
from headrace.models.catalogue import resolve_model
from headrace.models.checkpoint import load_decoder, refuse_weights, save_tensors
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign import load_foreign, save_foreign
from headrace.models.foreign_config import is_foreign
from headrace.models.hf_files import read_hf_config
from headrace.models.lora import MergedWeights, add_adapter, read_adapter, set_adapter
from headrace.runtime.run_files import CHECKPOINT_DIRECTORY

if TYPE_CHECKING:
    from headrace.learners.parallel.stored import StoredParts


def export_model(source: Path, output: Path, dtype: torch.dtype, base: str | None = None) -> Path:
    """Write the model of ``source`` into ``output`` and return the directory it was made from.

    ``source`` is a run, of which the last checkpoint is taken, a checkpoint, or an adapter's
    directory in PEFT's format. ``base`` is the model that an adapter is for, None for the one that
    it names. Peak memory is the model in fp32 and one shard of the result. Raises ModelError.
    """
    found = _policy_directory(source)
    if found.name == SHARDED_DIRECTORY:
        return _write_sharded(found, output, dtype)
    if not (found / ADAPTER_CONFIG).is_file():
        return _write(found, None, output, dtype)
    return _write(resolve_model(base or base_model(found)), found, output, dtype)


def _write(model: Path, adapter: Path | None, output: Path, dtype: torch.dtype) -> Path:
    if is_foreign(read_hf_config(model)):
        return _write_foreign(model, adapter, output, dtype)
    decoder = load_decoder(model)
    if adapter is not None:
        add_adapter(decoder, read_adapter_shape(adapter), seed=0)
        set_adapter(decoder, read_adapter(decoder, adapter))
    save_tensors(MergedWeights(decoder, dtype), output, read_hf_config(model), model, dtype)
    return adapter or model


def _write_sharded(found: Path, output: Path, dtype: torch.dtype) -> Path:
    """Write what a learner of several ranks saved, one weight at a time."""
    from headrace.learners.parallel.stored import StoredParts  # noqa: PLC0415 - takes a second

    hf_config = read_hf_config(found)
    names = DecoderConfig.from_hf(hf_config, origin=f"{found}/config.json").tensor_shapes()
    try:
        save_tensors(StoredWeights(StoredParts([found]), names), output, hf_config, found, dtype)
    except (OSError, ValueError, SafetensorError) as error:
        msg = f"{found} cannot be exported: {error}"
        raise ModelError(msg) from error
    return found


class StoredWeights(Mapping[str, Tensor]):
    """Whole weights from the parts that ranks wrote; each is read whenever it is asked for."""

    def __init__(self, stored: StoredParts, names: Iterable[str]) -> None:
        self._stored, self._names = stored, tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight. Raises ValueError where it is not all there."""
        return self._stored.whole(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write_foreign(model: Path, adapter: Path | None, output: Path, dtype: torch.dtype) -> Path:
    if adapter is not None:
        msg = f"{adapter}: adapters are merged into models that headrace computes, not into {model}"
        raise ModelError(msg)
    refuse_weights(output)
    save_foreign(load_foreign(model, dtype), output, model)
    return model


def _policy_directory(source: Path) -> Path:
    if (source / ADAPTER_CONFIG).is_file():
        return source
    checkpoint = source
    if (source / CHECKPOINT_DIRECTORY).is_dir():
        store = CheckpointStore(source / CHECKPOINT_DIRECTORY, keep=1, fingerprint="")
        last = store.latest()
        checkpoint = source if last is None else last.directory
    for name in (HF_DIRECTORY, ADAPTER_DIRECTORY, SHARDED_DIRECTORY):
        if (checkpoint / name).is_dir():
            return checkpoint / name
    msg = (
        f"{source} is no run with a checkpoint, no checkpoint and no adapter; give runs/NAME, "
        "runs/NAME/checkpoints/step-N, or a directory with adapter_config.json"
    )
    raise ModelError(msg)
