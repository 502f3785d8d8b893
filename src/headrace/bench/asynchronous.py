"""`bench async`: what running asynchronously costs, gains and guarantees, one part a file.

``learning`` trains three models for some minutes and is measured only where ``--part`` asks for it.
"""

from __future__ import annotations

from headrace.bench import (
    async_control,
    async_learning,
    async_speed,
    async_staleness,
    async_weights,
)
from headrace.bench.result import Benchmark, all_of

PARTS = {
    "control": async_control.measure,
    "staleness": async_staleness.measure,
    "speed": async_speed.measure,
    "weights": async_weights.measure,
}

BENCHMARK = Benchmark(
    name="async",
    summary="asynchronous beside synchronous steps, staleness, weights, and what control costs",
    measure=all_of(tuple(PARTS.values())),
    parts={**PARTS, "learning": async_learning.measure},
)
