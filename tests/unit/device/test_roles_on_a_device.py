"""Learner and torch engine keep their tensors where they are told to.

On a device that is pretended, in a process of its own: what is of one side and what of the other is
a question that needs no GPU.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from cuda_lab import assert_alike
from device_runs import learned, mixed_devices, on_pretended_device, sampled


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[..., Any]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda *call, **options: pool.submit(*call, **options).result(timeout=120)


def test_tensors_of_two_sides_are_told_apart(apart: Callable[..., Any]) -> None:
    assert apart(mixed_devices) == "AssertionError AssertionError RuntimeError"


@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "kept_support": True},
        {"raw_logprobs": True, "temperature": 1.3, "allowed_token_ids": tuple(range(50))},
        {"forced_prefix": (9, 8, 7), "min_tokens": 5, "stop_token_ids": (5,)},
    ],
    ids=["greedy", "filters", "raw", "prefix"],
)
def test_an_engine_samples_on_a_device_what_it_samples_on_the_processor(
    apart: Callable[..., Any], sampling: dict[str, Any], *, by_table: bool
) -> None:
    found = apart(on_pretended_device, sampled, sampling, by_table=by_table)
    expected = sampled("cpu", sampling, by_table=by_table)
    assert_alike(found, expected)
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one.rollouts, other.rollouts, strict=True):
            assert ours.kept_support == theirs.kept_support
            assert (ours.raw_logprobs is None) == (theirs.raw_logprobs is None)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective": {"kl_coefficient": 0.1, "proximal": "recompute", "correction": "tis"}},
        {"learner": {"num_minibatches": 2}, "max_staleness": 1},
    ],
    ids=["plain", "reference", "minibatches"],
)
def test_a_learner_makes_on_a_device_the_step_that_it_makes_on_the_processor(
    apart: Callable[..., Any], settings: dict[str, Any]
) -> None:
    found = apart(on_pretended_device, learned, settings)
    assert found == pytest.approx(learned("cpu", settings), rel=1e-4, abs=1e-6)
