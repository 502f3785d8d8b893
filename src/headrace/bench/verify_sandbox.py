"""The part of `bench verify` about isolation: what an execution costs, and what attacks get.

Measured in the cell tier with two cells. The rate is of ``print(1)``, many calls side by side, and
beside it two threads that do nothing but start ``python3 -I -S`` for the same program, without any
isolation. The latency is of one call at a time. Attacks are those of `verify_attacks`, one after
the other in two cells, each after a program that holds a secret: a verdict is forged, and
something has leaked, where an attack's output has that secret in it. At the end the processes and
files that are left are counted, and the memory that the second half of the attacks took. Starting
cells is measured in the attacks alone, many of which burn theirs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.bench.memory import resident_bytes
from headrace.bench.result import Figures, Peers, Progress
from headrace.bench.verify_attacks import ATTACKS, BREACH, LIMITS, Attack
from headrace.config import SandboxConfig
from headrace.errors import RunError
from headrace.verifiers.sandbox.execution import Ending, Execution, Job
from headrace.verifiers.sandbox.pool import SandboxPool
from headrace.verifiers.sandbox.tiers import build_executor
from headrace.verifiers.sandbox.watch import descendants

NUM_EXECUTIONS = 3000
NUM_SUBPROCESSES = 600
NUM_IDLE = 500
NUM_HOSTILE = 10_000
NUM_CELLS = 2
_AT_ONCE = 16
_WARM_UP = 50
_PROGRAM = "print(1)"
_PER_MIB = 1 / 2**20

_ids = itertools.count()


@dataclass(slots=True, kw_only=True)
class _Tally:
    """What attacks got, over all of them."""

    num_hostile: int = 0
    num_forged: int = 0
    num_breaches: int = 0
    num_failures: int = 0
    """Ends that the sandbox calls its own failure."""
    num_unexpected: int = 0
    num_leaks: int = 0
    """Programs that did not find an empty directory."""
    notes: list[str] = field(default_factory=list)


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Return the figures. Raises ConfigError where the cell tier does not work."""
    config = SandboxConfig(tier="cell", num_cells=NUM_CELLS)
    rate = asyncio.run(_rate(build_executor(config)))
    progress(f"sandbox: {rate:.0f} executions a second")
    without = _subprocess_rate()
    progress(f"sandbox: {without:.0f} a second by plain processes")
    p99 = asyncio.run(_idle_p99(build_executor(config)))
    progress(f"sandbox: 99 of 100 executions take at most {1e3 * p99:.1f} ms, one at a time")
    return {
        "executions_per_second": rate,
        "subprocess_executions_per_second": without,
        "ratio_vs_subprocess": rate / without,
        "p99_idle_ms": 1e3 * p99,
        **measure_attacks(NUM_HOSTILE, progress),
    }


def measure_attacks(num_hostile: int, progress: Progress) -> Figures:
    """Run so many attacks and return what they got and what they left."""
    files = _files_left()
    tally, left, growth = asyncio.run(_attacked(num_hostile, progress))
    for note in tally.notes:
        progress(f"sandbox: {note}")
    found = {
        "hostile_executions": tally.num_hostile,
        "forged_verdicts": tally.num_forged,
        "hostile_breaches": tally.num_breaches,
        "hostile_unexpected_ends": tally.num_unexpected,
        "sandbox_failures": tally.num_failures,
        "leaks_between_jobs": tally.num_leaks,
        "processes_left": left,
        "files_left": len(_files_left() - files),
        "rss_growth_mib": growth,
    }
    return {name: float(value) for name, value in found.items()}


async def _rate(pool: SandboxPool) -> float:
    try:
        await _many(pool, _WARM_UP)
        began = time.perf_counter()
        await _many(pool, NUM_EXECUTIONS)
        return NUM_EXECUTIONS / (time.perf_counter() - began)
    finally:
        await pool.close()


async def _many(pool: SandboxPool, count: int) -> None:
    left = iter(range(count))

    async def caller() -> None:
        for _ in left:
            await _expect_one(pool)

    await asyncio.gather(*(caller() for _ in range(_AT_ONCE)))


async def _expect_one(pool: SandboxPool) -> None:
    done = await pool.run(_job(_PROGRAM))
    if not (done.is_clean and done.stdout == b"1\n"):
        msg = f"bench verify: {_PROGRAM} came to {done}"
        raise RunError(msg)


