"""Whatever is killed in a run, it ends by itself, as promised. HEADRACE_CHAOS_SEED draws anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.bench.chaos import seeds
from headrace.bench.chaos_run import ChaosReport, run_under_chaos
from headrace.bench.chaos_task import Task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_SECONDS = 600.0
TOLERANCE = 0.35
"""So few steps and held-out prompts leave much to chance; `bench chaos` measures this."""

TASK = Task(
    num_prompts=32,
    num_epochs=1,
    groups_per_step=4,
    group_size=4,
    max_staleness=2,
    checkpoint_every=2,
    num_heldout=16,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ChaosReport:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return run_under_chaos(TASK, folder, seed=None, limit_seconds=LIMIT_SECONDS)


def test_a_run_that_nothing_happens_to_keeps_every_promise(undisturbed: ChaosReport) -> None:
    assert undisturbed.problems == ()
    assert undisturbed.kills == ()


@pytest.mark.parametrize("seed", seeds(2))
def test_a_run_in_which_three_processes_are_killed_keeps_every_promise(
    seed: int, undisturbed: ChaosReport, tmp_path: Path
) -> None:
    report = run_under_chaos(TASK, tmp_path / "run", seed=seed, limit_seconds=LIMIT_SECONDS)
    assert report.problems == (), report
    assert len(report.kills) == 3
    assert report.accuracy is not None
    assert undisturbed.accuracy is not None
    assert abs(report.accuracy - undisturbed.accuracy) <= TOLERANCE
    shutil.rmtree(tmp_path / "run")
