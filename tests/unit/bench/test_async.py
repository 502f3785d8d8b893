from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import (
    BENCHMARKS,
    async_control,
    async_learning,
    async_run,
    async_speed,
    async_staleness,
    run_benchmark,
)
from headrace.bench.async_roles import InstantVerifier
from headrace.buffer import RolloutBuffer
from headrace.config import check_config
from headrace.errors import ConfigError
from headrace.monitors.run_directory import MetricsLine, RunHistory
from headrace.types import Prompt, RolloutGroup, SamplingParams


def line(step: int, time: float, **metrics: float) -> MetricsLine:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return MetricsLine(step=step, time=time, policy_version=step, metrics=named, sampling={})


def history(steps: list[MetricsLine], evaluations: tuple[MetricsLine, ...] = ()) -> RunHistory:
    return RunHistory(
        directory=Path(), config={}, steps=tuple(steps), evaluations=evaluations, events=()
    )


def test_control_is_measured_with_every_group_trained_on() -> None:
    assert async_control.groups_per_second(2) > 0.0
    assert len(async_control.control_gaps(3)) == 2


def test_staleness_reaches_its_bound_and_does_not_pass_it() -> None:
    learner = async_staleness.run_at(4, "carry_over", 40)
    assert learner.num_violations == 0
    assert learner.stalest == 4
    assert learner.num_tokens > 0


def test_a_buffer_that_lets_too_much_in_is_seen_by_the_count_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Careless(RolloutBuffer):
        def __init__(self, **options: Any) -> None:  # noqa: ANN401 - those of the buffer
            super().__init__(**options | {"max_staleness": 6})

        def _check_staleness(self, group: RolloutGroup, policy_version: int) -> None:
            pass

    monkeypatch.setattr(async_staleness, "RolloutBuffer", Careless)
    assert async_staleness.run_at(1, "wait", 30).num_violations > 0


def test_the_same_group_waits_as_long_in_every_run_and_between_the_bounds() -> None:
    delays = [async_run.delay_seconds(f"0/{n}", 0.5) for n in range(500)]
    assert delays == [async_run.delay_seconds(f"0/{n}", 0.5) for n in range(500)]
    assert 0.05 <= min(delays) < 0.06
    assert 0.45 < max(delays) <= 0.5


def test_delayed_verdicts_are_those_of_the_verifier_behind() -> None:
    group = RolloutGroup(
        group_id="0/a",
        prompt=Prompt(prompt_id="a", source="s", text="", token_ids=(1,)),
        rollouts=(),
        sampling=SamplingParams(),
    )
    verifier = async_run.DelayedVerifier(InstantVerifier(2), 0.001)
    assert [verdict.reward for verdict in asyncio.run(verifier.score(group))] == [0.0, 1.0]


def test_speed_is_of_the_steps_after_the_first_ones() -> None:
    steps = [
        line(
            n,
            time=100.0 + n * (10.0 if n <= 2 else 2.0),
            verifier__rollouts__num_scored=60.0,
            verifier__rollouts__num_failed=4.0,
            controller__time__update_seconds=1.5,
            learner__staleness__mean=float(n),
        )
        for n in range(1, 6)
    ]
    steps[1] = line(2, time=104.0)
    speed = async_speed.speed_of(history(steps), 2)
    assert speed.rollouts_per_second == pytest.approx(3 * 64 / 6.0)
    assert speed.learner_busy_share == pytest.approx(4.5 / 6.0)
    assert speed.mean_staleness == 4.0


def test_speedups_are_ratios_of_rollouts_trained_on() -> None:
    def speed(rate: float) -> async_speed.Speed:
        return async_speed.Speed(
            rollouts_per_second=rate, learner_busy_share=0.95, mean_staleness=2.0
        )

    found = async_speed.figures(speed(100.0), speed(160.0), speed(320.0))
    assert found["async_speedup_vs_sync"] == 3.2
    assert found["async_speedup_vs_tail_aware_sync"] == 2.0
    assert found["learner_idle_share"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "settings",
    [(), async_speed.ASYNCHRONOUS, *map(async_speed.tail_aware, async_speed.SURPLUS_GROUPS)],
)
def test_the_settings_of_every_compared_run_are_a_recipe_without_faults(
    settings: tuple[str, ...],
) -> None:
    overrides = ["num_steps=3", *async_speed.WORKLOAD, *settings]
    assert check_config(async_speed.QUICKSTART, overrides).problems == ()


@pytest.mark.parametrize("settings", async_learning.RUNS.values(), ids=async_learning.RUNS)
def test_the_runs_that_are_compared_for_what_they_learn_are_recipes_too(
    settings: tuple[str, ...],
) -> None:
    known = [setting for setting in settings if setting != async_run.UNCORRECTED]
    recipe = check_config(async_speed.QUICKSTART, [*async_learning.WORKLOAD, *known])
    assert recipe.problems == ()


def test_a_loss_is_how_far_a_run_lies_below_the_synchronous_one() -> None:
    def run(held_out: float, staleness: float) -> RunHistory:
        steps = [line(n, 1.0 * n, learner__staleness__mean=staleness) for n in range(3)]
        return history(steps, (line(3, 9.0, eval__sampled__pass_at_1=held_out),))

    runs = {"sync": run(0.9, 0.0), "stale_8": run(0.89, 7.0), "uncorrected": run(0.4, 7.5)}
    assert async_learning.figures(runs) == pytest.approx(
        {
            "heldout_sync": 0.9,
            "heldout_stale_8": 0.89,
            "heldout_uncorrected": 0.4,
            "heldout_loss_stale_8": 0.01,
            "heldout_loss_uncorrected": 0.5,
            "staleness_mean_sync": 0.0,
            "staleness_mean_stale_8": 7.0,
            "staleness_mean_uncorrected": 7.5,
        }
    )


def test_an_unknown_part_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="--part sped: no such part; allowed: control, stale"):
        run_benchmark("async", None, print, parts="control,sped")
    with pytest.raises(ConfigError, match="--part x: no such part; it has none"):
        run_benchmark("memory", None, print, parts="x")


def test_parts_are_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS["async"].parts, "control", lambda *_: {"a": 1.0})  # type: ignore[arg-type] - a dict
    monkeypatch.setitem(BENCHMARKS["async"].parts, "speed", lambda *_: {"b": 2.0})  # type: ignore[arg-type] - as above
    result = run_benchmark("async", None, print, parts="speed,control")
    assert result.figures == {"a": 1.0, "b": 2.0}
