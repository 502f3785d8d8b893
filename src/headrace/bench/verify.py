"""`bench verify`: what verdicts cost, one part a file; each part says what it measures."""

from __future__ import annotations

from headrace.bench import verify_math
from headrace.bench.result import Benchmark, Figures, Peers, Progress

_PARTS = (verify_math.measure,)


def measure(peers: Peers, progress: Progress) -> Figures:
    """Measure every part, one after the other."""
    figures: dict[str, float] = {}
    for part in _PARTS:
        figures |= part(peers, progress)
    return figures


BENCHMARK = Benchmark(
    name="verify",
    summary="verdicts a second on math answers, beside math-verify",
    measure=measure,
    peers=(verify_math.PEER,),
)
