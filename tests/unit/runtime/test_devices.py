"""Which device a run takes, and what is said where it is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Lab

from headrace.config import DeviceName, check_config
from headrace.controller import Controller
from headrace.errors import RunDirectoryError
from headrace.generators import TorchGenerator
from headrace.models.checkpoint import load_decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.runtime import generators, learners
from headrace.runtime.devices import CPU, engine_device, resolve_device
from headrace.runtime.precision import has_native_bfloat16
from headrace.runtime.preflight import preflight

NO_EVALUATION = "data.eval=null"


def suppose(monkeypatch: pytest.MonkeyPatch, *, gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_a_device_is_taken_where_there_is_one_and_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: DeviceName, expected: str, *, found: bool
) -> None:
    suppose(monkeypatch, gpu=found)
    assert resolve_device(name).type == expected


@pytest.mark.parametrize(
    ("engine", "expected"), [("torch", "cpu"), ("vllm", "cuda"), ("sglang", "cuda")]
)
def test_other_engines_take_the_device_that_is_there(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, engine: str, expected: str
) -> None:
    suppose(monkeypatch, gpu=True)
    config = check_config(lab.recipe, ("device=cpu",)).config
    generator = config.generator.model_copy(update={"engine": engine})
    config = config.model_copy(update={"generator": generator})
    assert engine_device(config).type == expected


def test_a_device_that_is_asked_for_and_not_there_is_found_by_the_check(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    suppose(monkeypatch, gpu=False)
    (problem,) = preflight(check_config(lab.recipe, ("device=cuda",))).problems
    assert problem.startswith('device = "cuda": torch ')
    assert 'use "auto" or "cpu"' in problem
    assert not preflight(check_config(lab.recipe, ("device=auto",))).problems


def test_a_missing_device_hides_no_other_fault(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    suppose(monkeypatch, gpu=False)
    recipe = check_config(lab.recipe, ("device=cuda", "generator.max_cache_gib=0.000001"))
    assert len(preflight(recipe).problems) == 1, "how much a block takes depends on the device"
    recipe = check_config(lab.recipe, ("device=cuda", "sampling.stop_token_ids=[99999]"))
    assert len(preflight(recipe).problems) == 2


def test_the_processor_is_not_asked_what_a_device_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    suppose(monkeypatch, gpu=False)
    expected = has_native_bfloat16(CPU)
    suppose(monkeypatch, gpu=True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: not expected)
    assert has_native_bfloat16(CPU) == expected
    assert has_native_bfloat16(torch.device("cuda")) != expected


def test_learner_and_generator_are_placed_on_the_device(
    start: Callable[..., Controller],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given: dict[str, str] = {}

    def load(directory: Path, *, device: torch.device) -> object:
        given["learner"] = device.type
        return load_decoder(directory)

    def generator(config: DecoderConfig, *, device: torch.device, **options: Any) -> TorchGenerator:  # noqa: ANN401 - those of TorchGenerator
        given["generator"] = device.type
        return TorchGenerator(config, **options)

    suppose(monkeypatch, gpu=True)
    monkeypatch.setattr(learners, "load_policy", load)
    monkeypatch.setattr(generators, "TorchGenerator", generator)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**28, 2**30))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    start(NO_EVALUATION)

    assert given == {"learner": "cuda", "generator": "cuda"}
    recorded = json.loads((tmp_path / "run" / "config.json").read_text("utf-8"))
    assert recorded["device"] == "cuda"
    assert recorded["generator"]["max_cache_gib"] == 0.125, "half of what is free on the device"


def test_a_run_does_not_go_on_on_another_device(
    start: Callable[..., Controller], tmp_path: Path
) -> None:
    start(NO_EVALUATION, "device=cpu")
    file = tmp_path / "run" / "config.json"
    recorded = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**recorded, "device": "cuda"}), "utf-8")
    with pytest.raises(RunDirectoryError, match='device was "cuda" and is "cpu"'):
        start(NO_EVALUATION, "device=cpu", resume=True)
