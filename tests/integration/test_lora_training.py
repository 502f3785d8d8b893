"""`headrace train` with an adapter, resumed, exported and begun again from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab import Command, Lab
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

LORA = (
    "--set",
    "learner.lora.rank=4",
    "--set",
    "learner.lora.alpha=8",
    "--set",
    "objective.kl_coefficient=0.01",
)
STATE = ("adapter/adapter_model.safetensors", "optimizer.safetensors", "learner.json")


def metrics(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["metrics"] for line in map(json.loads, lines) if line["kind"] == "step"]


@pytest.fixture(scope="module")
def trained(lab: Lab) -> Path:
    ended = lab.train("lora", *LORA).wait()
    assert ended.status == 0, ended.err
    return lab.folder / "lora"


def test_the_reward_rises_from_a_start_whose_kl_is_exactly_0(trained: Path) -> None:
    found = metrics(trained)
    assert found[0]["learner/kl/reference"] == 0.0
    assert found[-1]["learner/kl/reference"] > 0.0
    rewards = [step["verifier/reward/raw_mean"] for step in found]
    assert rewards[-1] > rewards[0] + 0.2


def test_stopped_and_resumed_it_ends_in_the_same_adapter_bit_for_bit(
    lab: Lab, trained: Path
) -> None:
    assert lab.train("halves", *LORA, "--set", "num_steps=4").wait().status == 0
    ended = lab.train("halves", *LORA, "--resume").wait()
    assert ended.status == 0, ended.err
    for name in STATE:
        path = f"checkpoints/step-000008/{name}"
        assert (trained / path).read_bytes() == (lab.folder / "halves" / path).read_bytes()


def test_it_is_not_resumed_with_another_adapter(trained: Path, lab: Lab) -> None:
    ended = lab.train("lora", *LORA, "--set", "learner.lora.rank=2", "--resume").wait()
    assert ended.status == 2
    assert "learner.lora.rank was 4 and is 2" in ended.err
    assert trained.is_dir()


def test_the_exported_model_is_base_and_adapter_and_scores_as_the_run_did(
    lab: Lab, trained: Path, tmp_path: Path, headrace: Command
) -> None:
    assert headrace("export", trained, "--output", tmp_path / "whole").status == 0
    whole, base = (
        load_file(directory / "model.safetensors")
        for directory in (tmp_path / "whole", lab.folder / "model")
    )
    factors = load_file(trained / "checkpoints/step-000008" / STATE[0])
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{module}.lora_A.weight" in factors:
            product = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
            expected = weight + 8 / 4 * product
            assert not torch.equal(whole[name], weight)
        torch.testing.assert_close(whole[name], expected)
    ended = headrace("eval", lab.recipe, "--model", tmp_path / "whole", "--json")
    assert ended.status == 0
    lines = (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [line for line in map(json.loads, lines) if line["kind"] == "evaluation"][-1]
    name = "eval/greedy/reward_mean"
    assert json.loads(ended.out)["metrics"][name] == pytest.approx(last["metrics"][name])


def test_a_run_begins_from_the_adapter_of_another_with_a_kl_of_0(lab: Lab, trained: Path) -> None:
    start = trained / "checkpoints/step-000008/adapter"
    settings = (*LORA, "--set", f"learner.lora.start={start}", "--set", "num_steps=2")
    ended = lab.train("further", *settings).wait()
    assert ended.status == 0, ended.err
    found = metrics(lab.folder / "further")
    assert found[0]["learner/kl/reference"] == 0.0
    assert found[0]["verifier/reward/raw_mean"] > metrics(trained)[0]["verifier/reward/raw_mean"]


def test_what_is_wrong_with_the_adapter_to_start_from_is_found_before_anything_starts(
    lab: Lab, trained: Path, headrace: Command
) -> None:
    start = trained / "checkpoints/step-000008/adapter"
    given = (*LORA, "--set", f"learner.lora.start={start}", "--set", "learner.lora.rank=3")
    ended = headrace("check", lab.recipe, *given)
    assert ended.status == 2
    assert "learner.lora.start" in ended.err
    assert "has rank 4 and alpha 8, not rank 3" in ended.err


def test_a_run_without_a_checkpoint_and_a_full_directory_are_not_exported_to(
    lab: Lab, trained: Path, tmp_path: Path, headrace: Command
) -> None:
    ended = headrace("export", tmp_path, "--output", tmp_path / "whole")
    assert ended.status == 2
    assert "no run with a checkpoint" in ended.err
    ended = headrace("export", trained, "--output", lab.folder / "model")
    assert ended.status == 2
    assert "already holds weights" in ended.err


def test_a_run_that_trained_every_weight_is_exported_in_another_dtype(
    finished: Path, tmp_path: Path, headrace: Command
) -> None:
    ended = headrace("export", finished, "--output", tmp_path / "half", "--dtype", "bfloat16")
    assert ended.status == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    full = load_file(finished / "checkpoints/step-000008/hf/model.safetensors")
    assert {name: tensor.bfloat16() for name, tensor in full.items()}.keys() == half.keys()
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)
