"""`bench chaos`: does a run survive whatever is killed in it, with nobody's help?

Measured: of so many runs, each with three processes of random roles killed at random moments, how
many broke a promise: see `chaos_run`. What a run learns is compared with runs that nothing happened
to. Not measured: how much time a kill costs. How many runs, and from which seed on, environment
variables say.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.bench.chaos_run import ChaosReport, run_under_chaos
from headrace.bench.chaos_task import Task
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.errors import ConfigError, RunError

RUNS_VARIABLE, SEED_VARIABLE = "HEADRACE_CHAOS_RUNS", "HEADRACE_CHAOS_SEED"
_RUNS = 50
_NUM_UNDISTURBED = 2
TOLERANCE = 0.1
"""Largest difference of held-out accuracy from the nearest undisturbed run."""
_LIMIT_SECONDS = 900.0

TASK = Task(
    num_prompts=96,
    num_epochs=2,
    groups_per_step=8,
    group_size=8,
    max_staleness=2,
    checkpoint_every=4,
    num_heldout=128,
)


def seeds(default_runs: int, environ: Mapping[str, str] = os.environ) -> range:
    """Return the seeds of the runs that are asked for. Raises ConfigError."""
    numbers = []
    for name, default, least in ((SEED_VARIABLE, 0, 0), (RUNS_VARIABLE, default_runs, 1)):
        text = environ.get(name, str(default))
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            msg = f"{name} = {text!r}: give a whole number, at least {least}"
            raise ConfigError(msg)
        numbers.append(int(text))
    first, count = numbers
    return range(first, first + count)


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Run undisturbed, then under chaos, and count what failed."""
    wanted = seeds(_RUNS)
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-chaos-"))
    undisturbed = [
        _report(folder / f"undisturbed-{number}", None, progress)
        for number in range(_NUM_UNDISTURBED)
    ]
    if problems := [problem for report in undisturbed for problem in report.problems]:
        msg = f"a run that nothing happened to broke a promise: {problems}; see {folder}"
        raise RunError(msg)
    reports = []
    for seed in wanted:
        report = judged(_report(folder / f"seed-{seed}", seed, progress), undisturbed)
        for problem in report.problems:
            progress(f"seed {seed} FAILED: {problem}")
        reports.append(report)
    if any(report.problems for report in reports):
        progress(f"what failed is kept in {folder}")
    else:
        shutil.rmtree(folder)
    return figures(undisturbed, reports)


def judged(report: ChaosReport, undisturbed: Sequence[ChaosReport]) -> ChaosReport:
    """Return ``report`` with one problem more where it learned something else than others."""
    if report.problems or report.accuracy is None:
        return report
    expected = [other.accuracy for other in undisturbed if other.accuracy is not None]
    if min(abs(report.accuracy - accuracy) for accuracy in expected) <= TOLERANCE:
        return report
    problem = f"held-out accuracy {report.accuracy:.3f}, undisturbed {expected}"
    return replace(report, problems=(problem,))


def figures(undisturbed: Sequence[ChaosReport], reports: Sequence[ChaosReport]) -> Figures:
    """Return the counts, over all runs and by the role of what was killed."""
    kills = Counter(kill.role for report in reports for kill in report.kills)
    before = [report.accuracy for report in undisturbed if report.accuracy is not None]
    after = [report.accuracy for report in reports if report.accuracy is not None]
    found = {
        "chaos_runs": float(len(reports)),
        "chaos_failures": float(sum(bool(report.problems) for report in reports)),
        "chaos_kills": float(kills.total()),
        **{f"chaos_kills_{role}": float(count) for role, count in sorted(kills.items())},
        "undisturbed_accuracy_min": min(before),
        "undisturbed_accuracy_max": max(before),
    }
    if after:
        found |= {"chaos_accuracy_min": min(after), "chaos_accuracy_max": max(after)}
    return found


def _report(folder: Path, seed: int | None, progress: Progress) -> ChaosReport:
    report = run_under_chaos(TASK, folder, seed=seed, limit_seconds=_LIMIT_SECONDS)
    kills = ", ".join(f"{kill.role} at step {kill.step}" for kill in report.kills) or "nothing"
    name = "undisturbed" if seed is None else f"seed {seed}"
    accuracy = "?" if report.accuracy is None else f"{report.accuracy:.3f}"
    progress(f"{name}: killed {kills}; {report.seconds:.0f} s, held-out accuracy {accuracy}")
    return report


BENCHMARK = Benchmark(
    name="chaos",
    summary="runs in which random processes are killed: how many broke a promise",
    measure=measure,
)
