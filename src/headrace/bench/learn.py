"""`bench learn`: what the learner's parts cost.

Measured: the peak memory of the log-probs of 8 x 1024 tokens at a vocabulary of 49152 and their
gradients, in fp32 on the processor, computed tile by tile as the learner does, over that of the
version that holds all logits: each in a process of its own, the resident memory at its highest less
that before, with the inputs. Not measured: the rest of a step, which `bench step` has.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from headrace.bench.command import run_module
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.errors import ConfigError

_CLEAR_REFS = Path("/proc/self/clear_refs")


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Measure both versions. Raises ConfigError off Linux."""
    if not _CLEAR_REFS.exists():
        msg = f"bench learn: resets a peak through {_CLEAR_REFS}, which only Linux has; use Linux"
        raise ConfigError(msg)
    tiled, full = (_peak_mib(kind, progress) for kind in ("tiled", "full"))
    return {
        "chunked_logprob_peak_mb": tiled,
        "full_logprob_peak_mb": full,
        "chunked_logprob_memory_share": tiled / full,
    }


def _peak_mib(kind: str, progress: Progress) -> float:
    progress(f"log-probs of 8 x 1024 tokens: {kind}")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        result = Path(folder) / "peak"
        run_module("headrace.bench.learn_peak", [kind, str(result)], progress=progress)
        return float(result.read_text(encoding="utf-8"))


BENCHMARK = Benchmark(
    name="learn",
    summary="the memory of the learner's log-probs against that of whole logits",
    measure=measure,
)
