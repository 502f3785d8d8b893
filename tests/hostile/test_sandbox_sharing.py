"""What cells share with one another and the host, where they have no namespace of their own."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import pytest
from sandbox_lab import QUICK, here, job, make_pool, report, run

from headrace.verifiers.sandbox.execution import Ending, Execution, Tier
from headrace.verifiers.sandbox.pool import SandboxPool
from headrace.verifiers.sandbox.watch import descendants

LIMITS = replace(QUICK, disk_mib=8, cpu_seconds=10.0, wall_seconds=100.0)
MIB = 1 << 20

_HOLDS_PROCESSES = """
import os, time
for _ in range(14):
    if os.fork() == 0:
        time.sleep(100)
time.sleep(100)
"""
_NEEDS_PROCESSES = """
import os, time
for _ in range(10):
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
for _ in range(10):
    os.wait()
print("done")
"""
_WRITES = """
import os, time
kept = []
for number in range({count}):
    file = open(str(number), "wb", 0)
    file.write(bytes({size}))
    {after}
time.sleep({seconds})
print("done")
"""


def pool_of(tier: Tier, num_cells: int = 1) -> SandboxPool:
    if not here(tier):
        pytest.skip(f"{tier} does not work here: {report(tier).detail}")
    return make_pool(tier, num_cells=num_cells)


@pytest.mark.parametrize("tier", [Tier.CELL, Tier.LOCK], ids=lambda tier: tier.value)
def test_the_processes_of_one_program_are_not_another_ones(tier: Tier) -> None:
    """A limit on a user's processes would count both."""
    if os.geteuid() != 0 and tier is Tier.LOCK:
        pytest.skip("only root can give each cell a user of its own")
    pool = pool_of(tier, num_cells=2)

    async def both() -> Execution:
        asked = replace(QUICK, wall_seconds=100.0)
        # Both cells start now: what runs by then is no neighbour that comes later.
        await asyncio.gather(*(pool.run(job("import time; time.sleep(0.3)")) for _ in range(2)))
        holder = asyncio.create_task(pool.run(job(_HOLDS_PROCESSES, limits=asked)))
        deadline = time.monotonic() + 90.0
        while max([len(list(descendants(pid))) for pid in pool.process_ids], default=0) < 15:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        try:
            return await pool.run(job(_NEEDS_PROCESSES, limits=asked))
        finally:
            holder.cancel()

    try:
        done = asyncio.run(both())
    finally:
        pool.close_blocking()
    assert done.stdout == b"done\n", (done.detail, done.stderr)


@pytest.mark.parametrize(
    ("count", "size", "after", "ending"),
    [
        (6, MIB, "file.close()", Ending.EXITED),
        (1, 8 * MIB, "file.close()", Ending.EXITED),
        (40, MIB, "file.close()", Ending.VIOLATION),
        (40, MIB, "kept.append(file); os.remove(str(number))", Ending.VIOLATION),
        (4200, 0, "file.close()", Ending.VIOLATION),
    ],
)
def test_all_files_of_a_program_together_are_bounded(
    count: int, size: int, after: str, ending: Ending
) -> None:
    """In the lock tier they lie on the host's disk."""
    if "remove" in after and os.geteuid() != 0:
        pytest.skip("who has a file open may be asked by root alone")
    pool = pool_of(Tier.LOCK)
    try:
        # Long enough to be looked at; what is forbidden ends as soon as it is seen.
        seconds = 1 if ending is Ending.EXITED else 60
        source = _WRITES.format(count=count, size=size, after=after, seconds=seconds)
        assert run(pool, job(source, limits=LIMITS)).ending is ending
        assert run(pool, "import os; print(os.listdir('.'))").stdout == b"[]\n"
    finally:
        pool.close_blocking()


def test_a_directory_under_bubblewrap_has_a_size() -> None:
    pool = pool_of(Tier.BUBBLEWRAP)
    try:
        room = run(pool, "import os; s = os.statvfs('.'); print(s.f_blocks * s.f_frsize >> 20)")
        assert int(room.stdout) == 256
    finally:
        pool.close_blocking()
