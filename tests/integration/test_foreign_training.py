"""`headrace train` of a random GPT-2, which only transformers computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab import IDS, Command, Lab, make_lab, write_model
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

STATE = ("hf/model.safetensors", "optimizer.safetensors", "learner.json")
SHORT = ("--set", "num_steps=2", "--set", "checkpoint.every=1", "--set", "eval.every=2")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    from transformers import AutoModelForCausalLM, GPT2Config  # noqa: PLC0415 - slow to import

    lab = make_lab(tmp_path_factory.mktemp("gpt2"))
    model = write_model(lab.folder / "gpt2", model_type="gpt2")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(IDS), n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    text = lab.recipe.read_text(encoding="utf-8")
    lab.recipe.write_text(text.replace(str(lab.folder / "model"), str(model)), encoding="utf-8")
    return lab


@pytest.fixture(scope="module")
def trained(gpt2: Lab) -> Path:
    ended = gpt2.train("run", *SHORT).wait()
    assert ended.status == 0, ended.err
    return gpt2.folder / "run"


def steps(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["metrics"] for line in lines if line["kind"] == "step"]


def test_check_says_which_way_the_model_takes(gpt2: Lab, headrace: Command) -> None:
    ended = headrace("check", gpt2.recipe)
    assert ended.status == 0
    assert "model_type 'gpt2'" in ended.err
    assert "AutoModelForCausalLM" in ended.err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("generator.engine=sglang", 'generator.engine = "sglang"'),
        ("learner.lora.rank=4", "learner.lora: a model of family gpt2"),
        ("learner.activation_checkpointing=true", "learner.activation_checkpointing = true"),
        ("generator.batch_invariant=true", "generator.batch_invariant = true: gpt2 is sampled"),
    ],
)
def test_check_names_the_settings_that_it_cannot_have(
    setting: str, message: str, gpt2: Lab, headrace: Command
) -> None:
    ended = headrace("check", gpt2.recipe, "--set", setting)
    assert ended.status == 2
    assert message in ended.err


def test_two_steps_change_the_weights_and_the_generator_agrees_with_the_learner(
    gpt2: Lab, trained: Path
) -> None:
    before = load_file(gpt2.folder / "gpt2/model.safetensors")
    after = load_file(trained / "checkpoints/step-000002/hf/model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    found = steps(trained)
    assert len(found) == 2
    # Both compute in fp32, so the log-probs of sampling and training are the same but for rounding.
    assert all(metrics["learner/mismatch/max_gap"] < 1e-4 for metrics in found)


def test_stopped_and_resumed_it_ends_in_the_same_weights_bit_for_bit(
    gpt2: Lab, trained: Path
) -> None:
    assert gpt2.train("halves", *SHORT, "--set", "num_steps=1").wait().status == 0
    ended = gpt2.train("halves", *SHORT, "--resume").wait()
    assert ended.status == 0, ended.err
    for name in STATE:
        path = f"checkpoints/step-000002/{name}"
        assert (trained / path).read_bytes() == (gpt2.folder / "halves" / path).read_bytes()


def test_its_checkpoint_is_evaluated_and_exported(
    gpt2: Lab, trained: Path, tmp_path: Path, headrace: Command
) -> None:
    ended = headrace("export", trained, "--output", tmp_path / "half", "--dtype", "bfloat16")
    assert ended.status == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    full = load_file(trained / "checkpoints/step-000002/hf/model.safetensors")
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)
    ended = headrace("eval", gpt2.recipe, "--model", tmp_path / "half", "--json")
    assert ended.status == 0
    assert "eval/greedy/reward_mean" in json.loads(ended.out)["metrics"]
