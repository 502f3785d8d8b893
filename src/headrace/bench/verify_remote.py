"""A part of `bench verify`: what it costs to have programs run by another process over HTTP.

Measured: executions a second of a program that does nothing but print, each job another one, asked
for by one event loop with twice as many open as there are cells: by the sandbox in this process,
and by `headrace serve-verifiers` beside it on the loopback address with as many cells. Client,
server and programs share this machine's cores, so the difference is what the way there and back
computes. Not measured: a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator

from headrace.bench.result import Figures, Peers, Progress
from headrace.config import RemoteConfig, SandboxConfig
from headrace.errors import RunError
from headrace.verifiers.remote.executor import RemoteExecutor
from headrace.verifiers.sandbox.execution import Executor, Job
from headrace.verifiers.sandbox.tiers import build_executor

NUM_JOBS = 2000
_WARM_UP_JOBS = 100
_OPEN_PER_CELL = 2
_END_SECONDS = 30.0

_NUMBERS = itertools.count()


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Measure both ways. Raises RunError where an execution fails."""
    sandbox = build_executor(SandboxConfig())
    num_open = _OPEN_PER_CELL * sandbox.num_cells
    progress(f"{NUM_JOBS} programs in this process, {num_open} open")
    local = asyncio.run(_rate(sandbox, num_open))
    progress(f"{NUM_JOBS} programs over HTTP on the loopback address")
    with _server() as url:
        remote = asyncio.run(_rate(RemoteExecutor(RemoteConfig(endpoints=(url,)), None), num_open))
    return {
        "local_executions_per_second": local,
        "remote_executions_per_second": remote,
        "remote_share_of_local": remote / local,
    }


async def _rate(executor: Executor, num_open: int) -> float:
    try:
        await _run_all(executor, _WARM_UP_JOBS, num_open)
        began = time.monotonic()
        await _run_all(executor, NUM_JOBS, num_open)
        return NUM_JOBS / (time.monotonic() - began)
    finally:
        await executor.close()


async def _run_all(executor: Executor, count: int, num_open: int) -> None:
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            job = Job(job_id=f"bench-{next(_NUMBERS)}", source="print(1)")
            execution = await executor.run(job)
            if execution.stdout != b"1\n":
                msg = f"an execution ended as {execution.ending}: {execution.detail}"
                raise RunError(msg)

    await asyncio.gather(*(work() for _ in range(num_open)))


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Start a server and yield its URL."""
    command = [sys.executable, "-m", "headrace", "serve-verifiers", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        if not said.startswith("serving "):
            msg = f"serve-verifiers did not start: {said.strip()}"
            raise RunError(msg)
        yield said.split()[1].rstrip(",")
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()
        process.stderr.close()
