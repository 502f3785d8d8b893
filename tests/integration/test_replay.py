"""`headrace replay` of asynchronous runs: killed and resumed, on ranks, and of what was damaged."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from lab import Command, Lab

from headrace.monitors import read_records
from headrace.monitors.step_records import append_record

pytestmark = pytest.mark.slow

NUM_STEPS = 7
AHEAD = (
    "--set",
    f"num_steps={NUM_STEPS}",
    "--set",
    "max_staleness=2",
    "--set",
    "data.eval=null",
    "--set",
    "checkpoint.every=3",
    "--set",
    "checkpoint.keep=9",
)
NANO = (*AHEAD, "--set", "groups_per_step=8", "--set", "group_size=8", "--set", "num_threads=2")


def num_recorded(run: Path) -> int:
    path = run / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def nano(lab: Lab) -> Path:
    """The nano model of the quickstart, trained ahead, killed behind step 4 and resumed."""
    run = lab.folder / "nano"
    running = lab.start("train", "quickstart", *NANO, "--output", run)
    assert running.wait_until(lambda: num_recorded(run) >= 4), running.wait().err
    running.process.kill()
    assert running.wait().status == -signal.SIGKILL
    ended = lab.start("train", "quickstart", *NANO, "--output", run, "--resume").wait()
    assert ended.status == 0, ended.err
    return run


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_every_step_of_a_run_that_was_killed_and_resumed_is_bit_identical(
    nano: Path, headrace: Command, step: int
) -> None:
    ended = headrace("replay", nano, "--step", step, "--json")
    assert ended.status == 0, ended.out
    report = json.loads(ended.out)
    assert report["is_identical"]
    assert report["first_difference"] is None
    assert f"step {step}" in ended.err


def test_the_run_really_ran_ahead_and_each_step_is_on_record_once(nano: Path) -> None:
    records = read_records(nano)
    assert list(records) == list(range(1, NUM_STEPS + 1))
    assert num_recorded(nano) == NUM_STEPS, "what the kill undid is forgotten"
    assert max(record.metrics["learner/staleness/max"] for record in records.values()) == 2
    assert [r.before.policy_version for r in records.values()] == list(range(NUM_STEPS))


def test_a_run_in_progress_and_its_rollouts_are_inspected_as_before(
    nano: Path, headrace: Command
) -> None:
    ended = headrace("inspect", nano, "--step", 2)
    assert ended.status == 0
    assert "step 2: 8 groups" in ended.out


def test_what_is_not_identical_ends_with_status_one_and_says_what_differs_first(
    nano: Path, headrace: Command, tmp_path: Path
) -> None:
    run = shutil.copytree(nano, tmp_path / "run")
    record = read_records(run)[5]
    metrics = {**record.metrics, "learner/loss/total": 0.25}
    append_record(run, replace(record, metrics=metrics))

    ended = headrace("replay", run, "--step", 5)
    assert ended.status == 1
    assert "steps 4 to 5 from step-000003: NOT bit-identical" in ended.out
    assert "first difference: step 5, learner/loss/total: 0.25 on record" in ended.out

    ended = headrace("replay", run, "--step", 5, "--json")
    report = json.loads(ended.out)
    assert (ended.status, report["is_identical"], report["num_differences"]) == (1, False, 1)
    assert report["first_difference"]["name"] == "learner/loss/total"
    assert report["first_difference"]["recorded"] == 0.25


def test_a_damaged_record_is_a_user_error_that_names_it(
    nano: Path, headrace: Command, tmp_path: Path
) -> None:
    run = shutil.copytree(nano, tmp_path / "run")
    path = run / "rollouts" / "step-000005.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    ended = headrace("replay", run, "--step", 5)
    assert (ended.status, ended.out) == (2, "")
    assert "step-000005.parquet: not the file that was recorded" in ended.err


@pytest.mark.parametrize("arguments", [("--step", "0"), ("--step", "x"), ()])
def test_a_step_that_is_no_step_is_a_user_error(
    nano: Path, headrace: Command, arguments: tuple[str, ...]
) -> None:
    assert headrace("replay", nano, *arguments).status == 2


def test_a_directory_without_a_run_is_a_user_error(headrace: Command, tmp_path: Path) -> None:
    ended = headrace("replay", tmp_path, "--step", 1)
    assert ended.status == 2
    assert "holds no run" in ended.err


def test_steps_of_a_learner_on_ranks_are_bit_identical_across_a_change_of_layout(
    lab: Lab, headrace: Command
) -> None:
    run = lab.folder / "ranks"
    layout = ("--set", "learner.parallel.replicas=2", "--set", "num_threads=2")
    short = (*AHEAD, "--set", "num_steps=3", "--set", "checkpoint.every=2")
    ended = lab.train("ranks", *short, *layout).wait()
    assert ended.status == 0, ended.err
    longer = (*AHEAD, "--set", "num_steps=5", "--set", "checkpoint.every=9")
    ended = lab.train("ranks", *longer, "--resume").wait()
    assert ended.status == 0, ended.err
    shutil.rmtree(run / "checkpoints")
    for step in (2, 4):
        ended = headrace("replay", run, "--step", step)
        assert ended.status == 0, ended.out
        assert f"steps 1 to {step} from {lab.folder / 'model'}: bit-identical" in ended.out


def test_steps_of_a_learner_that_died_and_came_back_are_on_record_once_and_bit_identical(
    lab: Lab, headrace: Command
) -> None:
    run = lab.folder / "revived"
    own = ("--set", "learner.parallel.own_process=true", "--set", "faults.backoff_seconds=0.01")
    running = lab.train("revived", *AHEAD, *own)
    assert running.wait_until(lambda: num_recorded(run) >= 4)
    below = psutil.Process(running.process.pid).children(recursive=True)
    for process in below:
        if "headrace.learners.parallel.rank" in process.cmdline():
            process.kill()
    ended = running.wait()
    assert ended.status == 0, ended.err
    assert '"learner_restart"' in (run / "events.jsonl").read_text("utf-8")
    assert list(read_records(run)) == list(range(1, NUM_STEPS + 1))
    assert num_recorded(run) == NUM_STEPS
    ended = headrace("replay", run, "--step", 5)
    assert ended.status == 0, ended.out
    assert "steps 4 to 5 from step-000003: bit-identical" in ended.out
