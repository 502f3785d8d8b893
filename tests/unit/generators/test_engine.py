"""The engine step by step: occupancy, prefill, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.errors import WeightSyncError
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Branch, Scheduler
from headrace.types import GenerationRequest

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab


class CountingRunner(ModelRunner):
    """Counts the prompt tokens it prefills."""

    num_prefilled = 0

    def prefill(self, branches: Sequence[Branch], first_slot: int) -> torch.Tensor:
        self.num_prefilled += sum(len(branch.prompt.token_ids) for branch in branches)
        return super().prefill(branches, first_slot)

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes


def engine_of(lab: Lab, max_running: int) -> tuple[Engine, CountingRunner]:
    decoder = lab.decoder()
    runner = CountingRunner(decoder.config, torch.float32, torch.device("cpu"))
    scheduler = Scheduler(max_running=max_running, max_prefill_tokens=100)
    engine = Engine(runner, scheduler, lab.decode)
    engine.load(lab.update(decoder))
    return engine, runner


def run_out(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[str]]:
    """Return which groups became whole at each step."""
    engine.submit(requests)
    steps = []
    while engine.has_work:
        steps.append([collector.request.group_id for collector in engine.step()])
    return steps


def test_a_prompt_is_prefilled_once_for_its_whole_group(lab: Lab) -> None:
    engine, runner = engine_of(lab, 16)
    run_out(engine, [lab.request("a", range(1, 8), size=8), lab.request("b", (1, 2), size=8)])
    assert runner.num_prefilled == 7 + 2


def test_a_long_rollout_holds_no_other_back(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    requests = [lab.request("long", max_tokens=30)]
    requests += [lab.request(str(i), size=3, max_tokens=3) for i in range(4)]
    steps = run_out(engine, requests)
    assert [name for names in steps for name in names] == ["0", "1", "2", "3", "long"]
    assert len(steps) == 29  # a first step samples two tokens


def test_a_slot_is_taken_again_as_soon_as_it_is_free(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    collectors = engine.submit([lab.request(str(i), max_tokens=2 + 3 * i) for i in range(8)])
    while engine.has_work:
        engine.step()
        # Slots are filled at the start of a step, so one may be free only at its end.
        num_left = sum(not collector.finished for collector in collectors)
        assert engine.num_running <= min(4, num_left)
        assert engine.num_running >= min(3, num_left)


def test_the_cache_of_a_long_run_stays_as_large_as_its_fullest_moment(lab: Lab) -> None:
    engine, runner = engine_of(lab, 8)
    sizes = []
    for index in range(12):
        requests = [lab.request(f"{index}/{k}", size=3, max_tokens=20) for k in range(4)]
        run_out(engine, requests)
        sizes.append(runner.cache_bytes)
    assert len(set(sizes)) == 1
    token_bytes = 2 * 2 * 2 * 4 * 4  # layers, keys and values, kv heads, head size, fp32
    assert sizes[0] <= 8 * (3 + 20) * token_bytes


def test_weights_never_change_while_something_runs(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    engine.submit([lab.request("a")])
    with pytest.raises(AssertionError, match="two versions"):
        engine.load(lab.update(lab.decoder(1), 2))


def test_dropped_rollouts_leave_and_the_others_go_on_unchanged(lab: Lab) -> None:
    requests = [lab.request(name, size=2, max_tokens=12, seed=i) for i, name in enumerate("abc")]
    alone, _ = engine_of(lab, 4)
    kept = alone.submit([requests[1]])[0]
    while alone.has_work:
        alone.step()
    engine, _ = engine_of(lab, 4)
    first, second, third = engine.submit(requests)
    engine.step()
    engine.drop({first, third})
    assert engine.num_running == 2
    while engine.has_work:
        engine.step()
    assert (len(first.finished), len(third.finished)) == (0, 0)
    assert [r.completion_ids for r in second.finished] == [r.completion_ids for r in kept.finished]


def test_not_finite_weights_leave_nothing_behind_in_the_cache(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    broken = lab.decoder()
    for parameter in broken.parameters():
        parameter.fill_(float("nan"))
    engine.load(lab.update(broken, 2))
    engine.submit([lab.request("a", range(1, 20), size=4)])
    with pytest.raises(Exception, match="not finite"):
        engine.step()
    engine.abort()
    engine.load(lab.update(lab.decoder(), 3))
    # The short one is read as wide as the long one: over cells that the broken weights filled.
    steps = run_out(engine, [lab.request("short", (1,)), lab.request("long", range(1, 18))])
    assert {*steps[-1]} == {"short", "long"}


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "value"])
def test_weights_that_do_not_fit_are_named_and_nothing_is_sampled_after(
    lab: Lab, fault: str
) -> None:
    engine, _ = engine_of(lab, 4)
    update = lab.update(lab.decoder(1), 2)
    name = "model.norm.weight"
    tensors: dict[str, torch.Tensor] = dict(update.tensors)
    match fault:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors = {**tensors, "model.norm.bias": tensors[name]}
            name = "model.norm.bias"
        case "shape":
            tensors[name] = torch.ones(1)
        case "dtype":
            tensors[name] = tensors[name].bfloat16()
        case _:
            tensors[name] = tensors[name] + 1
            name = "checksum"
    broken = type(update)(policy_version=2, tensors=tensors, checksum=update.checksum)
    with pytest.raises(WeightSyncError, match=name):
        engine.load(broken)
    with pytest.raises(Exception, match="version 2 did not arrive whole"):
        engine.submit([lab.request("a")])
