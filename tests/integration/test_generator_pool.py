"""Generators in processes of their own, in real runs: what they sample, and what becomes of deaths.

Victims are children of the run under test, so nothing else on the machine is touched.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from lab import PATIENCE_SECONDS, Command, Lab, Running

pytestmark = pytest.mark.slow

SLOW = """
import time

def share_of_ones(prompt, completion, answer, metadata):
    time.sleep(0.02)
    return completion.count("1") / max(len(completion), 1)
"""
MODEL = "hf/model.safetensors"
QUICKLY = ("--set", "placement.hang_seconds=8", "--set", "placement.backoff_seconds=0")


def pool_of(count: int) -> tuple[str, ...]:
    return (
        *("--set", 'placement.generators="disaggregated"'),
        *("--set", "placement.threads_per_generator=1"),
        *("--set", f"placement.num_generators={count}"),
    )


@pytest.fixture
def slow_lab(own_lab: Lab) -> Lab:
    """Its runs take long enough for something to happen to them."""
    (own_lab.folder / "reward.py").write_text(SLOW, encoding="utf-8")
    return own_lab


def members(run: Running) -> list[psutil.Process]:
    """The processes of generators, the eldest first."""
    found = []
    for child in psutil.Process(run.process.pid).children(recursive=True):
        try:
            if "headrace.generators.pool.hosted" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda child: child.pid)


def all_gone(processes: Iterable[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(list(processes), timeout=PATIENCE_SECONDS)
    return not alive


def steps(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    # The last line may be being written.
    lines = map(json.loads, text.splitlines()[: text.count("\n")])
    return [line for line in lines if line["kind"] == "step"]


def events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def member_counts(run: Path) -> set[float]:
    return {step["metrics"]["generator/pool/num_members"] for step in steps(run)}


def total(run: Path, name: str) -> float:
    return sum(step["metrics"][f"generator/pool/{name}"] for step in steps(run))


def succeed(running: Running) -> None:
    ended = running.wait()
    assert ended.status == 0, ended.err


def check_equal(run: Path, other: Path) -> None:
    """Same rollouts, rewards and weights, bit for bit."""
    assert (run / "checkpoints/step-000008" / MODEL).read_bytes() == (
        other / "checkpoints/step-000008" / MODEL
    ).read_bytes()
    assert rollouts(run) == rollouts(other)


def rollouts(run: Path) -> dict[str, Any]:
    files = sorted(run.glob("rollouts/*.parquet"))
    return {path.name: pq.read_table(path).to_pydict() for path in files}


def test_one_generator_in_its_own_process_samples_what_it_would_in_the_learners(
    lab: Lab, finished: Path
) -> None:
    run = lab.folder / "pool-of-1"
    succeed(lab.train(run.name, *pool_of(1)))
    check_equal(run, finished)
    assert steps(run)[-1]["metrics"]["generator/pool/num_members"] == 1
    assert total(run, "num_restarts") == 0


def test_the_quickstart_learns_the_same_from_one_generator_and_from_three(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    shorter = {"num_steps": 2, "groups_per_step": 3, "group_size": 4, "num_threads": 1}
    settings = [f"{key}={value}" for key, value in shorter.items()] + ["data.eval=null"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    running = [
        lab.start("train", "quickstart", "--output", tmp_path / name, *arguments, *placement)
        for name, placement in (("one", ()), ("three", pool_of(3)))
    ]
    for run in running:
        succeed(run)
    one, three = tmp_path / "one", tmp_path / "three"
    last = Path("checkpoints/step-000002") / MODEL
    assert (one / last).read_bytes() == (three / last).read_bytes()
    assert rollouts(one) == rollouts(three)


@pytest.mark.parametrize(
    ("how", "cause"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "gave no sign of life")],
)
def test_a_generator_that_dies_or_hangs_changes_nothing_of_what_is_learned_and_is_on_record(
    slow_lab: Lab, finished: Path, how: signal.Signals, cause: str
) -> None:
    run = slow_lab.folder / "hurt"
    running = slow_lab.train("hurt", *pool_of(2), *QUICKLY)
    assert running.wait_until(lambda: len(steps(run)) >= 1)
    victim = members(running)[0]
    victim.send_signal(how)
    succeed(running)
    assert all_gone([victim])
    check_equal(run, finished)
    losses = [event["fields"] for event in events(run) if event["kind"] == "generator_lost"]
    assert [fields for fields in losses if cause in fields["cause"]]
    assert {"member", "incarnation", "reissued"} <= losses[0].keys()
    assert "generator_lost" in (run / "report.html").read_text(encoding="utf-8")


def test_a_run_whose_generators_all_die_says_what_began_it(slow_lab: Lab) -> None:
    run = slow_lab.folder / "hurt"
    settings = ("--set", "placement.max_restarts=0", *QUICKLY)
    running = slow_lab.train("hurt", *pool_of(1), *settings)
    assert running.wait_until(lambda: len(steps(run)) >= 1)
    (victim,) = members(running)
    victim.kill()
    ended = running.wait()
    assert ended.status == 1
    assert "no generator is left" in ended.err
    assert f"first generator 0: process {victim.pid} was killed by SIGKILL" in ended.err
    assert "Traceback" not in ended.err


def test_generators_end_with_a_run_that_is_killed(slow_lab: Lab) -> None:
    run = slow_lab.folder / "killed"
    running = slow_lab.train("killed", *pool_of(2))
    assert running.wait_until(lambda: len(steps(run)) >= 1 and len(members(running)) == 2)
    orphans = members(running)
    running.process.kill()
    running.wait()
    assert all_gone(orphans)


def test_a_run_grows_and_shrinks_while_it_goes_on_and_learns_the_same(
    slow_lab: Lab, headrace: Command
) -> None:
    run = slow_lab.folder / "scaled"
    settings = (
        *("--set", "num_steps=100000", "--set", "eval.every=100000"),
        # It must not have learned all there is before the others have started.
        *("--set", "learner.optimizer.learning_rate=1e-9"),
    )
    running = slow_lab.train("scaled", *pool_of(1), *settings)
    assert running.wait_until(lambda: len(steps(run)) >= 1)

    grown = headrace("scale", run, "generators=3", "verifiers=2")
    assert grown.status == 0, grown.err
    done = "3 generators, where there were 1; 2 verifiers, where there were 1 (ones)"
    assert grown.out == f"{done}\n"
    assert len(members(running)) == 3
    events = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert done in [event["message"] for event in map(json.loads, events)]
    fewer = headrace("scale", run, "verifiers=1")
    assert fewer.out == "1 verifiers, where there were 2 (ones)\n"
    assert running.wait_until(lambda: 3.0 in member_counts(run))
    shrunk = headrace("scale", run, "generators=1")
    assert shrunk.out == "1 generators, where there were 3\n"
    assert len(members(running)) == 1

    running.process.send_signal(signal.SIGINT)
    succeed(running)
    assert member_counts(run) >= {1.0, 3.0}
    assert total(run, "num_reissued_groups") == 0
    over = headrace("scale", run, "generators=2")
    assert (over.status, "no run is at work" in over.err) == (2, True)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (("generators=0",), "from 1 to 1024"),
        (("generators=many",), "give a role and a whole number"),
        (("generators",), "give a role and a whole number"),
        (("learners=2",), "no role that scales"),
        (("verifiers=0",), "from 1 to 1024"),
        (("generators=2", "verifiers=2"), "no run is at work"),
        (("generators=2", "generators=3"), "name each role once"),
        (("generators=2",), "no run is at work"),
    ],
)
def test_what_cannot_be_scaled_is_refused_with_the_reason(
    finished: Path, headrace: Command, wanted: tuple[str, ...], reason: str
) -> None:
    ended = headrace("scale", finished, *wanted)
    assert ended.status == 2
    assert reason in ended.err


def test_a_run_with_its_generator_in_its_process_does_not_scale(
    slow_lab: Lab, headrace: Command
) -> None:
    run = slow_lab.folder / "run"
    running = slow_lab.train("run")
    assert running.wait_until(lambda: len(steps(run)) >= 1)
    ended = headrace("scale", run, "generators=2")
    assert (ended.status, "placement.generators" in ended.err) == (2, True)
    succeed(running)


def test_an_evaluation_alone_goes_through_the_pool_too(lab: Lab, finished: Path) -> None:
    command = [sys.executable, "-m", "headrace", "eval", lab.recipe, "--json", "--model"]
    model = finished / "checkpoints/step-000008/hf"
    printed = [
        json.loads(subprocess.check_output([*command, model, *settings], cwd=lab.folder))
        for settings in ((), pool_of(2))
    ]
    assert printed[0] == printed[1]
