"""The part of `bench async` about learning: what staleness does to a policy, corrected and not.

The quickstart five times with the same seed and 16 groups a step: synchronous; up to 1, 4 and 8
updates stale, with the quickstart's objective, whose ratio is to the policy that sampled each token
and is clipped; and up to 8 updates stale with a ratio to the policy of the step's beginning and
nothing that weighs it against who sampled, as if the rollouts were new. `headrace check` refuses
that unless it has weights, so the program takes them out afterwards. ``heldout_*`` are sampled
pass@1 on held-out prompts after the last step, ``heldout_loss_*`` by how much they lie below the
synchronous run, ``staleness_mean_*`` how stale the tokens were that each run was trained on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.bench.async_speed import QUICKSTART
from headrace.bench.command import run_module
from headrace.bench.result import Figures, Peers, Progress
from headrace.monitors import RunHistory, read_run

UNCORRECTED = "uncorrected"
"""Among the settings of a run: without the objective's correction."""

SAMPLED = "eval/sampled/pass_at_1"

WORKLOAD = (
    "num_steps=200",
    "groups_per_step=16",
    # A run that is ruined goes on to its end.
    "learner.max_no_signal_steps=1000",
    "learner.max_nonfinite_steps=1000",
    "eval.every=200",
    "eval.greedy=false",
    "checkpoint.every=1000",
    "monitors.rollouts_every=0",
    "monitors.record=none",
    "monitors.console=false",
)
STALEST = 8


def stale(bound: int) -> Sequence[str]:
    """Return the settings of an asynchronous run whose tokens are at most ``bound`` updates old."""
    return (f"max_staleness={bound}", "generator.on_update=keep")


RUNS: Mapping[str, Sequence[str]] = {
    "sync": (),
    **{f"stale_{bound}": stale(bound) for bound in (1, 4, STALEST)},
    "uncorrected": (
        *stale(STALEST),
        "objective.proximal=recompute",
        "objective.correction=tis",
        UNCORRECTED,
    ),
}


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Train them all and compare them."""
    runs: dict[str, RunHistory] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        for name, settings in RUNS.items():
            output = Path(folder) / name
            arguments = [str(QUICKSTART), str(output), "0", *WORKLOAD, *settings]
            run_module("headrace.bench.async_run", arguments, progress=progress)
            runs[name] = read_run(output)
            progress(f"{name}: {runs[name].evaluations[-1].metrics[SAMPLED]:.3f} on held-out sums")
    return figures(runs)


def figures(runs: Mapping[str, RunHistory]) -> Figures:
    """Return the figures of runs by name, the synchronous one among them."""
    found: dict[str, float] = {}
    synchronous = runs["sync"].evaluations[-1].metrics[SAMPLED]
    for name, run in runs.items():
        held_out = run.evaluations[-1].metrics[SAMPLED]
        staleness = [step.metrics.get("learner/staleness/mean", 0.0) for step in run.steps]
        found[f"heldout_{name}"] = held_out
        found[f"staleness_mean_{name}"] = sum(staleness) / len(staleness)
        if name != "sync":
            found[f"heldout_loss_{name}"] = synchronous - held_out
    return found
