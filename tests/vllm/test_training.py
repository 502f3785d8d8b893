"""The command, with vLLM as its generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_two_steps_of_the_quickstart_train_on_what_vllm_sampled(tmp_path: Path) -> None:
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    command = [sys.executable, "-m", "headrace", "train", "quickstart", *overrides]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [line for line in lines if "learner/importance_ratio/max" in str(line)]
    assert len(steps) >= 2
    assert (tmp_path / "run" / "report.html").is_file()
