"""The process that forks for a cell's jobs has their user and their rights, and must be safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sandbox_lab import QUICK, TIERS, here, interpreter, job, make_pool, report, run

from headrace.verifiers.sandbox.execution import Ending, Limits, Tier
from headrace.verifiers.sandbox.pool import SandboxPool
from headrace.verifiers.sandbox.watch import descendants

_DEADLINE_SECONDS = 120.0

_EVERY_SIGNAL = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
tgkill = {"x86_64": 234, "aarch64": 131}[os.uname().machine]
for number in range(1, 65):
    for send in (
        lambda: os.kill(os.getppid(), number),
        lambda: libc.syscall(ctypes.c_long(tgkill), os.getppid(), os.getppid(), number),
    ):
        try:
            send()
        except OSError:
            pass
print("done")
"""
_INTERRUPTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
_SIZES = """
import resource
for what in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
    print(resource.getrlimit(what)[0], end=" ")
"""
_DRIVER = """
import os, sys
from headrace.verifiers.sandbox.cell import Cell
from headrace.verifiers.sandbox.execution import Job, Limits, Tier
from headrace.verifiers.sandbox.launch import CellSpec
from headrace.verifiers.sandbox.work import python_work

cell = Cell(CellSpec(tier=Tier(sys.argv[1]), interpreter=sys.argv[2]))
never, _ = os.pipe()
source = "import os, time\\nos.fork()\\ntime.sleep(600)"
cell.run(python_work(Job(job_id="x", source=source, limits=Limits(wall_seconds=600))), never)
"""


@pytest.fixture(scope="module", params=TIERS, ids=lambda tier: tier.value)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    tier: Tier = request.param
    if not here(tier):
        pytest.skip(f"{tier} does not work here: {report(tier).detail}")
    pool = make_pool(tier)
    yield pool
    pool.close_blocking()


def test_no_signal_of_a_program_reaches_who_forks_it(pool: SandboxPool) -> None:
    run(pool, "print(1)")
    forks = [pid for root in pool.process_ids for pid in (root, *descendants(root))]
    done = run(pool, _EVERY_SIGNAL)
    assert (done.ending, done.stdout) == (Ending.EXITED, b"done\n"), done
    assert pool.statistics()["verifier/sandbox/num_retries"] == 0
    if pool.tier is not Tier.BUBBLEWRAP:
        assert [pid for root in pool.process_ids for pid in (root, *descendants(root))] == forks


def test_a_program_is_interrupted_as_python_is(pool: SandboxPool) -> None:
    assert run(pool, _INTERRUPTED).stdout == b"interrupted\n"


def test_each_job_has_its_own_limits_whatever_the_one_before_had(pool: SandboxPool) -> None:
    small = replace(QUICK, num_processes=20, disk_mib=1)
    large = replace(QUICK, num_processes=30, disk_mib=2, cpu_seconds=5.0)

    def sizes(limits: Limits) -> list[int]:
        return [int(word) for word in run(pool, job(_SIZES, limits=limits)).stdout.split()]

    first, second, third = sizes(small), sizes(large), sizes(small)
    assert first == third
    assert second[0] - first[0] == 4
    assert second[1] - first[1] == 1 << 20
    assert second[2] - first[2] == 10


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.value)
def test_nothing_of_a_cell_outlives_its_supervisor(tier: Tier) -> None:
    if not here(tier):
        pytest.skip(f"{tier} does not work here: {report(tier).detail}")
    command = [sys.executable, "-c", _DRIVER, tier.value, interpreter(tier)]
    supervisor = subprocess.Popen(command)
    try:
        below = _wait_for_more_than(2 if tier is Tier.LOCK else 3, supervisor.pid)
    finally:
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while any(map(_is_alive, below)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)


def test_nothing_of_a_cell_outlives_the_process_that_was_warmed() -> None:
    if not here(Tier.CELL):
        pytest.skip(f"no cells here: {report(Tier.CELL).detail}")
    supervisor = subprocess.Popen([sys.executable, "-c", _DRIVER, "cell", sys.executable])
    try:
        warmed, *below = _wait_for_more_than(3, supervisor.pid)
        os.kill(warmed, signal.SIGKILL)
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while any(map(_is_alive, below)):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.01)
    finally:
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()


def _wait_for_more_than(count: int, pid: int) -> list[int]:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while len(found := list(descendants(pid))) <= count:
        assert time.monotonic() < deadline, "the cell did not start its program"
        time.sleep(0.01)
    return found


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - it may be gone at any time
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
