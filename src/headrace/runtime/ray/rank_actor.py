"""A learner's rank on another machine: an actor that starts its process and is its pipes.

What runs in that process is what runs beside a learner without Ray. Owns: the process ends with the
actor; and it is ended by its own machine once its learner has not asked for so long that it has
given the rank up, so that none of an earlier life goes on where nobody reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

import ray

from headrace.child.process import LocalProcess, launch
from headrace.learners.parallel.hosts import MODULE
from headrace.patience import LOOKS
from headrace.runtime.ray.cluster import own_address
from headrace.runtime.ray.interface import talking_over

BEAT_SECONDS = 2.0
"""An actor whose rank says nothing answers after so long, and shows by it that it is there."""
_CHUNK = 1 << 20
"""Bytes that are read of a pipe at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A rank's process."""

    pid: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came out of a rank's process since the last time."""

    output: bytes
    said: bytes
    """On its standard error."""
    returncode: int | None
    """As of `subprocess.Popen`; None while it runs."""
    is_over: bool
    """Whether it has ended and nothing else will come."""


@ray.remote(max_restarts=0, max_task_retries=0)
class RankActor:
    """One rank's process. All calls run in its event loop."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._output: list[bytes] = []
        self._said: list[bytes] = []
        self._came = asyncio.Event()
        self._was_asked = False
        """Since the last look."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, patience_seconds: float) -> Started:
        """Start the process; it is ended when nobody asks for ``patience_seconds``."""
        process = await launch(MODULE, talking_over(own_address()))
        self._process = process
        self._tasks = [
            asyncio.create_task(self._listen(process)),
            asyncio.create_task(self._end_when_forgotten(process, patience_seconds)),
        ]
        return Started(pid=process.pid, host=socket.gethostname())

    async def write(self, frame: bytes | None) -> None:
        """Pass ``frame`` on; None closes the pipe."""
        self._was_asked = True
        self._own.write(frame)

    async def read(self) -> Heard:
        """Return what came. Waits for it; unblocked by it, by the end, or after `BEAT_SECONDS`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), BEAT_SECONDS)
        self._was_asked = True
        is_over = self._tasks[0].done()
        if not is_over:
            self._came.clear()
        heard = Heard(
            output=b"".join(self._output),
            said=b"".join(self._said),
            returncode=self._own.returncode,
            is_over=is_over,
        )
        self._output.clear()
        self._said.clear()
        return heard

    async def asked_where(self) -> str:
        """See `RankLine`."""
        return await self._own.asked_where()

    async def end(self) -> None:
        """Kill the process and what it started."""
        await self._own.end()

    @property
    def _own(self) -> LocalProcess:
        assert self._process is not None, "start comes first"
        return self._process

    async def _listen(self, process: LocalProcess) -> None:
        """Waits for what the process says; ended by its end."""
        await asyncio.gather(
            self._keep(process.stdout, self._output), self._keep(process.stderr, self._said)
        )
        await process.wait()
        asyncio.get_running_loop().call_soon(self._came.set)

    async def _keep(self, stream: asyncio.StreamReader, chunks: list[bytes]) -> None:
        while chunk := await stream.read(_CHUNK):
            chunks.append(chunk)
            self._came.set()

    async def _end_when_forgotten(self, process: LocalProcess, patience_seconds: float) -> None:
        """Waits for the learner's silence, in which time does not run while this stands still."""
        num_silent = 0
        while num_silent < LOOKS:
            self._was_asked = False
            await asyncio.sleep(patience_seconds / LOOKS)  # it is a clock that it waits for
            num_silent = 0 if self._was_asked else num_silent + 1
        await process.end()
