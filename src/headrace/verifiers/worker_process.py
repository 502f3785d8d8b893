"""One worker process and its two pipes: started, asked, and killed with all that it started.

Owns: what a worker answers carries the number of its job; a kill takes the process group and every
descendant, and reaps. Which job goes where, `process_pool` decides; what a worker does, `worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.verifiers import frames
from headrace.verifiers.sandbox.watch import descendants

START_SECONDS = 120.0
"""Time for a process to import what it needs; not part of a job's deadline."""
_TICK = os.sysconf("SC_CLK_TCK")
_EXIT_STATUS_SECONDS = 1.0
"""Time for a process whose pipe is closed to be reaped, so that its exit status can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a pool runs."""

    kind: str
    """``math``, ``function`` or ``reward_model``: see `worker`."""
    target: str = ""
    """For ``function`` the import path; for ``reward_model`` its settings as JSON."""
    shown: str = ""
    """The target in messages, where it reads badly as it is."""
    num_processes: int
    timeout_seconds: float
    """For one job, counted from the moment a process that is ready takes it."""
    memory_mib: int | None
    """Address space of one process; None sets no limit."""
    start_seconds: float = START_SECONDS
    """For the imports of a process, before its first job."""

    @property
    def name(self) -> str:
        """What the processes run, as it may stand in a message."""
        return self.shown or (f"path = {self.target!r}" if self.target else self.kind)

    def command(self) -> list[str]:
        """Return the command line of a worker. ``-P``: the current folder shadows no module."""
        settings = {"kind": self.kind, "target": self.target, "memory_mib": self.memory_mib}
        module = "headrace.verifiers.worker"
        return [sys.executable, "-P", "-m", module, json.dumps(settings)]


class NotStartedError(Exception):
    """The worker says why it cannot do any job at all."""


class StartTimeoutError(Exception):
    """The worker is not ready in time."""


class WorkerProcess:
    """One worker process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process, spec: WorkerSpec) -> None:
        self._process = process
        self._spec = spec
        self._ready = False
        self._cpu_before = 0.0

    @classmethod
    async def start(cls, spec: WorkerSpec) -> WorkerProcess:
        """Start one; its imports are under way when this returns."""
        process = await asyncio.create_subprocess_exec(
            *spec.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Its own process group: a kill takes what it started too, and Ctrl-C does not reach it.
            start_new_session=True,
        )
        return cls(process, spec)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's, too."""
        return self._process.pid

    async def wait_ready(self) -> None:
        """Wait for the worker's imports. Raises NotStartedError or StartTimeoutError."""
        if self._ready:
            return
        spec = self._spec
        try:
            message = await asyncio.wait_for(self._receive(), spec.start_seconds)
        except TimeoutError as error:
            msg = f"{spec.name}: its import did not end within {spec.start_seconds:g} s"
            raise StartTimeoutError(msg) from error
        except frames.BrokenFrameError as error:
            status = await self.exit_status()
            known = "unknown" if status is None else status
            msg = f"{spec.name}: its process ended during the import (exit status {known})"
            raise NotStartedError(msg) from error
        if not message.get("ready"):
            raise NotStartedError(str(message.get("detail", "the worker did not start")))
        self._cpu_before = float(message.get("cpu_seconds", 0.0))
        self._ready = True

    def send(self, data: bytes) -> None:
        """Hand over frames. What cannot be sent is found out by `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def answer(self, sequence: int) -> frames.Message:
        """Wait for the answer to job ``sequence``, the next one.

        Raises BrokenFrameError when the process ends, or answers something else.
        """
        answer = await self._receive()
        self._cpu_before = float(answer.get("cpu_seconds", 0.0))
        if answer.get("sequence") != sequence:
            msg = "the process answered another job than it was given; it was killed"
            raise frames.BrokenFrameError(msg)
        return answer

    def cpu_seconds(self) -> float:
        """Return the CPU time it used since its last answer; 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except OSError:
            return 0.0
        # utime and stime, behind a name that may hold anything: see proc(5).
        used = sum(map(int, fields.rpartition(")")[2].split()[11:13])) / _TICK
        return used - self._cpu_before

    async def kill(self) -> int:
        """Kill the process and what it started, reap it and return its exit status."""
        for pid in list(descendants(self.pid)):  # all of them, before any of them is gone
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        status = await self._process.wait()
        # asyncio has no public way to close the pipes of a process; left open, they would wait
        # for a grandchild that holds them.
        self._process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 - see above
        await asyncio.sleep(0)
        return status

    async def exit_status(self) -> int | None:
        """Return how the process ended; None where it has not, or that is not known yet."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_STATUS_SECONDS)
        return self._process.returncode

    async def _receive(self) -> frames.Message:
        assert self._process.stdout is not None
        return await frames.receive(self._process.stdout)