async def _idle_p99(pool: SandboxPool) -> float:
    """Return seconds from the call to its result that 99 of 100 do not exceed."""
    seconds: list[float] = []
    try:
        await _many(pool, _WARM_UP)
        for _ in range(NUM_IDLE):
            began = time.perf_counter()
            await _expect_one(pool)
            seconds.append(time.perf_counter() - began)
    finally:
        await pool.close()
    return sorted(seconds)[len(seconds) * 99 // 100]


def _subprocess_rate() -> float:
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]

    def one(_: int) -> None:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)  # noqa: S603 - our own interpreter

    with ThreadPoolExecutor(NUM_CELLS) as threads:
        list(threads.map(one, range(_WARM_UP)))
        began = time.perf_counter()
        list(threads.map(one, range(NUM_SUBPROCESSES)))
        return NUM_SUBPROCESSES / (time.perf_counter() - began)


async def _attacked(num_hostile: int, progress: Progress) -> tuple[_Tally, int, float]:
    """Attack two pools of one cell each; return the tally, processes left and MiB grown."""
    pools = [build_executor(SandboxConfig(tier="cell", num_cells=1)) for _ in range(NUM_CELLS)]
    quick = [attack for attack in ATTACKS.values() if not attack.is_slow]
    slow = [attack for attack in ATTACKS.values() if attack.is_slow]
    tally = _Tally()
    try:
        await _in_turns(pools, slow, tally)
        before = 0
        while tally.num_hostile < num_hostile:
            await _in_turns(pools, quick[: num_hostile - tally.num_hostile], tally)
            progress(f"sandbox: {tally.num_hostile} attacks, {tally.num_forged} forged verdicts")
            # What is remembered of the last jobs is bounded, and full by then.
            if not before and tally.num_hostile >= num_hostile // 2:
                before = await _resident(pools)
        growth = (await _resident(pools) - before) * _PER_MIB
        roots = [root for pool in pools for root in pool.process_ids]
        below = [pid for root in roots for pid in descendants(root)]
    finally:
        for pool in pools:
            await pool.close()
    # A cell is its first process and the one below it that forks.
    left = len(below) - len(roots) + sum(resident_bytes(pid) is not None for pid in below)
    return tally, left, growth


async def _in_turns(pools: Sequence[SandboxPool], attacks: Sequence[Attack], tally: _Tally) -> None:
    left = iter(attacks)

    async def attacker(pool: SandboxPool) -> None:
        for attack in left:
            await _attack_after_secret(pool, attack, tally)

    await asyncio.gather(*map(attacker, pools))


async def _attack_after_secret(pool: SandboxPool, attack: Attack, tally: _Tally) -> None:
    secret = f"secret-{secrets.token_hex(8)}".encode()
    before = await pool.run(_job(_WITH_SOMETHING_TO_HIDE, stdin=secret))
    tally.num_leaks += before.stdout != b"[]\n" + secret
    limits = replace(LIMITS, wall_seconds=attack.wall_seconds)
    done = await pool.run(replace(_job(attack.source), limits=limits))
    tally.num_hostile += 1
    tally.num_failures += (before.ending is Ending.INFRA) + (done.ending is Ending.INFRA)
    tally.num_breaches += BREACH in done.stdout
    tally.num_forged += secret in done.stdout + done.stderr + (done.returned or b"")
    tally.num_unexpected += done.ending not in attack.endings
    if BREACH in done.stdout or done.ending not in attack.endings:
        tally.notes.append(_noted(attack, done))


_WITH_SOMETHING_TO_HIDE = """
import os
print(os.listdir("."))
secret = input()
print(secret, end="")
open("secret", "w").write(secret)
copies = [secret + str(k) for k in range(100)]
"""


def _noted(attack: Attack, done: Execution) -> str:
    name = next(name for name, known in ATTACKS.items() if known is attack)
    return f"{name}: {done.ending} {done.detail} {done.stdout[:80]!r}"


async def _resident(pools: Sequence[SandboxPool]) -> int:
    """Return the memory of this process and of every cell's, which have nothing to do now."""
    for pool in pools:
        await _expect_one(pool)
    roots = [root for pool in pools for root in pool.process_ids]
    pids = [os.getpid(), *roots, *(pid for root in roots for pid in descendants(root))]
    return sum(resident_bytes(pid) or 0 for pid in pids)


def _files_left() -> set[Path]:
    """Return the folders and cgroups that cells of this process made for themselves."""
    name = f"headrace-{os.getpid()}-*"
    return {*Path(tempfile.gettempdir()).glob(name), *Path("/sys/fs/cgroup").rglob(name)}


def _job(source: str, *, stdin: bytes = b"") -> Job:
    return Job(job_id=f"bench-{next(_ids)}", source=source, stdin=stdin)
