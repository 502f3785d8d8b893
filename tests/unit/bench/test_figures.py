from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import int8, memory, quickstart, smollm2, startup
from headrace.config.load import load_config
from headrace.errors import RunError
from headrace.monitors.run_directory import EventLine, RunHistory
from headrace.recipes import find_recipe

Summary = dict[str, Any]


def summary(first: float, last: float, seconds: float = 60.0, rate: float = 900.0) -> Summary:
    return {
        "held_out": {
            "eval/greedy/pass_at_1": {"first": first, "last": last, "best": last},
            "eval/sampled/pass_at_1": {"first": first + 0.01, "last": last - 0.01, "best": last},
        },
        "rl_seconds": seconds,
        "rollouts_per_second": rate,
        "num_steps": 120,
    }


def test_the_quickstart_figures_are_the_worst_of_all_seeds() -> None:
    runs = [summary(0.36, 0.97), summary(0.40, 0.95, 70.0, 800.0), summary(0.35, 0.96)]
    assert quickstart.figures(runs) == pytest.approx(
        {
            "heldout_greedy_first_max": 0.40,
            "heldout_greedy_last_min": 0.95,
            "heldout_sampled_first_max": 0.41,
            "heldout_sampled_last_min": 0.94,
            "rl_seconds_max": 70.0,
            "rollouts_per_second_min": 800.0,
            "num_seeds_reached": 3,
        }
    )


@pytest.mark.parametrize(
    "missed", [summary(0.46, 0.97), summary(0.4, 0.89), summary(0.4, 0.97, 181.0)]
)
def test_a_seed_counts_only_if_start_end_and_time_are_all_within(missed: Summary) -> None:
    reached = summary(0.45, 0.90, 180.0)
    assert quickstart.figures([reached, missed])["num_seeds_reached"] == 1


def test_the_rise_of_smollm2_is_last_minus_first() -> None:
    figures = smollm2.figures(summary(0.2, 0.65, 400.0), 500.0)
    assert figures["rise"] == pytest.approx(0.45)
    assert figures["rl_seconds"] == 400.0
    assert figures["total_seconds"] == 500.0


def test_eight_bits_are_compared_with_the_recipe_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = {"as_is": 0.60, "int8_tis": 0.58, "int8_uncorrected": 0.30}
    commands: dict[str, list[str]] = {}

    def train(arguments: list[str], **_options: object) -> float:
        commands[Path(arguments[-1]).name] = arguments
        return 0.0

    monkeypatch.setattr(int8, "resolve_model", lambda _: tmp_path)
    monkeypatch.setattr(int8, "run_headrace", train)
    monkeypatch.setattr(int8, "summarise", lambda output: summary(0.1, last[output.name]))
    figures = int8.measure((), lambda _: None)
    assert figures["int8_tis_greedy_difference"] == pytest.approx(-0.02)
    assert figures["int8_tis_sampled_difference"] == pytest.approx(-0.02)
    assert figures["int8_uncorrected_greedy_last"] == pytest.approx(0.30)
    assert figures["as_is_sampled_first"] == pytest.approx(0.11)
    assert "objective.correction=tis" in commands["int8_tis"]
    assert "generator.dtype=int8" in commands["int8_uncorrected"]
    assert not [part for part in commands["as_is"] if "int8" in part]


@pytest.mark.parametrize("kind", int8.KINDS)
def test_the_recipes_of_the_comparison_are_sound(kind: str) -> None:
    load_config(find_recipe(int8.RECIPE), [*int8.KINDS[kind], *int8.EVALUATION])


def history(*events: tuple[str, float]) -> RunHistory:
    lines = [EventLine(step=0, time=t, kind=k, message="", fields={}) for k, t in events]
    return RunHistory(
        directory=Path("run"), config={}, steps=(), evaluations=(), events=tuple(lines)
    )


def test_the_first_rollout_is_the_event_of_that_name() -> None:
    run = history(("start", 1.0), ("first_rollout", 4.5), ("checkpoint", 9.0))
    assert startup.first_rollout_time(run) == 4.5


def test_a_run_without_a_rollout_has_no_first_one() -> None:
    with pytest.raises(RunError, match="no rollout ever arrived"):
        startup.first_rollout_time(history(("start", 1.0)))


def test_a_startup_figure_is_the_median_of_five() -> None:
    seconds = iter([9.0, 1.0, 2.0, 3.0, 2.5])
    assert startup._median(lambda: next(seconds), "x", lambda _: None) == 2.5
    assert next(seconds, None) is None


def test_the_memory_slope_is_in_kib_a_step_and_ignores_the_warm_up() -> None:
    warm_up = [(step, 10**9 * step) for step in range(1, 51)]
    after = [(step, 100 * 2**20 + 5 * 2**10 * step) for step in range(51, 321)]
    figures = memory.figures([*warm_up, *after])
    assert figures["rss_slope_kb_per_step"] == pytest.approx(5.0)
    assert figures["rss_mb_end"] == pytest.approx(100 + 5 * 320 / 1024)


@pytest.mark.parametrize("samples", [[], [(10, 1), (20, 1)], [(51, 1)]])
def test_too_few_memory_samples_are_an_error(samples: list[tuple[int, int]]) -> None:
    with pytest.raises(RunError, match="a slope needs two"):
        memory.figures(samples)


def line(kind: str, step: int) -> str:
    return json.dumps({"kind": kind, "step": step}) + "\n"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_sampled_once_for_each_step_that_ended(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    sampler = memory.ResidentMemorySampler(metrics)
    sampler(os.getpid())
    with metrics.open("a", buffering=1) as file:
        for text in (line("evaluation", 0), line("step", 1), line("step", 2)[:9]):
            file.write(text)
            file.flush()
            sampler(os.getpid())
            sampler(os.getpid())
        file.write(line("step", 2)[9:])
        sampler(os.getpid())
    assert [step for step, _ in sampler.samples] == [1, 2]
    assert all(resident > 2**20 for _, resident in sampler.samples)


def test_a_process_that_ended_has_no_memory() -> None:
    assert memory.resident_bytes(2**22 + 1) is None
