"""The part of `bench async` about speed: one workload, synchronous, tail-aware and asynchronous.

The nano model on the quickstart's sums, 16 groups of 16 a step, with the quickstart's objective in
every run, while verdicts take 50 to 500 ms (`async_run`): 16 groups wait for the slowest of them.
Each run is a process of its own with all cores of the machine:

    sync        both phases with all cores, one after the other
    tail_aware  the same, but more groups are drawn and the slowest are given up; of several
                numbers of surplus groups the fastest counts
    async       generator and learner divide the cores, four batches under way at most

``*_rollouts_per_second`` are rollouts trained on; ``async_speedup_vs_*`` are ratios of them.
``learner_idle_share``: the part of the asynchronous run in which the learner updates nothing,
publication included. The first steps, in which kernels are compiled and queues fill, are left out,
and so are evaluation, checkpoints and files of rollouts, which no run has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.bench.command import run_module
from headrace.bench.result import Figures, Peers, Progress
from headrace.monitors import RunHistory, read_run

QUICKSTART = Path(headrace.__file__).parent / "recipes" / "quickstart.toml"

NUM_STEPS = 48
NUM_WARM_UP = 8
SURPLUS_GROUPS = (4, 8, 12)
LONGEST_SECONDS = "0.5"
"""That verdicts take."""

WORKLOAD = (
    "groups_per_step=16",
    "group_size=16",
    "eval.every=1000000",
    "data.eval.limit=1",
    "eval.num_rollouts=0",
    "checkpoint.every=1000000",
    "monitors.rollouts_every=0",
    "monitors.record=none",
    "monitors.console=false",
)
ASYNCHRONOUS = ("max_staleness=3", "generator.on_update=keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one run, in its steady state."""

    rollouts_per_second: float
    learner_busy_share: float
    mean_staleness: float


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Run every way and compare them."""
    sync = run_at("sync", (), progress)
    aware = max(
        (run_at(f"tail_aware_{n}", tail_aware(n), progress) for n in SURPLUS_GROUPS),
        key=lambda speed: speed.rollouts_per_second,
    )
    asynchronous = run_at("async", ASYNCHRONOUS, progress)
    return figures(sync, aware, asynchronous)


def figures(sync: Speed, tail_aware: Speed, asynchronous: Speed) -> Figures:
    """Return the figures of three runs."""
    rate = asynchronous.rollouts_per_second
    return {
        "sync_rollouts_per_second": sync.rollouts_per_second,
        "tail_aware_sync_rollouts_per_second": tail_aware.rollouts_per_second,
        "async_rollouts_per_second": rate,
        "async_speedup_vs_sync": rate / sync.rollouts_per_second,
        "async_speedup_vs_tail_aware_sync": rate / tail_aware.rollouts_per_second,
        "learner_idle_share": 1.0 - asynchronous.learner_busy_share,
        "async_mean_staleness": asynchronous.mean_staleness,
    }


def tail_aware(surplus: int) -> Sequence[str]:
    """Return the settings of a synchronous run that gives up the slowest of ``surplus`` more."""
    return ("pipeline.late=cancel", f"pipeline.surplus_groups={surplus}")


def run_at(name: str, settings: Sequence[str], progress: Progress) -> Speed:
    """Train once with ``settings`` and return how fast."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        output = Path(folder) / name
        overrides = [f"num_steps={NUM_STEPS}", *WORKLOAD, *settings]
        arguments = [str(QUICKSTART), str(output), LONGEST_SECONDS, *overrides]
        run_module("headrace.bench.async_run", arguments, progress=progress)
        speed = speed_of(read_run(output), NUM_WARM_UP)
    progress(
        f"{name}: {speed.rollouts_per_second:.0f} rollouts a second, learner busy "
        f"{speed.learner_busy_share:.0%}"
    )
    return speed


def speed_of(run: RunHistory, num_warm_up: int) -> Speed:
    """Return the speed of a run after its first ``num_warm_up`` steps."""
    first, *steady = run.steps[num_warm_up - 1 :]
    seconds = steady[-1].time - first.time

    def total(metric: str) -> float:
        return sum(step.metrics.get(metric, 0.0) for step in steady)

    trained = total("verifier/rollouts/num_scored") + total("verifier/rollouts/num_failed")
    return Speed(
        rollouts_per_second=trained / seconds,
        learner_busy_share=total("controller/time/update_seconds") / seconds,
        mean_staleness=total("learner/staleness/mean") / len(steady),
    )
