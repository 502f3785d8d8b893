"""The JSON files of a Hugging Face model directory, read without torch.

What `headrace check` needs to know of a model is all in here, and importing torch for it would take
longer than the check. Sampling options a model carries are reported, never applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

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
    except ValueError as error:
        msg = f"{path} is not valid JSON: {error}"
        raise ModelError(msg) from error
    if not isinstance(content, dict):
        msg = f"{path} must hold a JSON object, not a {type(content).__name__}"
        raise ModelError(msg)
    return content
