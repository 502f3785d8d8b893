"""The command, with vLLM as its generator."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.generators.vllm.processes import ProcessTree, is_running

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


@pytest.mark.slow
def test_the_engine_of_a_run_that_is_killed_ends_too(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with subprocess.Popen(command(output, num_steps=100_000)) as run:
        while not steps_of(output):
            assert run.poll() is None
            time.sleep(0.2)
        tree = ProcessTree.below([run.pid])
        assert len(tree.pids) > 2
        run.kill()
    while any(is_running(pid) for pid in tree.pids):
        time.sleep(0.2)
    while any(path.exists() for path in tree.segments):
        time.sleep(0.2)
