"""Going on exactly where a checkpoint was written, or not at all."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.errors import CheckpointError
from headrace.learners import CheckpointStore, TorchLearner
from headrace.models.attention import PackedCausal, positions_of
from headrace.types import RolloutGroup

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def run_steps(learner: TorchLearner, batch: list[RolloutGroup], count: int) -> None:
    for _ in range(count):
        asyncio.run(learner.step(batch))


def saved_in(learner: TorchLearner, directory: Path) -> Path:
    directory.mkdir()
    asyncio.run(learner.save(directory))
    return directory


def everything(learner: TorchLearner) -> dict[str, Tensor]:
    """Weights and the optimizer's state."""
    found = dict(learner._decoder.state_dict())
    for name, parameter in learner._decoder.named_parameters():
        for key, value in learner._optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = value
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_a_new_learner_and_three_more_are_six_bit_for_bit(
    family: str,
    tmp_path: Path,
    batch: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
) -> None:
    settings = {
        "num_updates": 6,
        "num_steps": 6,
        # The reference is the start, not the checkpoint; the rate depends on the updates made.
        "objective__kl_coefficient": 0.1,
        "learner__optimizer__schedule": "cosine",
        "learner__optimizer__learning_rate": 1e-3,
        "learner__optimizer__weight_decay": 0.1,
    }
    through = make_learner(family, **settings)
    run_steps(through, batch, 6)
    first, second = make_learner(family, **settings), make_learner(family, **settings)
    run_steps(first, batch, 3)
    assert asyncio.run(second.load(saved_in(first, tmp_path / "c"))) == 3
    run_steps(second, batch, 3)
    assert second.policy_version == 6
    assert_same(everything(through), everything(second))


def test_counters_survive_so_that_a_resumed_run_stops_when_the_other_would(
    tmp_path: Path,
    make_learner: Callable[..., TorchLearner],
    make_group: Callable[..., RolloutGroup],
) -> None:
    flat = make_group([1], [[2], [3]], [0.5, 0.5])
    first, second = make_learner(), make_learner()
    run_steps(first, [flat], 2)
    assert asyncio.run(second.load(saved_in(first, tmp_path / "c"))) == 0
    assert second._counters == first._counters
    assert second._counters.num_no_signal == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_policy_with_the_same_logits(
    family: str,
    tmp_path: Path,
    batch: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
) -> None:
    learner = make_learner(family, learner__optimizer__learning_rate=1e-2)
    run_steps(learner, batch, 1)
    directory = saved_in(learner, tmp_path / "c") / "hf"
    theirs, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())
    ids = torch.arange(20)
    decoder = learner._decoder
    with torch.no_grad():
        attention = PackedCausal([20], decoder.config.windows)
        logits = decoder.logits(decoder(ids, positions_of([20]), attention))
        expected = theirs.eval()(ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def lose_one(path: Path) -> None:
    tensors = load_file(path)
    del tensors[min(tensors)]
    save_file(tensors, path)


def lose_all(path: Path) -> None:
    save_file({}, path)


def reshape(path: Path) -> None:
    tensors = load_file(path)
    name = min(name for name in tensors if name.endswith("exp_avg"))
    save_file({**tensors, name: torch.zeros(3)}, path)


def add_one(path: Path) -> None:
    save_file({**load_file(path), "stranger:step": torch.zeros(())}, path)


def rename_a_counter(path: Path) -> None:
    path.write_text(json.dumps({"policy_version": 1, "num_steps": 2}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("optimizer.safetensors", remove),
        ("optimizer.safetensors", cut),
        ("optimizer.safetensors", lose_one),
        ("optimizer.safetensors", lose_all),
        ("optimizer.safetensors", reshape),
        ("optimizer.safetensors", add_one),
        ("learner.json", remove),
        ("learner.json", cut),
        ("learner.json", rename_a_counter),
        ("hf/model.safetensors", remove),
        ("hf/model.safetensors", cut),
        ("hf/config.json", remove),
    ],
)
def test_a_checkpoint_with_a_part_missing_or_damaged_is_refused_and_replaces_nothing(
    name: str,
    damage: Callable[[Path], None],
    tmp_path: Path,
    batch: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
) -> None:
    learner = make_learner()
    run_steps(learner, batch, 1)
    directory = saved_in(learner, tmp_path / "c")
    damage(directory / name)
    run_steps(learner, batch, 1)
    before = everything(learner)
    with pytest.raises(CheckpointError, match=rf"checkpoint {directory} cannot be resumed from"):
        asyncio.run(learner.load(directory))
    assert_same(everything(learner), before)
    assert learner.policy_version == 2


def test_a_learner_does_not_go_on_using_the_files_it_loaded(
    tmp_path: Path, batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    first, second = make_learner(), make_learner()
    run_steps(first, batch, 1)
    directory = saved_in(first, tmp_path / "c")
    asyncio.run(second.load(directory))
    before = everything(second)
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
    assert_same(everything(second), before)


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    other = make_learner("qwen2")
    run_steps(other, batch, 1)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        asyncio.run(make_learner("llama").load(saved_in(other, tmp_path / "c")))


@pytest.mark.parametrize("room", [0, 3_000, 20_000, 40_000])
def test_a_disk_that_fills_up_anywhere_in_a_save_leaves_the_earlier_checkpoint_to_load(
    room: int,
    small_disk: Path,
    batch: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
) -> None:
    learner = make_learner()
    store = CheckpointStore(small_disk / "checkpoints", keep=1, fingerprint="f")
    run_steps(learner, batch, 1)
    good = everything(learner)
    saved = asyncio.run(store.save(1, 1, learner.save))
    run_steps(learner, batch, 1)
    free = fill(small_disk / "ballast", room)
    with pytest.raises(CheckpointError, match="step-000002 could not be written"):
        asyncio.run(store.save(2, 2, learner.save))
    assert free <= room + 4096
    assert store.latest() == saved
    assert asyncio.run(learner.load(saved.directory)) == 1
    assert_same(everything(learner), good)


def fill(path: Path, room: int) -> int:
    """Leave about ``room`` bytes, in whole pages; return how many."""
    status = os.statvfs(path.parent)
    keep = -(-room // status.f_frsize)
    path.write_bytes(b"x" * ((status.f_bavail - keep) * status.f_frsize))
    return os.statvfs(path.parent).f_bavail * status.f_frsize
