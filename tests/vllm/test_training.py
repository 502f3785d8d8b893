"""The command, with vLLM as its generator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.generators.vllm.processes import FOLDER_PREFIX, ProcessTree, is_running

SETTINGS = {
    "generator.engine": "vllm",
    "generator.max_cache_gib": 0.1,
    "num_steps": 2,
    "num_threads": 1,
    "groups_per_step": 4,
    "group_size": 4,
    "data.eval.limit": 8,
    "eval.num_rollouts": 1,
    "eval.pass_at_k": [1],
}


def command(output: Path, **changes: object) -> list[str]:
    settings = SETTINGS | changes
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    train = [sys.executable, "-m", "headrace", "train", "quickstart", *overrides]
    return [*train, "--output", str(output)]


def steps_of(output: Path) -> list[str]:
    path = output / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [line for line in lines if "learner/" in line]


@pytest.mark.slow
def test_two_steps_of_the_quickstart_train_on_what_vllm_sampled(tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = subprocess.run(command(output), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(steps_of(output)) == 2
    assert "generator/cache/found_share" in steps_of(output)[-1]
    assert (output / "report.html").is_file()


DEADLINE_SECONDS = 600.0
"""Far beyond what anything here takes; a test that hangs says where."""


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def own_folder(pid: int) -> Iterator[Path]:
    """The folder for temporary files that a process of the engine was given."""
    for variable in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
        if variable.startswith("TMPDIR=") and FOLDER_PREFIX in variable:
            yield Path(variable.removeprefix("TMPDIR="))


@contextmanager
def long_run(output: Path) -> Iterator[tuple[subprocess.Popen[str], ProcessTree]]:
    """A run in a process group of its own, with one step behind it; killed with all it started."""
    train = command(output, num_steps=100_000)
    pipe = subprocess.PIPE
    with subprocess.Popen(train, start_new_session=True, stderr=pipe, text=True) as run:
        try:
            wait_until(lambda: bool(steps_of(output)) or run.poll() is not None, "a first step")
            assert run.poll() is None
            tree = ProcessTree.below([run.pid])
            assert len(tree.pids) > 2
            yield run, tree
        finally:
            ProcessTree.below([run.pid]).end(timeout_seconds=30.0)


@pytest.mark.slow
def test_the_engine_of_a_run_that_is_killed_ends_too(tmp_path: Path) -> None:
    with long_run(tmp_path / "run") as (run, tree):
        folders = {folder for pid in tree.pids for folder in own_folder(pid)}
        assert len(folders) == 1
        run.kill()
        wait_until(lambda: not any(map(is_running, tree.pids)), "the end of every process")
        wait_until(lambda: not any(path.exists() for path in tree.segments), "no segment left")
        wait_until(lambda: not any(path.exists() for path in folders), "no folder left")


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_with_the_engine_that_it_began_with(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with long_run(output) as (run, _):
        os.killpg(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=DEADLINE_SECONDS)
    assert "finishing the step" in said
    assert "engine died" not in said
    assert run.returncode == 0, said
    metrics = [json.loads(line)["metrics"] for line in steps_of(output)]
    assert [step["generator/engine/num_restarts"] for step in metrics] == [0.0] * len(metrics)
