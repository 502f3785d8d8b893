"""Killed anywhere and resumed, a run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from lab import Lab, is_timeless

pytestmark = pytest.mark.slow

FOR_EVER = ("--set", "num_steps=1000000", "--set", "learner.max_no_signal_steps=1000000")


def num_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count('"kind": "step"') if path.exists() else 0


def is_writing_a_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob(".partial-*"))


def settled(run: Path) -> list[Any]:
    ledger = sqlite3.connect(run / "ledger.sqlite")
    rows = ledger.execute("SELECT epoch, prompt_id, step, reason FROM settled").fetchall()
    ledger.close()
    return sorted(rows)


def timeless(run: Path) -> list[Any]:
    """Return every metrics line without what a clock or the machine's free memory decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    for line in lines:
        del line["time"]
        line["metrics"] = {
            name: value for name, value in line["metrics"].items() if is_timeless(name)
        }
    return lines


def rollouts(run: Path) -> dict[str, Any]:
    files = sorted((run / "rollouts").glob("*.parquet"))
    return {path.name: pq.read_table(path).to_pydict() for path in files}


def assert_same_run(run: Path, other: Path) -> None:
    last = "checkpoints/step-000008"
    for name in ("hf/model.safetensors", "optimizer.safetensors"):
        assert (run / last / name).read_bytes() == (other / last / name).read_bytes()
    assert settled(run) == settled(other)
    assert timeless(run) == timeless(other)
    assert rollouts(run) == rollouts(other)


def test_a_run_killed_again_and_again_ends_like_one_never_killed(lab: Lab, finished: Path) -> None:
    run, chance = lab.folder / "killed", random.Random(os.urandom(8))  # noqa: S311 - not a secret
    moments = [
        lambda: num_steps(run) >= 1,  # before the first checkpoint
        lambda: is_writing_a_checkpoint(run),
        lambda: num_steps(run) >= 5 and chance.random() < 0.05,
    ]
    for attempt, moment in enumerate(moments):
        running = lab.train("killed", *(["--resume"] if attempt else []))
        if running.wait_until(moment):
            running.process.kill()
            assert running.wait().status == -signal.SIGKILL
        else:
            assert running.wait().status == 0
            assert attempt == 2, "the first two moments come in every run"
            break
    else:
        ended = lab.train("killed", "--resume").wait()
        assert ended.status == 0, ended.err

    assert_same_run(run, finished)


def test_ctrl_c_once_finishes_the_step_and_the_resumed_run_is_the_same(
    lab: Lab, finished: Path
) -> None:
    run = lab.folder / "interrupted"
    running = lab.train("interrupted")
    assert running.wait_until(lambda: num_steps(run) >= 1)
    running.process.send_signal(signal.SIGINT)
    ended = running.wait()

    assert ended.status == 0, ended.err
    assert "finishing the step" in ended.err
    assert f"--output {run} --resume" in ended.out
    assert "Traceback" not in ended.err
    last = max(path.name for path in (run / "checkpoints").iterdir())
    assert last == f"step-{num_steps(run):06d}", "the step that was finished is kept"

    resumed = lab.train("interrupted", "--resume").wait()
    assert resumed.status == 0, resumed.err
    assert_same_run(run, finished)


def test_ctrl_c_twice_stops_at_once_and_harms_nothing(lab: Lab) -> None:
    run = lab.folder / "stopped"
    running = lab.train("stopped", *FOR_EVER)
    assert running.wait_until(lambda: num_steps(run) >= 4)
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.1)  # signals of one kind that wait together are delivered as one
    running.process.send_signal(signal.SIGINT)
    ended = running.wait()

    assert ended.status in {130, 0}, ended.err  # 0: the step was over before the second one came
    assert "--resume" in ended.err + ended.out
    assert "Traceback" not in ended.err
    steps = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert steps
    for step in steps:
        assert (run / "checkpoints" / step / "state.json").is_file()


def test_a_run_that_is_under_way_is_not_resumed_by_a_second_process(lab: Lab) -> None:
    run = lab.folder / "shared"
    first = lab.train("shared", *FOR_EVER)
    assert first.wait_until(lambda: num_steps(run) >= 2)

    second = lab.train("shared", *FOR_EVER, "--resume").wait()

    assert second.status == 2
    assert "another process is training there" in second.err
    first.process.send_signal(signal.SIGKILL)
    first.wait()
    before = num_steps(run)
    third = lab.train("shared", *FOR_EVER, "--resume")
    assert third.wait_until(lambda: num_steps(run) > before)
    third.process.send_signal(signal.SIGINT)
    assert third.wait().status == 0


def test_a_resumed_run_goes_on_with_the_threads_and_the_cache_it_was_begun_with(lab: Lab) -> None:
    def recorded() -> tuple[Any, Any]:
        config = json.loads((lab.folder / "begun/config.json").read_text("utf-8"))
        return config["num_threads"], config["generator"]["max_cache_gib"]

    recipe = lab.recipe.read_text("utf-8")
    lab.recipe.write_text(recipe.replace("num_threads = 1\n", ""), encoding="utf-8")
    small = ("--set", "generator.max_cache_gib=0.25", "--set", "num_threads=1")
    assert lab.train("begun", *small, "--set", "num_steps=2").wait().status == 0
    assert recorded() == (1, 0.25)
    assert lab.train("begun", "--set", "num_steps=4", "--resume").wait().status == 0
    assert recorded() == (1, 0.25)
    lab.recipe.write_text(recipe, encoding="utf-8")
