"""An engine that is killed or hangs loses no prompt, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from vllm_lab import VllmLab, collect, engine_of, under_way

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.vllm import VllmGenerator
from headrace.generators.vllm.processes import SHARED_MEMORY, is_running
from headrace.models.weights import weight_update
from headrace.types import RolloutGroup

MANY = 45


def shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.iterdir())


async def struck(
    generator: VllmGenerator, lab: VllmLab, strike: signal.Signals, which: int
) -> dict[str, RolloutGroup]:
    """Return groups that were under way when a process of the engine was struck."""
    requests = [lab.request(name, size=2, max_tokens=MANY) for name in "abc"]
    call = asyncio.ensure_future(collect(generator, requests))
    await under_way(generator, 2)
    os.kill(engine_of(generator).pids[which], strike)
    return await call


def check_whole(lab: VllmLab, generator: VllmGenerator, groups: dict[str, RolloutGroup]) -> None:
    assert set(groups) == {"a", "b", "c"}
    weights = lab.weights(seed=6)
    for group in groups.values():
        for rollout in group.rollouts:
            assert len(rollout.completion_ids) == MANY
            expected = lab.logprobs(weights, group.prompt.token_ids, rollout)
            assert rollout.generator_logprobs == pytest.approx(expected, abs=2e-4)
            assert {s.policy_version for s in rollout.version_spans} == {lab.version}
    assert generator.metrics()["generator/engine/num_restarts"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strike", "which"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, -1), (signal.SIGSTOP, 0)],
    ids=["core killed", "worker killed", "core hangs"],
)
def test_every_prompt_comes_back_when_the_engine_is_struck_and_nothing_stays_behind(
    lab: VllmLab, strike: signal.Signals, which: int
) -> None:
    there_before = shared_memory()
    generator = lab.generator(call_deadline_seconds=15.0)
    lab.run(generator.update_weights(lab.update(seed=6)))
    first = engine_of(generator).pids
    groups = lab.run(struck(generator, lab, strike, which))
    second = engine_of(generator).pids
    assert not set(first) & set(second)
    lab.run(generator.close())
    check_whole(lab, generator, groups)
    assert not any(is_running(pid) for pid in (*first, *second))
    assert shared_memory() <= there_before
    with pytest.raises(GeneratorFailure, match="was closed"):
        lab.run(collect(generator, [lab.request()]))
    with pytest.raises(WeightSyncError, match="was closed"):
        lab.run(generator.update_weights(lab.update(seed=6)))


@pytest.mark.slow
def test_an_engine_that_may_not_be_started_again_fails_every_open_call_by_name(
    lab: VllmLab,
) -> None:
    generator = lab.generator(max_restarts=0)
    lab.run(generator.update_weights(lab.update(seed=6)))
    with pytest.raises(GeneratorFailure, match=r"group .*max_restarts = 0"):
        lab.run(struck(generator, lab, signal.SIGKILL, 0))
    lab.run(generator.close())


@pytest.mark.slow
def test_an_update_that_a_worker_refuses_leaves_the_old_weights_in_a_new_engine(
    lab: VllmLab,
) -> None:
    generator = lab.generator()
    good = lab.update(seed=6)
    lab.run(generator.update_weights(good))
    whole = weight_update(99, lab.weights(seed=7))
    object.__setattr__(whole, "checksum", whole.checksum + 1)
    with pytest.raises(WeightSyncError, match=r"version 99 was not loaded: .*checksum"):
        lab.run(generator.update_weights(whole))
    (group,) = lab.run(collect(generator, [lab.request()])).values()
    expected = lab.logprobs(good.tensors, group.prompt.token_ids, group.rollouts[0])
    assert group.rollouts[0].generator_logprobs == pytest.approx(expected, abs=2e-4)
    assert group.oldest_version == good.policy_version
    lab.run(generator.close())
