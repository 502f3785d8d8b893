"""`bench verify`: what verdicts cost and what is paid for nothing, one part a file."""

from __future__ import annotations

from headrace.bench import verify_math, verify_peers, verify_remote, verify_sandbox
from headrace.bench.result import Benchmark, Figures, Peers, Progress

_PARTS = (
    verify_sandbox.measure,
    verify_remote.measure,
    verify_math.measure,
    verify_peers.measure,
)


def measure(peers: Peers, progress: Progress) -> Figures:
    """Measure every part, one after the other."""
    figures: dict[str, float] = {}
    for part in _PARTS:
        figures |= part(peers, progress)
    return figures


BENCHMARK = Benchmark(
    name="verify",
    summary="executions and verdicts a second, attacks and forgeries, beside other graders",
    measure=measure,
    peers=(verify_math.PEER, *verify_peers.PEERS),
)
