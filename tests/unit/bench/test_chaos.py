"""What `bench chaos` counts, and what its eyes see."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from headrace.bench import chaos, chaos_run
from headrace.bench.chaos_processes import Processes
from headrace.bench.chaos_run import ChaosReport, Kill
from headrace.bench.chaos_task import Task
from headrace.errors import ConfigError

TASK = Task(
    num_prompts=4,
    num_epochs=2,
    groups_per_step=4,
    group_size=2,
    max_staleness=1,
    checkpoint_every=1,
    num_heldout=1,
)


def report(accuracy: float | None, *problems: str, kills: tuple[Kill, ...] = ()) -> ChaosReport:
    return ChaosReport(seed=1, kills=kills, problems=problems, accuracy=accuracy, seconds=1.0)


def write_run(run: Path, settled: dict[tuple[int, str], int], staleness: float = 1.0) -> None:
    run.mkdir()
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        ledger.execute("CREATE TABLE settled (epoch, prompt_id, step, reason)")
        rows = [(epoch, prompt, step, None) for (epoch, prompt), step in settled.items()]
        ledger.executemany("INSERT INTO settled VALUES (?, ?, ?, ?)", rows)
        ledger.commit()
    lines = [
        {"kind": "step", "step": step, "metrics": {"learner/staleness/max": staleness}}
        for step in sorted(set(settled.values()))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def whole() -> dict[tuple[int, str], int]:
    return {(epoch, f"p{n}"): epoch + 1 for epoch in range(2) for n in range(4)}


def test_a_run_that_kept_its_promises_is_found_to(tmp_path: Path) -> None:
    write_run(tmp_path / "run", whole())
    assert not list(chaos_run._broken_promises(TASK, tmp_path / "run"))


def test_a_lost_prompt_is_seen(tmp_path: Path) -> None:
    settled = whole()
    del settled[1, "p3"]
    write_run(tmp_path / "run", settled)
    assert list(chaos_run._broken_promises(TASK, tmp_path / "run")) == [
        "7 prompts are settled, 8 were drawn"
    ]


def test_a_missing_step_and_a_batch_too_large_are_seen(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dict.fromkeys(whole(), 2))
    found = list(chaos_run._broken_promises(TASK, tmp_path / "run"))
    assert found == ["steps on record: [2]", "groups by step: {2: 8}"]


def test_a_token_too_stale_is_seen(tmp_path: Path) -> None:
    write_run(tmp_path / "run", whole(), staleness=2.0)
    assert list(chaos_run._broken_promises(TASK, tmp_path / "run")) == ["staleness 2 above 1"]


def test_what_is_left_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run, "_GONE_SECONDS", 0.2)
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']).wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as root:
        processes = Processes(root.pid)
        deadline = time.monotonic() + 60.0
        while not processes._started:
            processes.look()
            assert time.monotonic() < deadline
        (child,) = processes.alive()
        (tmp_path / "litter").mkdir()
        found = chaos_run._left_behind(processes, tmp_path, chaos_run._names(chaos_run._MEMORY))
        assert f"left behind: processes {child}" in found
        assert "left behind: temporary files litter" in found
        assert processes.kill(child)
        root.wait()
    (tmp_path / "litter").rmdir()
    assert not processes.alive()
    assert not processes.kill(child)


def test_moments_are_those_of_the_seed() -> None:
    first, again, other = (chaos_run._Plan.drawn(seed, 3, 12).moments for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 3
    assert first == sorted(first, key=lambda moment: moment[0])
    assert chaos_run._Plan.drawn(None, 3, 12).moments == []


def test_what_was_learned_is_compared_with_the_nearest_undisturbed_run() -> None:
    undisturbed = [report(0.5), report(0.7)]
    assert not chaos.judged(report(0.79), undisturbed).problems
    assert not chaos.judged(report(0.41), undisturbed).problems
    assert chaos.judged(report(0.85), undisturbed).problems
    assert chaos.judged(report(0.85, "it hangs"), undisturbed).problems == ("it hangs",)


def test_figures_count_runs_failures_and_kills_by_role() -> None:
    kills = (Kill(role="rank", step=1), Kill(role="cell", step=2), Kill(role="rank", step=3))
    found = chaos.figures([report(0.5)], [report(0.4, kills=kills), report(None, "it hangs")])
    assert found["chaos_runs"] == 2.0
    assert found["chaos_failures"] == 1.0
    assert found["chaos_kills"] == 3.0
    assert found["chaos_kills_rank"] == 2.0
    assert found["chaos_accuracy_min"] == 0.4


def test_how_many_runs_and_which_seeds_the_environment_says() -> None:
    assert chaos.seeds(50, {}) == range(50)
    assert chaos.seeds(50, {"HEADRACE_CHAOS_RUNS": "3", "HEADRACE_CHAOS_SEED": "7"}) == range(7, 10)
    with pytest.raises(ConfigError, match="HEADRACE_CHAOS_RUNS = '0': give a whole number"):
        chaos.seeds(50, {"HEADRACE_CHAOS_RUNS": "0"})
