"""`bench startup`: how long one waits before something happens.

Measured, each as the median of five processes: `headrace train quickstart` from its start to its
first rollouts (imports, checks, data, model, verifier, first weights, generation), and all of
`headrace --help` and `headrace check quickstart`. The held-out evaluation that the recipe begins
with is left out.
Not measured: a cold disk cache, since only the first of the five processes can meet one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from headrace.bench.command import run_headrace
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.errors import RunError
from headrace.monitors import RunHistory, read_run

NUM_PROCESSES = 5


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Start each command five times and return the medians, in seconds."""
    return {
        "first_rollout_seconds": _median(_seconds_to_first_rollout, "first rollout", progress),
        "help_seconds": _median(_command("--help"), "--help", progress),
        "check_seconds": _median(_command("check", "quickstart"), "check", progress),
    }


def _median(once: Callable[[], float], what: str, progress: Progress) -> float:
    seconds = []
    for number in range(1, NUM_PROCESSES + 1):
        seconds.append(once())
        progress(f"{what} {number} of {NUM_PROCESSES}: {seconds[-1]:.2f} s")
    return median(seconds)


def _command(*arguments: str) -> Callable[[], float]:
    return lambda: run_headrace(arguments, progress=_say_nothing)


def _seconds_to_first_rollout() -> float:
    settings = ("--set", "data.eval=null", "--set", "num_steps=1")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        output = Path(folder) / "run"
        # Wall clock, because the other end is written by another process.
        began = time.time()
        run_headrace(
            ["train", "quickstart", *settings, "--output", str(output)], progress=_say_nothing
        )
        return first_rollout_time(read_run(output)) - began


def first_rollout_time(run: RunHistory) -> float:
    """Return the Unix seconds of a run's first rollouts. Raises RunError if there were none."""
    for event in run.events:
        if event.kind == "first_rollout":
            return event.time
    msg = f"{run.directory}: events.jsonl has no first_rollout, so no rollout ever arrived"
    raise RunError(msg)


def _say_nothing(_line: str) -> None:
    """What a command prints is of no interest here; its failure carries the last lines."""


BENCHMARK = Benchmark(
    name="startup",
    summary="seconds to the first rollout of the nano model, to --help and to check",
    measure=measure,
)
