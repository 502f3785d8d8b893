"""`bench smollm2`: what a real small model learns from the recipe `smollm2-arithmetic`.

Measured: held-out greedy pass@1 before the first and after the last step, the seconds of the RL
steps, and the seconds of the whole command: loading, evaluation, checkpoints and report included.
Not measured: bringing the model, which `headrace fetch smollm2-135m` does before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.bench.command import run_headrace
from headrace.bench.quickstart import GREEDY
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.models.catalogue import resolve_model
from headrace.monitors import summarise

MODEL = "smollm2-135m"
RECIPE = "smollm2-arithmetic"


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Train once. Raises ModelError when the model was not fetched."""
    resolve_model(MODEL)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        output = Path(folder) / "run"
        seconds = run_headrace(["train", RECIPE, "--output", str(output)], progress=progress)
        return figures(summarise(output), seconds)


def figures(summary: Mapping[str, Any], total_seconds: float) -> Figures:
    """Return the figures of a run given by `headrace.monitors.summarise`."""
    greedy = summary["held_out"][GREEDY]
    return {
        "heldout_greedy_first": greedy["first"],
        "heldout_greedy_last": greedy["last"],
        "rise": greedy["last"] - greedy["first"],
        "rl_seconds": summary["rl_seconds"],
        "total_seconds": total_seconds,
    }


BENCHMARK = Benchmark(
    name="smollm2",
    summary="what SmolLM2-135M learns from the recipe smollm2-arithmetic, and how fast",
    measure=measure,
)
