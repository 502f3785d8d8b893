"""`bench int8`: what generation in eight bits costs in learning, and what correcting gives back.

Measured: the recipe `smollm2-arithmetic` three times, with one seed: as it is; with matrices in
eight bits and truncated importance weights (`tis`); with eight bits and no weights. Of each the
held-out pass@1, greedy and sampled, before the first and after the last step; of the first two the
difference of the last ones. More held-out problems and rollouts than the recipe has, since a few
points are looked for. Not measured: speed, which `bench generate` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.bench.command import run_headrace
from headrace.bench.quickstart import GREEDY, SAMPLED
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.bench.smollm2 import MODEL, RECIPE
from headrace.models.catalogue import resolve_model
from headrace.monitors import summarise

EVALUATION = ("data.eval.size=600", "eval.every=40", "eval.num_rollouts=8")

_INT8 = ("generator.dtype=int8", "objective.proximal=recompute")
KINDS: Mapping[str, tuple[str, ...]] = {
    "as_is": (),
    "int8_tis": (*_INT8, "objective.correction=tis"),
    "int8_uncorrected": _INT8,
}


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Train three times. Raises ModelError when the model was not fetched."""
    resolve_model(MODEL)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        for kind, settings in KINDS.items():
            output = Path(folder) / kind
            changes = [part for value in (*settings, *EVALUATION) for part in ("--set", value)]
            progress(f"{RECIPE}: {kind}")
            run_headrace(["train", RECIPE, *changes, "--output", str(output)], progress=progress)
            found |= figures(kind, summarise(output))
    for mode in ("greedy", "sampled"):
        found[f"int8_tis_{mode}_difference"] = (
            found[f"int8_tis_{mode}_last"] - found[f"as_is_{mode}_last"]
        )
    return found


def figures(kind: str, summary: Mapping[str, Any]) -> Figures:
    """Return the figures of one run given by `headrace.monitors.summarise`."""
    held_out = summary["held_out"]
    return {
        f"{kind}_{mode}_{moment}": held_out[metric][moment]
        for mode, metric in (("greedy", GREEDY), ("sampled", SAMPLED))
        for moment in ("first", "last")
    }


BENCHMARK = Benchmark(
    name="int8",
    summary="what SmolLM2-135M learns when it generates in eight bits, with and without correction",
    measure=measure,
)
