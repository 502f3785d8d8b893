"""A run whose policy is paid for programs: from rows with tests to verdicts on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import Command, Lab

from headrace.config import SandboxConfig
from headrace.errors import ConfigError
from headrace.monitors.rollouts import read_rollouts
from headrace.types import Outcome
from headrace.verifiers.sandbox.tiers import choose_tier

RECIPE = """
name = "programs"
num_steps = 1
groups_per_step = 2
group_size = 4
num_threads = 1

[model]
path = "{model}"

[data]
template = "raw"
user_template = "{{prompt}}"

[data.train]
type = "jsonl"
path = "rows.jsonl"

[sampling]
max_tokens = 3

[verifier.components.runs]
kind = "code"
extract = "whole"
require_stop = false

[verifier.sandbox]
num_cells = 1

[objective]
advantage = "dr_grpo"
"""


@pytest.fixture
def recipe(lab: Lab, tmp_path: Path) -> Path:
    """Pays for completions that Python can run: an expression of digits and signs."""
    rows = [{"prompt": f"{n}+", "tests": [{"input": "", "output": ""}]} for n in range(1, 5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    path = tmp_path / "programs.toml"
    path.write_text(RECIPE.format(model=lab.folder / "model"), encoding="utf-8")
    return path


def test_a_policy_is_paid_for_programs_that_run(
    recipe: Path, tmp_path: Path, headrace: Command
) -> None:
    try:
        tier = choose_tier(SandboxConfig())
    except ConfigError as error:
        pytest.skip(f"no tier of the sandbox works here: {error}")
    ended = headrace("train", recipe, "--output", tmp_path / "run")
    assert ended.status == 0, ended.err
    groups = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    verdicts = [verdict for group in groups for verdict in group.verdicts or ()]
    assert len(verdicts) == 8
    assert {verdict.outcome for verdict in verdicts} <= {
        Outcome.PASS,
        Outcome.RUNTIME,
        Outcome.WRONG,
    }
    ran = [verdict for verdict in verdicts if "tests passed" in verdict.detail]
    assert ran, [verdict.detail for verdict in verdicts]
    assert all(verdict.detail.endswith(f"[{tier.value}]") for verdict in ran)


def test_rows_that_cannot_be_graded_stop_the_run_before_it_begins(
    recipe: Path, headrace: Command
) -> None:
    with (recipe.parent / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": "5+", "tests": []}\n')
    ended = headrace("check", recipe)
    assert ended.status == 2
    assert "line 5: its tests cannot be used (runs: no test at all)" in ended.err
