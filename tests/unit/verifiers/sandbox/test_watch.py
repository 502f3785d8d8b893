"""What is counted from outside where no cgroup counts it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sandbox_lab import job, make_pool, run, strongest

from headrace.verifiers.sandbox import cell
from headrace.verifiers.sandbox.execution import Ending, Limits
from headrace.verifiers.sandbox.pool import SandboxPool

LIMITS = Limits(cpu_seconds=20.0, wall_seconds=60.0, memory_mib=200)

_SHARES = """
import os, time
held = b"x" * (80 << 20)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(100)
time.sleep(1)
print(len(held))
"""
_DOES_NOT_SHARE = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = b"x" * (80 << 20)
        time.sleep(100)
time.sleep(50)
"""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxPool]:
    monkeypatch.setattr(cell.MemorySlot, "make", lambda: None)
    pool = make_pool(strongest())
    yield pool
    pool.close_blocking()


def test_memory_that_forks_share_is_counted_once(pool: SandboxPool) -> None:
    if os.geteuid() != 0:
        pytest.skip("a process of a cell may be looked into by root alone")
    done = run(pool, job(_SHARES, limits=LIMITS))
    assert (done.ending, done.stdout) == (Ending.EXITED, b"83886080\n"), done.detail


def test_memory_that_each_fork_has_is_counted_for_each(pool: SandboxPool) -> None:
    assert run(pool, job(_DOES_NOT_SHARE, limits=LIMITS)).ending is Ending.OOM
