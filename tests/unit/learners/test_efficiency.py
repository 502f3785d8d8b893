"""Settings that trade time for memory, or number formats, and the first attempt of a run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_lab import MakeLearner, difference, outcome, prepared
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from headrace.config import RunConfig
from headrace.errors import RunError
from headrace.learners import TorchLearner
from headrace.learners.metrics import LossSums
from headrace.learners.optimizer import loss_scale
from headrace.learners.packing import microbatches
from headrace.learners.rehearsal import largest_microbatch
from headrace.learners.selection import TrainingGroup, TrainingRow
from headrace.types import RolloutGroup

CPU = torch.device("cpu")
RECOMPUTED = {"learner__activation_checkpointing": True}

# --- activation checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_are_computed_again_give_the_same_gradient_bit_for_bit(
    family: str, dtype: torch.dtype, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    settings: dict[str, Any] = {"family": family, "compute_dtype": dtype}
    kept, _ = outcome(prepared(make_learner, **settings), batch)
    again, _ = outcome(prepared(make_learner, **settings, **RECOMPUTED), batch)
    assert [name for name in kept if not torch.equal(kept[name], again[name])] == []


def live_after_forward(learner: TorchLearner, groups: list[RolloutGroup]) -> int:
    """Return the bytes that a forward pass leaves allocated for the backward pass."""
    (part,) = learner._plan(learner._score(groups, LossSums())).batches
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        found = learner._read(learner._decoder, part)
    assert found.logprobs.requires_grad
    return sum(event.self_cpu_memory_usage for event in recorded.key_averages())


def test_layers_that_are_computed_again_keep_less_memory(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    kept = live_after_forward(make_learner(), batch)
    again = live_after_forward(make_learner(**RECOMPUTED), batch)
    assert 0 < again < 0.5 * kept


# --- float16 ------------------------------------------------------------------------------------


@given(weights=st.lists(st.floats(1e-9, 1.0), min_size=1))
def test_the_scale_is_a_power_of_two_that_brings_the_largest_weight_near_one(
    weights: list[float],
) -> None:
    scale = loss_scale(weights)
    assert math.log2(scale).is_integer()
    assert 0.5 < max(weights) * scale <= 1.0


def test_nothing_to_learn_from_has_a_scale_too() -> None:
    assert loss_scale([]) == loss_scale([0.0]) == 1.0


def thinned(groups: list[RolloutGroup], learner: TorchLearner) -> Any:  # noqa: ANN401
    """Return a minibatch whose tokens count as little as in a batch of ten million."""
    part = learner._plan(learner._score(groups, LossSums()))
    rows = [
        TrainingGroup(
            prompt_ids=group.prompt_ids,
            rows=tuple(
                TrainingRow(rollout=row.rollout, advantage=row.advantage, weight=1e-7)
                for row in group.rows
            ),
        )
        for group in part.selection.groups
    ]
    import dataclasses  # noqa: PLC0415 - used here alone

    part.selection = dataclasses.replace(part.selection, groups=tuple(rows))
    part.batches = microbatches(rows, max_tokens=10_000, device=CPU)
    return part


def gradient(learner: TorchLearner, part: Any) -> dict[str, Tensor]:  # noqa: ANN401
    learner._accumulate(part)
    return {name: p.grad for name, p in learner._decoder.named_parameters() if p.grad is not None}


def test_a_float16_gradient_keeps_its_digits_however_large_the_batch(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    half = prepared(make_learner, compute_dtype=torch.float16)
    full = prepared(make_learner)
    bfloat = prepared(make_learner, compute_dtype=torch.bfloat16)
    expected = gradient(full, thinned(batch, full))
    error = difference(gradient(half, thinned(batch, half)), expected)
    assert error < 0.01
    assert error < 0.5 * difference(gradient(bfloat, thinned(batch, bfloat)), expected)


# --- the first attempt --------------------------------------------------------------------------


def test_a_rehearsal_leaves_nothing_behind(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    rehearsed, plain = make_learner(), make_learner()
    asyncio.run(rehearsed.rehearse(30))
    assert all(parameter.grad is None for parameter in rehearsed._parameters)
    states = rehearsed._optimizer.state.values()
    assert not any(moment.any() for state in states for moment in state.values())
    one, other = (asyncio.run(learner.step(batch)).metrics for learner in (rehearsed, plain))
    assert one == other
    first, second = rehearsed._decoder.state_dict(), plain._decoder.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [
        (10_000, 4 * (10 + 3 * 15)),  # the whole batch
        (2 * (10 + 3 * 15) + 5, 2 * (10 + 3 * 15)),  # as many groups as fit
        (45, 10 + 2 * 15),  # a part of a group
        (3, 10 + 15),  # one rollout, which is above the budget
    ],
)
def test_the_largest_microbatch_has_the_tokens_that_the_settings_allow(
    budget: int, tokens: int, make_config: Callable[..., RunConfig]
) -> None:
    config = make_config(
        groups_per_step=4,
        group_size=3,
        sampling={"max_tokens": 16},
        learner__max_tokens_per_microbatch=budget,
    )
    found = largest_microbatch(config, longest_prompt=10, device=CPU)
    assert len(found.input_ids) == tokens


@given(data=st.data(), budget=st.integers(1, 200))
def test_no_batch_of_a_run_packs_into_a_larger_one(data: st.DataObject, budget: int) -> None:
    from headrace.config import parse_config  # noqa: PLC0415 - used here alone
    from headrace.types import Rollout, VersionSpan  # noqa: PLC0415 - as above

    config = parse_config(
        {
            "num_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": {"type": "jsonl", "path": "unused"}},
            "verifier": {"components": {"answer": {"kind": "exact"}}},
            "sampling": {"max_tokens": 9},
            "groups_per_step": 3,
            "group_size": 4,
            "learner": {"max_tokens_per_microbatch": budget},
        }
    )

    def row(length: int) -> TrainingRow:
        rollout = Rollout(
            rollout_index=0,
            completion_ids=(0,) * length,
            loss_mask=(True,) * length,
            generator_logprobs=(0.0,) * length,
            version_spans=(VersionSpan(policy_version=0, start=0, end=length),),
            finish_reason="stop",
            text="",
        )
        return TrainingRow(rollout=rollout, advantage=1.0, weight=1.0)

    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    groups = [
        TrainingGroup(
            prompt_ids=(0,) * data.draw(st.integers(1, 12)),
            rows=tuple(row(n) for n in data.draw(lengths)),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    largest = largest_microbatch(config, longest_prompt=12, device=CPU)
    bound = max(budget, len(largest.input_ids))
    assert all(
        len(part.input_ids) <= bound for part in microbatches(groups, max_tokens=budget, device=CPU)
    )


class Refused(Exception):
    """Stands for anything else that goes wrong."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_a_lack_of_memory_is_told_with_what_to_lower(
    error: RuntimeError, make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(learner__max_tokens_per_microbatch=200)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(learner, "_read", refuse)
    with pytest.raises(RunError) as caught:
        asyncio.run(learner.rehearse(8))
    text = str(caught.value)
    for part in (
        "the largest micro-batch of this recipe does not fit in memory",
        "learner.max_tokens_per_microbatch (now 200)",
        "sampling.max_tokens (now 16)",
        "learner.activation_checkpointing = true",
        str(error).splitlines()[0],
    ):
        assert part in text
    assert "More." not in text


def test_a_rollout_that_alone_is_above_the_budget_is_not_helped_by_a_lower_budget(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(learner__max_tokens_per_microbatch=3, **RECOMPUTED)

    def refuse(*_: object) -> None:
        message = "out of memory"
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(learner, "_read", refuse)
    with pytest.raises(RunError) as caught:
        asyncio.run(learner.rehearse(8))
    assert "max_tokens_per_microbatch" not in str(caught.value)
    assert "activation_checkpointing" not in str(caught.value)


def test_any_other_failure_of_a_rehearsal_is_raised_as_it_is(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()

    def fail(*_: object) -> None:
        message = "shapes differ"
        raise RuntimeError(message)

    monkeypatch.setattr(learner, "_read", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        asyncio.run(learner.rehearse(8))
