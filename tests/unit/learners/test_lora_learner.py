"""A learner that trains an adapter: what moves, what is kept, and what generators get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from objective_lab import difference, outcome
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.errors import CheckpointError, ModelError
from headrace.generators import TorchGenerator
from headrace.learners import TorchLearner
from headrace.learners.metrics import LossSums
from headrace.learners.optimizer import UpdateOutcome
from headrace.learners.packing import Microbatch
from headrace.models.lora import MergedWeights, adapted_linears, save_adapter
from headrace.models.weights import checksum
from headrace.types import RolloutGroup

MakeLearner = Callable[..., TorchLearner]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LORA: dict[str, object] = {
    "learner__lora": {"rank": 3, "alpha": 4.5},
    "learner__optimizer__learning_rate": 1e-2,
}
KL = {"objective__kl_coefficient": 0.1}


def step(learner: TorchLearner, batch: list[RolloutGroup]) -> Mapping[str, float]:
    return asyncio.run(learner.step(batch)).metrics


def move(learner: TorchLearner) -> None:
    """Leave the start, where B is 0."""
    torch.manual_seed(1)
    for _, linear in adapted_linears(learner._decoder):
        torch.nn.init.normal_(linear.lora_b, std=0.3)


def everything(learner: TorchLearner) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in learner._decoder.named_parameters()}
    for name, parameter in learner._decoder.named_parameters():
        for key, value in learner._optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = value.clone()
    return found


def saved_in(learner: TorchLearner, directory: Path) -> Path:
    directory.mkdir()
    asyncio.run(learner.save(directory))
    return directory


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}


# --- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_full_training_by_the_chain_rule(
    family: str, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner, full = make_learner(family, **LORA), make_learner(family)
    move(learner)
    merged = MergedWeights(learner._decoder, torch.float32)
    full._decoder.load_state_dict(dict(merged), strict=False)
    whole, expected_metrics = outcome(full, batch)
    expected: dict[str, Tensor] = {}
    for name, linear in adapted_linears(learner._decoder):
        gradient, scale = whole[f"{name}.weight"], 1.5
        expected[f"{name}.lora_a"] = scale * linear.lora_b.detach().T @ gradient
        expected[f"{name}.lora_b"] = scale * gradient @ linear.lora_a.detach().T

    found = gradients_of(learner, batch)

    assert found.keys() == expected.keys()
    assert difference(found, expected) < 1e-5
    assert step(learner, batch)["learner/loss/total"] == pytest.approx(
        expected_metrics["learner/loss/total"], abs=1e-5
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"learner__max_tokens_per_microbatch": 1},
        {"learner__activation_checkpointing": True},
    ],
)
def test_neither_the_split_nor_recomputed_layers_change_the_gradient(
    settings: dict[str, object], batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner, other = make_learner(**LORA), make_learner(**LORA, **settings)
    move(learner)
    move(other)
    assert difference(gradients_of(other, batch), gradients_of(learner, batch)) < 1e-5


def gradients_of(learner: TorchLearner, batch: list[RolloutGroup]) -> dict[str, Tensor]:
    update = learner._update
    found: dict[str, Tensor] = {}

    def keep() -> object:
        for name, parameter in learner._decoder.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
        learner._update = update  # type: ignore[method-assign] - as it was
        learner._optimizer.zero_grad()
        return UpdateOutcome(applied=True, gradient_norm=1.0)

    learner._update = keep  # type: ignore[method-assign] - nothing may move
    step(learner, batch)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_the_adapter_alone(
    dtype: torch.dtype, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner = make_learner(**LORA, compute_dtype=dtype)
    before = everything(learner)
    step(learner, batch)
    step(learner, batch)
    after = everything(learner)
    weights = [name for name in before if ":" not in name]
    moved = {name for name in weights if not torch.equal(before[name], after[name])}
    factors = {name for name in before if name.endswith((".lora_a", ".lora_b"))}
    assert moved == factors
    assert len(factors) == 2 * 2 * 7


def test_the_optimizer_holds_two_moments_of_the_adapter_and_nothing_else(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner = make_learner(**LORA)
    step(learner, batch)
    factors = [f for _, linear in adapted_linears(learner._decoder) for f in
               (linear.lora_a, linear.lora_b)]  # fmt: skip
    state = [value for own in learner._optimizer.state.values() for value in own.values()]
    held = sum(value.numel() for value in state if value.dim() > 0)
    assert held == 2 * sum(factor.numel() for factor in factors)
    assert all(p.grad is None for p in learner._decoder.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_reward", [False, True])
def test_the_kl_to_the_reference_is_exactly_0_at_the_start_and_not_after_it(
    *, dtype: torch.dtype, in_reward: bool, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    settings = LORA | KL | ({"objective__kl_estimator": "k1_reward"} if in_reward else {})
    learner = make_learner(**settings, compute_dtype=dtype)
    parts = learner._plan(learner._score(batch, LossSums()))
    gaps = [gap(learner, part) for part in parts.batches]
    assert gaps == [0.0] * len(gaps)
    step(learner, batch)
    assert max(gap(learner, part) for part in parts.batches) > 0.0


@torch.no_grad()
def gap(learner: TorchLearner, part: Microbatch) -> float:
    own, reference = (
        learner._logprobs(decoder, part)[0]
        for decoder in (learner._decoder, learner._reference_decoder)
    )
    return float((own - reference).abs().max())


def test_the_reference_is_the_frozen_model_itself_and_no_second_one(
    make_learner: MakeLearner,
) -> None:
    learner = make_learner(**LORA, **KL)
    own = dict(learner._decoder.named_parameters())
    for name, parameter in learner._reference_decoder.named_parameters():
        is_factor = name.endswith((".lora_a", ".lora_b"))
        assert (parameter.data_ptr() == own[name].data_ptr()) != is_factor
        assert not parameter.requires_grad


def test_the_reference_of_a_run_that_starts_from_an_adapter_is_the_model_with_it(
    tmp_path: Path, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    first = make_learner(**LORA)
    move(first)
    save_adapter(first._decoder, tmp_path / "start", tmp_path)
    lora = {"rank": 3, "alpha": 4.5, "start": str(tmp_path / "start")}
    learner = make_learner(**LORA | KL | {"learner__lora": lora})
    assert not differing(everything(learner), everything(first))
    parts = learner._plan(learner._score(batch, LossSums()))
    assert max(gap(learner, part) for part in parts.batches) == 0.0
    without = make_learner(**LORA)._decoder
    learner._reference = without
    assert max(gap(learner, part) for part in parts.batches) > 1e-3


def test_an_adapter_to_start_from_that_does_not_fit_is_refused(
    tmp_path: Path, make_learner: MakeLearner
) -> None:
    first = make_learner(**LORA)
    save_adapter(first._decoder, tmp_path / "start", tmp_path)
    with pytest.raises(ModelError, match="has rank 3"):
        make_learner(learner__lora={"rank": 4, "alpha": 4.5, "start": str(tmp_path / "start")})


# --- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_a_new_learner_and_two_more_are_four_bit_for_bit(
    family: str, tmp_path: Path, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    through, first, second = (make_learner(family, **LORA, **KL) for _ in range(3))
    for _ in range(4):
        step(through, batch)
    for _ in range(2):
        step(first, batch)
    assert asyncio.run(second.load(saved_in(first, tmp_path / "c"))) == 2
    for _ in range(2):
        last = step(second, batch)
    assert not differing(everything(through), everything(second))
    assert last["learner/kl/reference"] > 0.0


def test_a_checkpoint_holds_the_adapter_and_no_second_copy_of_the_model(
    tmp_path: Path, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner = make_learner(**LORA)
    step(learner, batch)
    directory = saved_in(learner, tmp_path / "c")
    files = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    assert files == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "learner.json",
    }
    assert all(".lora_" in name for name in load_file(directory / "optimizer.safetensors"))


def lose_a_factor(directory: Path) -> None:
    path = directory / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[min(tensors)]
    save_file(tensors, path)


def lose_a_moment(directory: Path) -> None:
    path = directory / "optimizer.safetensors"
    tensors = load_file(path)
    del tensors[min(tensors)]
    save_file(tensors, path)


def lose_the_adapter(directory: Path) -> None:
    (directory / "adapter" / "adapter_config.json").unlink()


@pytest.mark.parametrize("damage", [lose_a_factor, lose_a_moment, lose_the_adapter])
def test_a_damaged_checkpoint_is_refused_and_replaces_nothing(
    damage: Callable[[Path], None],
    tmp_path: Path,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
) -> None:
    learner = make_learner(**LORA)
    step(learner, batch)
    directory = saved_in(learner, tmp_path / "c")
    damage(directory)
    step(learner, batch)
    before = everything(learner)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        asyncio.run(learner.load(directory))
    assert not differing(everything(learner), before)


@pytest.mark.parametrize(
    "settings", [{}, {"learner__lora": {"rank": 2, "alpha": 4.5}}, {"learner__lora": {}}]
)
def test_a_checkpoint_of_another_adapter_or_of_none_is_refused(
    settings: dict[str, object],
    tmp_path: Path,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
) -> None:
    other = make_learner(**settings)
    step(other, batch)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        asyncio.run(make_learner(**LORA).load(saved_in(other, tmp_path / "c")))


# --- what generators get ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_generator_takes_the_merged_weights_on_another_thread_with_other_cores(
    dtype: torch.dtype, make_learner: MakeLearner
) -> None:
    learner = make_learner(**LORA, export_dtype=dtype)
    move(learner)
    update = asyncio.run(learner.export())
    compute = ComputeThread("generator", 2)
    generator = TorchGenerator(learner._decoder.config, decode=str, compute=compute, dtype=dtype)

    async def hand_over() -> None:
        await generator.update_weights(update)
        await generator.close()

    asyncio.run(hand_over())
    compute.close()
    assert update.checksum == checksum(MergedWeights(learner._decoder, dtype).items())
    assert dict(update.tensors).keys() == dict(make_learner()._decoder.named_parameters()).keys()
