"""`bench async`: what running asynchronously costs, gains and guarantees, one part a file.

``learning`` trains three models for some minutes and is measured only where ``--part`` asks for it.
"""

from __future__ import annotations

from headrace.bench import (
    async_control,
    async_learning,
    async_speed,
    async_staleness,
)
from headrace.bench.result import Benchmark, Figures, Peers, Progress, all_of


def _weights(peers: Peers, progress: Progress) -> Figures:
    # It needs torch, which a process that only scores by a reward of this package must not import.
    from headrace.bench import async_weights

    return async_weights.measure(peers, progress)


PARTS = {
    "control": async_control.measure,
    "staleness": async_staleness.measure,
    "speed": async_speed.measure,
    "weights": _weights,
}

BENCHMARK = Benchmark(
    name="async",
    summary="asynchronous beside synchronous steps, staleness, weights, and what control costs",
    measure=all_of(tuple(PARTS.values())),
    parts={**PARTS, "learning": async_learning.measure},
)
