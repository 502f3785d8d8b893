"""`bench verify`: what verdicts cost and what is paid for nothing, one part a file."""

from __future__ import annotations

from headrace.bench import verify_math, verify_peers, verify_remote, verify_sandbox
from headrace.bench.result import Benchmark, all_of

PARTS = {
    "sandbox": verify_sandbox.measure,
    "remote": verify_remote.measure,
    "math": verify_math.measure,
    "peers": verify_peers.measure,
}

BENCHMARK = Benchmark(
    name="verify",
    summary="executions and verdicts a second, attacks and forgeries, beside other graders",
    measure=all_of(tuple(PARTS.values())),
    parts=PARTS,
    peers=(verify_math.PEER, *verify_peers.PEERS),
)
