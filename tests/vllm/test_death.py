"""An engine that is killed or hangs loses no prompt, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_lab import VllmLab, collect, engine_of, under_way

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.vllm import VllmGenerator
from headrace.generators.vllm.processes import is_running
from headrace.types import RolloutGroup

MANY = 45


def traces(generator: VllmGenerator) -> list[Path]:
    """Whatever the engine has that would outlive its processes."""
    engine = engine_of(generator)
    found = [*engine._tree.segments, engine._launched.directory]
    assert len(found) > 1
    assert list(engine._launched.directory.iterdir()), "its sockets are there"
    return found


@pytest.fixture(scope="module")
def mortal(lab: VllmLab) -> Iterator[VllmGenerator]:
    """A generator that has an engine before and after every test, whatever became of others."""
    generator = lab.generator(call_deadline_seconds=20.0)
    lab.run(generator.update_weights(lab.update(seed=6)))
    yield generator
    last, left = engine_of(generator).pids, traces(generator)
    lab.run(generator.close())
    lab.run(generator.close())
    assert not any(is_running(pid) for pid in last)
    assert not any(path.exists() for path in left)


Tokens = dict[tuple[str, int], tuple[int, ...]]
"""Group id and rollout index -> token ids."""


async def struck(
    generator: VllmGenerator, lab: VllmLab, strike: signal.Signals, which: int
) -> tuple[Tokens, dict[str, RolloutGroup]]:
    """Return what rollouts had when a process of the engine was struck, and how they ended."""
    requests = [lab.request(name, size=2, max_tokens=MANY) for name in "abc"]
    call = asyncio.ensure_future(collect(generator, requests))
    await under_way(generator, call, 2)
    os.kill(engine_of(generator).pids[which], strike)
    had = {
        (flight.request.group_id, flight.rollout_index): tuple(flight.completion_ids)
        for flight in generator._in_air
    }
    return had, await call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strike", "which"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, -1), (signal.SIGSTOP, 0)],
    ids=["core killed", "worker killed", "core hangs"],
)
def test_every_prompt_comes_back_from_an_engine_that_was_struck(
    lab: VllmLab, mortal: VllmGenerator, strike: signal.Signals, which: int
) -> None:
    update = lab.update(seed=6)
    lab.run(mortal.update_weights(update))
    mortal.metrics()
    dead = engine_of(mortal).pids
    had, groups = lab.run(struck(mortal, lab, strike, which))
    assert mortal.metrics()["generator/engine/num_restarts"] == 1
    assert not any(is_running(pid) for pid in dead)
    assert set(groups) == {"a", "b", "c"}
    for group in groups.values():
        for rollout in group.rollouts:
            assert len(rollout.completion_ids) == MANY
            kept = had[group.group_id, rollout.rollout_index]
            assert len(kept) >= 2
            assert rollout.completion_ids[: len(kept)] == kept, "no token is sampled again"
            assert {span.policy_version for span in rollout.version_spans} == {lab.version}
            expected = lab.logprobs(update.tensors, group.prompt.token_ids, rollout)
            assert rollout.generator_logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_an_update_that_a_worker_refuses_leaves_the_old_weights_in_another_engine(
    lab: VllmLab, mortal: VllmGenerator
) -> None:
    good, bad = lab.update(seed=6), lab.update(seed=7)
    lab.run(mortal.update_weights(good))
    with pytest.raises(WeightSyncError, match=r"was not loaded: .*checksum"):
        lab.run(mortal.update_weights(replace(bad, checksum=bad.checksum + 1)))
    (group,) = lab.run(collect(mortal, [lab.request()])).values()
    assert group.oldest_version == good.policy_version
    expected = lab.logprobs(good.tensors, group.prompt.token_ids, group.rollouts[0])
    assert group.rollouts[0].generator_logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_an_engine_that_may_not_start_again_fails_every_open_call_and_leaves_nothing(
    lab: VllmLab,
) -> None:
    generator = lab.generator(max_restarts=0)
    lab.run(generator.update_weights(lab.update(seed=6)))
    pids, left = engine_of(generator).pids, traces(generator)
    with pytest.raises(GeneratorFailure, match=r"group .*max_restarts = 0"):
        lab.run(struck(generator, lab, signal.SIGKILL, 0))
    assert not any(is_running(pid) for pid in pids)
    lab.run(generator.close())
    assert not any(path.exists() for path in left)
    with pytest.raises(GeneratorFailure, match="was closed"):
        lab.run(collect(generator, [lab.request()]))
    with pytest.raises(WeightSyncError, match="was closed"):
        lab.run(generator.update_weights(lab.update(seed=6)))
