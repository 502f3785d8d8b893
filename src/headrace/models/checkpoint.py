"""Hugging Face model directories: read into a `Decoder`, written from one.

Invariant: what `save_decoder` writes, transformers loads with the same logits, and the other way
round. A directory that does not fit is one ModelError listing everything wrong, never a model with
some weights left at random.
Does not know training state; that is the learner's checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.errors import CheckpointError, ModelError
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.hf_files import (
    INDEX_NAME,
    WEIGHTS_NAME,
    check_weights,
    read_hf_config,
    weight_files,
)
from headrace.models.tokenizer import copy_tokenizer_files

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_decoder(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Return the decoder of a model directory, converted to ``dtype`` tensor by tensor.

    Peak memory is the decoder and one tensor. Raises ModelError for an unknown family, no weights
    in safetensors format, and any tensor that is missing, unexpected or of another shape.
    """
    decoder = unfilled_decoder(directory, dtype, device)
    _copy_tensors(decoder, weight_files(directory))
    return decoder


def unfilled_decoder(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Return the decoder that the weights of a model directory are to be read into.

    Its parameters are memory that nothing was written to, which takes up none yet. Raises
    ModelError as `load_decoder` does.
    """
    config = DecoderConfig.from_hf(read_hf_config(directory), origin=f"{directory}/config.json")
    check_weights(directory, config)
    if config.tie_word_embeddings:
        _check_tie(weight_files(directory), directory)
    with _NoInitialisation():
        decoder = Decoder(config)
    _allocate(decoder, dtype, device)
    decoder.model.fill_rope(config)
    return decoder


def save_decoder(
    decoder: Decoder,
    directory: Path,
    hf_config: Mapping[str, Any],
    source_directory: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a complete model directory; see `save_tensors`.

    Peak memory is the decoder and one shard.
    """
    parameters = dict(decoder.named_parameters())
    save_tensors(parameters, directory, hf_config, source_directory, dtype, max_shard_bytes)


def save_tensors(
    tensors: Mapping[str, Tensor],
    directory: Path,
    hf_config: Mapping[str, Any],
    source_directory: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a complete model directory; tokenizer and generation config are the source's.

    Peak memory is one shard. ``directory`` is made if absent and must not hold weights. Raises
    ModelError if it does, CheckpointError if the weights cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    refuse_weights(directory)
    _save_weights(tensors, directory, dtype, max_shard_bytes)
    write_companions(directory, hf_config, source_directory, dtype)


def write_companions(
    directory: Path,
    hf_config: Mapping[str, Any],
    source_directory: Path,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write what a model directory holds beside weights: config, tokenizer, generation config."""
    _write_object(directory / "config.json", _with_dtype(hf_config, dtype))
    copy_tokenizer_files(source_directory, directory)
    generation_config = source_directory / "generation_config.json"
    if generation_config.is_file():
        shutil.copyfile(generation_config, directory / generation_config.name)


def refuse_weights(directory: Path) -> None:
    """Raise ModelError if ``directory`` holds weights, which would be left among new ones."""
    if stale := [*directory.glob("*.safetensors"), *directory.glob(INDEX_NAME)]:
        msg = f"{directory} already holds weights ({stale[0].name}); give an empty directory"
        raise ModelError(msg)


# --- reading ----------------------------------------------------------------------------------


class _NoInitialisation(TorchFunctionMode):
    """Leaves new weights as allocated: memory that is never written costs no time and no pages.

    The meta device would do the same, but its kernels import 800 modules, in 3 to 7 seconds.
    """

    SKIPPED = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """See `TorchFunctionMode`."""
        return None if func in self.SKIPPED else func(*args, **(kwargs or {}))


def _allocate(decoder: Decoder, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every parameter new unwritten memory; `Module.to` would copy what is not there yet."""
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(memory))


def _check_tie(files: Sequence[Path], directory: Path) -> None:
    """Raise ModelError for a stored head that is not the embedding: it would be lost silently."""
    pair: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            pair |= {n: file.get_tensor(n) for n in (_EMBEDDING, _HEAD) if n in file.keys()}  # noqa: SIM118 - not a mapping
    if _HEAD in pair and not torch.equal(pair[_EMBEDDING], pair[_HEAD]):
        msg = (
            f"{directory}: {_HEAD} differs from the embedding it is tied to; "
            "set tie_word_embeddings = false"
        )
        raise ModelError(msg)


@torch.no_grad()
def _copy_tensors(decoder: Decoder, files: Sequence[Path]) -> None:
    parameters = dict(decoder.named_parameters())
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in parameters:
                    parameters[name].copy_(file.get_tensor(name))


# --- writing ----------------------------------------------------------------------------------


def _with_dtype(hf_config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the config with its dtype set, under the name its transformers version uses."""
    key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    return {**hf_config, key: str(dtype).removeprefix("torch.")}


def _save_weights(
    parameters: Mapping[str, Tensor], directory: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    shards = _plan_shards(parameters, dtype.itemsize, max_shard_bytes)
    if len(shards) == 1:
        _save_shard(parameters, directory / WEIGHTS_NAME, dtype)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save_shard({name: parameters[name] for name in names}, directory / file_name, dtype)
        weight_map |= dict.fromkeys(names, file_name)
    num_bytes = sum(tensor.numel() for tensor in parameters.values()) * dtype.itemsize
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    _write_object(directory / INDEX_NAME, index)


def _plan_shards(
    parameters: Mapping[str, Tensor], itemsize: int, max_shard_bytes: int
) -> list[list[str]]:
    """Return names by shard, in order; a tensor over the limit has a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in parameters.items():
        num_bytes = tensor.numel() * itemsize
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    return shards


def _save_shard(parameters: Mapping[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in parameters.items()
    }
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        msg = f"{path} could not be written: {error}; free space or choose another directory"
        raise CheckpointError(msg) from error


def _write_object(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
