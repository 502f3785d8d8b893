"""The JSON files and weight headers of a Hugging Face model directory, read without torch.

What `headrace check` needs to know of a model is all in here, and importing torch for it would take
longer than the check. Sampling options a model carries are reported, never applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.errors import ModelError
from headrace.models.decoder_config import DecoderConfig

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_HEAD = "lm_head.weight"
_RECOMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints store this table; the decoder derives it from the config."""
_MAX_MISFITS = 20
"""Tensors that one message lists."""

_NEUTRAL_SAMPLING: Mapping[str, object] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_h": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_new_tokens": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "stop_strings": None,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "num_beams": 1,
}
"""Option of generation_config.json that changes what is sampled -> value that changes nothing."""


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a model directory. Raises ModelError saying what is missing."""
    if not directory.is_dir():
        msg = f"no model directory {directory}"
        raise ModelError(msg)
    if not (directory / "config.json").is_file():
        msg = (
            f"{directory} has no config.json, so it is no Hugging Face model directory; "
            "give the directory that holds config.json and *.safetensors"
        )
        raise ModelError(msg)
    return read_object(directory / "config.json")


def ignored_sampling_options(directory: Path) -> dict[str, object]:
    """Return what ``generation_config.json`` would change about sampling, by option.

    headrace samples by the recipe alone; this is for saying so. Empty if there is no such file or
    it changes nothing.
    """
    path = directory / "generation_config.json"
    options = read_object(path) if path.is_file() else {}
    return {
        name: options[name]
        for name, neutral in _NEUTRAL_SAMPLING.items()
        if options.get(name) is not None and options[name] != neutral
    }


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises ModelError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not valid JSON: {error}"
        raise ModelError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from error
    if not isinstance(content, dict):
        msg = f"{path} must hold a JSON object, not a {type(content).__name__}"
        raise ModelError(msg)
    return content


def check_weights(directory: Path, config: DecoderConfig) -> None:
    """Check that the weights in ``directory`` are those that ``config`` needs; reads headers only.

    Raises one ModelError listing every tensor that is missing, unexpected or of another shape, or
    naming the file that is absent or damaged. Values are not looked at.
    """
    expected = config.tensor_shapes()
    found: set[str] = set()
    misfits: list[str] = []
    for path in weight_files(directory):
        for name, shape in stored_shapes(path).items():
            found.add(name)
            if name in expected and shape != expected[name]:
                misfits.append(f"{path.name}: {name} is {shape}, not {expected[name]}")
            elif name not in expected and not _may_be_ignored(name, config):
                misfits.append(f"{path.name}: {name} is unexpected")
    misfits.extend(f"{name} is missing" for name in expected if name not in found)
    if misfits:
        shown = "; ".join(misfits[:_MAX_MISFITS])
        hidden = len(misfits) - _MAX_MISFITS
        more = f"; and {hidden} more" if hidden > 0 else ""
        msg = f"{directory}: the weights do not fit config.json: {shown}{more}"
        raise ModelError(msg)


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the files of the weights, in order of name. Raises ModelError if one is not there."""
    index = directory / INDEX_NAME
    if index.is_file():
        names = _indexed_names(index)
    else:
        names = [WEIGHTS_NAME] if (directory / WEIGHTS_NAME).is_file() else []
    if not names:
        raise ModelError(_no_weights(directory))
    if missing := [name for name in names if not (directory / name).is_file()]:
        msg = f"{index} names files that are not there: {', '.join(missing)}; copy them too"
        raise ModelError(msg)
    return tuple(directory / name for name in names)


def _indexed_names(index: Path) -> list[str]:
    weight_map = read_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        msg = f"{index}: weight_map must be an object of tensor name -> file name; copy it again"
        raise ModelError(msg)
    return sorted(set(names))


def _no_weights(directory: Path) -> str:
    others = [*directory.glob("*.bin"), *directory.glob("*.pth"), *directory.glob("*.gguf")]
    if others:
        return (
            f"{directory} holds {others[0].name} but no safetensors, and other formats are not "
            "read; convert with transformers: "
            "`AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)`"
        )
    return f"{directory} has a config.json but no weights: {WEIGHTS_NAME} or {INDEX_NAME}"


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor in a safetensors file. Raises ModelError naming it."""
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        msg = f"{path} is not a whole safetensors file: {error}; download or copy it again"
        raise ModelError(msg) from error


def _may_be_ignored(name: str, config: DecoderConfig) -> bool:
    if name == _HEAD:
        return config.tie_word_embeddings
    return name.endswith(_RECOMPUTED)
