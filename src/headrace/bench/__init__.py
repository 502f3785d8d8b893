"""Measurements, one file per name; each says in its docstring what is measured and what is not.

Nothing heavy is imported before a measurement begins: the reward of `step` lives in this package
and is imported by every process that scores with it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from headrace.bench import (
    asynchronous,
    chaos,
    generate,
    int8,
    learn,
    memory,
    mismatch,
    quickstart,
    smollm2,
    startup,
    step,
    verify,
    vllm_peer,
)
from headrace.bench.result import (
    PEER_PACKAGES,
    Benchmark,
    BenchResult,
    Measure,
    Progress,
    all_of,
    describe_machine,
    installed_versions,
    num_usable_cpus,
)
from headrace.errors import ConfigError

__all__ = ["BENCHMARKS", "BenchResult", "Benchmark", "Progress", "run_benchmark"]

BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        quickstart.BENCHMARK,
        smollm2.BENCHMARK,
        step.BENCHMARK,
        verify.BENCHMARK,
        asynchronous.BENCHMARK,
        learn.BENCHMARK,
        mismatch.BENCHMARK,
        generate.BENCHMARK,
        int8.BENCHMARK,
        startup.BENCHMARK,
        memory.BENCHMARK,
        chaos.BENCHMARK,
    )
}

_BUSY_SHARE = 0.25
"""Load for each core above which a measurement is not of this program alone."""


def run_benchmark(
    name: str, against: str | None, progress: Progress, *, parts: str | None = None
) -> BenchResult:
    """Measure ``name``, beside the peers that ``against`` lists with commas between, if given.

    ``parts``, listed in the same way, measures these alone. Raises ConfigError for an unknown
    name, part or peer, UserError when something must be brought first, and RunError when what is
    measured fails.
    """
    benchmark = _benchmark(name)
    peers = tuple(dict.fromkeys(against.split(","))) if against is not None else ()
    for peer in peers:
        if peer not in benchmark.peers:
            raise ConfigError(_unknown_peer(benchmark, peer))
    measure = _measure(benchmark, parts)
    machine = describe_machine()
    if os.getloadavg()[0] > _BUSY_SHARE * num_usable_cpus():
        progress(
            f"note: other work is running (load average {os.getloadavg()[0]:.1f}): these figures "
            "are of a busy machine"
        )
    figures = measure(peers, progress)
    packages = [PEER_PACKAGES.get(peer, peer) for peer in peers]
    versions = installed_versions(package for package in packages if package is not None)
    if "vllm" in peers:
        versions["vllm"] = vllm_peer.vllm_version()
    return BenchResult(name=name, machine=machine, versions=versions, figures=figures)


def _benchmark(name: str) -> Benchmark:
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    close = difflib.get_close_matches(name, BENCHMARKS, n=1, cutoff=0.4)
    meant = f"did you mean {close[0]}? " if close else ""
    msg = f"bench {name}: no such measurement; {meant}there are {', '.join(BENCHMARKS)}"
    raise ConfigError(msg)


def _measure(benchmark: Benchmark, parts: str | None) -> Measure:
    if parts is None:
        return benchmark.measure
    names = tuple(dict.fromkeys(parts.split(",")))
    for name in names:
        if name not in benchmark.parts:
            listed = ", ".join(benchmark.parts)
            allowed = f"allowed: {listed}" if listed else "it has none; leave --part out"
            msg = f"bench {benchmark.name} --part {name}: no such part; {allowed}"
            raise ConfigError(msg)
    return all_of([benchmark.parts[name] for name in names])


def _unknown_peer(benchmark: Benchmark, against: str) -> str:
    if not benchmark.peers:
        return (
            f"bench {benchmark.name} --against {against}: this one has no peer; leave --against out"
        )
    peers = ", ".join(benchmark.peers)
    return f"bench {benchmark.name} --against {against}: unknown peer; allowed: {peers}"
