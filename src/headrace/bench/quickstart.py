"""`bench quickstart`: does the shipped recipe learn, on three seeds, in time?

Measured: held-out pass@1 before the first and after the last step, the seconds of the RL steps, and
rollouts a second. Not in ``rl_seconds``: loading, held-out evaluation, checkpoints, the report.
Each seed is a process of its own, started as a user would.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.command import run_headrace
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.monitors import summarise

SEEDS = (0, 1, 2)

GREEDY, SAMPLED = "eval/greedy/pass_at_1", "eval/sampled/pass_at_1"

_HIGHEST_START, _LOWEST_END, _LONGEST_SECONDS = 0.45, 0.90, 180.0


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Train every seed and return the worst of each figure."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        return figures([_train(seed, Path(folder), progress) for seed in SEEDS])


def _train(seed: int, folder: Path, progress: Progress) -> dict[str, Any]:
    progress(f"quickstart, seed {seed}")
    output = folder / f"seed-{seed}"
    arguments = ["train", "quickstart", "--set", f"seed={seed}", "--output", str(output)]
    run_headrace(arguments, progress=progress)
    return summarise(output)


def figures(summaries: Sequence[Mapping[str, Any]]) -> Figures:
    """Return the figures of runs given by `headrace.monitors.summarise`, the worst of each."""

    def held_out(metric: str, which: str) -> list[float]:
        return [summary["held_out"][metric][which] for summary in summaries]

    return {
        "heldout_greedy_first_max": max(held_out(GREEDY, "first")),
        "heldout_greedy_last_min": min(held_out(GREEDY, "last")),
        "heldout_sampled_first_max": max(held_out(SAMPLED, "first")),
        "heldout_sampled_last_min": min(held_out(SAMPLED, "last")),
        "rl_seconds_max": max(summary["rl_seconds"] for summary in summaries),
        "rollouts_per_second_min": min(summary["rollouts_per_second"] for summary in summaries),
        "num_seeds_reached": sum(_reached(summary) for summary in summaries),
    }


def _reached(summary: Mapping[str, Any]) -> bool:
    greedy = summary["held_out"][GREEDY]
    return bool(
        greedy["first"] <= _HIGHEST_START
        and greedy["last"] >= _LOWEST_END
        and summary["rl_seconds"] <= _LONGEST_SECONDS
    )


BENCHMARK = Benchmark(
    name="quickstart",
    summary="what the shipped recipe learns, and how fast, on three seeds",
    measure=measure,
)
