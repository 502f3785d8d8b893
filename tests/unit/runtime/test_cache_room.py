"""A cache in which no rollout fits is a fault of the recipe, found before anything starts."""

from __future__ import annotations

import pytest
from lab import Lab

from headrace.config import check_config
from headrace.generators.torch_engine import runner_choice
from headrace.generators.torch_engine.kv_cache import block_bytes
from headrace.generators.torch_generator import BLOCK_SIZE
from headrace.runtime.devices import CPU
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import Preflight, preflight


def found(lab: Lab, *settings: str) -> Preflight:
    return preflight(check_config(lab.recipe, settings))


def longest(lab: Lab) -> tuple[int, int]:
    """Tokens of the longest training and of the longest held-out prompt."""
    both = found(lab).require()
    assert both.eval is not None
    train, held_out = (
        max(len(prompt.token_ids) for prompt in report.prompts)
        for report in (both.train, both.eval)
    )
    return train, held_out


def test_a_cache_without_room_for_one_rollout_is_named_with_what_is_needed(lab: Lab) -> None:
    train, held_out = longest(lab)
    training, evaluation = found(lab, "generator.max_cache_gib=1e-8").problems
    assert training.startswith("generator.max_cache_gib = 1e-08: the cache holds 0 tokens")
    assert f"data.train with its completion has {train} + sampling.max_tokens = 8," in training
    assert f"data.eval with its completion has {held_out} + sampling.max_tokens = 8," in evaluation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_cache_is_enough_from_the_very_block_that_the_longest_rollout_needs(
    lab: Lab, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On every processor: nothing is multiplied here.
    monkeypatch.setattr(runner_choice, "can_multiply_int8", lambda _: True)
    tokens = 40 + max(longest(lab))
    num_blocks = -(-tokens // BLOCK_SIZE)
    settings = (f"generator.dtype={dtype}", "sampling.max_tokens=40")
    config = found(lab).require().model.decoder_config
    block = block_bytes(config, BLOCK_SIZE, resolve_dtype(dtype, CPU)) / 2**30
    assert found(lab, *settings, f"generator.max_cache_gib={num_blocks * block!r}").problems == []
    too_small = f"generator.max_cache_gib={num_blocks * block * 0.999!r}"
    problems = found(lab, *settings, too_small).problems
    assert problems
    advised = problems[0].partition("at least ")[2].partition(",")[0]
    assert found(lab, *settings, f"generator.max_cache_gib={advised}").problems == []


def test_a_long_evaluation_needs_its_own_room(lab: Lab) -> None:
    (problem,) = found(
        lab, "generator.max_cache_gib=0.00003", "eval.sampling.max_tokens=48"
    ).problems
    assert "data.eval" in problem
    assert "eval.sampling.max_tokens = 48" in problem


@pytest.mark.parametrize("fault", ["generator.dtype=float33", "sampling.max_tokens=0"])
def test_nothing_is_said_of_a_cache_that_cannot_be_judged(lab: Lab, fault: str) -> None:
    (problem,) = found(lab, "generator.max_cache_gib=1e-8", fault).problems
    assert problem.startswith(fault.partition("=")[0])
