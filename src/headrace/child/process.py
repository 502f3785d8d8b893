"""The parent's end of a child: what it was asked, what it printed last, and how it ended.

Owns: whoever waits for an answer hears of the child's end; the child and all that it started in its
session end together, and are reaped. Sets no deadline: that is for whoever asks. Where the process
is, and what brings its pipes here, is behind `ProcessLine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.child.channel import Answer, read_answer

_END_SECONDS = 5.0
"""For what is left in the pipes of a child that has ended."""
_LAST_WORDS = 2000
"""Characters of standard error that are kept."""
_LINES = 8
"""Of them, lines that an error quotes."""


class ChildEndedError(Exception):
    """The process ended while it was asked something, or said what nobody can read."""


class ProcessLine(Protocol):
    """A process, wherever it is, and what it says. Used from one event loop."""

    pid: int
    """On its machine."""
    title: str
    """What errors call it."""
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    @property
    def returncode(self) -> int | None:
        """As of `subprocess.Popen`; None while it is not known."""
        ...

    @property
    def loss(self) -> str | None:
        """Why nobody can say how it ended, after "process N"; None where somebody can."""
        ...

    def write(self, frame: bytes | None) -> None:
        """Queue ``frame`` for its standard input, which None closes."""
        ...

    async def wait(self) -> None:
        """Return once it has ended, or is lost; unblocked by that."""
        ...

    async def end(self) -> None:
        """Kill it and what it started. Idempotent."""
        ...

    def close(self) -> None:
        """Close its pipes, once it has ended and they were read. Idempotent."""
        ...


class LocalProcess:
    """A process of this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self.pid = process.pid
        self.title = f"process {process.pid}"
        self.stdout, self.stderr = process.stdout, process.stderr

    @property
    def returncode(self) -> int | None:
        """See `ProcessLine`."""
        return self._process.returncode

    @property
    def loss(self) -> str | None:
        """See `ProcessLine`."""
        return None

    def write(self, frame: bytes | None) -> None:
        """See `ProcessLine`. A process that has ended shows in its output."""
        assert self._process.stdin is not None
        if frame is None:
            self._process.stdin.close()
            return
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(frame)

    async def wait(self) -> None:
        """See `ProcessLine`."""
        await self._process.wait()

    async def asked_where(self) -> str:
        """Send SIGUSR1, at which a rank prints its stack; return the kernel's word of it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        return state_of(self.pid)

    async def end(self) -> None:
        """See `ProcessLine`."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            await self._process.wait()

    def close(self) -> None:
        """See `ProcessLine`."""
        # asyncio has no public way to close the pipes of a process.
        self._process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 - see above


class ChildProcess:
    """One process, and what it was asked and has not answered. Used from one event loop."""

    def __init__(self, process: ProcessLine) -> None:
        self.process = process
        self.expected: dict[int, asyncio.Future[Any]] = {}
        self.num_unexpected = 0
        """Answers that nobody waited for any more."""
        self._said = ""
        self._garbled = ""
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._hear())]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    @property
    def words(self) -> list[str]:
        """The last lines that it printed."""
        return [line.strip() for line in self._said.splitlines() if line.strip()]

    @property
    def last_words(self) -> str:
        """The last lines that it printed, in one."""
        return " | ".join(self.words[-_LINES:]) or "it said nothing"

    def forget_words(self) -> None:
        """Keep only what it prints from now on."""
        self._said = ""

    def expect(self, number: int) -> asyncio.Future[Any]:
        """Return what will be the answer ``number``; ChildEndedError where there will be none."""
        future = asyncio.get_running_loop().create_future()
        # Where several are expected, whoever has heard of one end does not ask for the others.
        future.add_done_callback(_hear_of_it)
        if self._over.is_set():
            future.set_exception(ChildEndedError())
        else:
            self.expected[number] = future
        return future

    def send(self, frame: bytes) -> None:
        """Queue ``frame``; a process that has ended shows in its answers."""
        self.process.write(frame)

    def hang_up(self) -> None:
        """Have it end by itself once it has done what it was asked."""
        self.process.write(None)

    async def over(self) -> None:
        """Return once no further answer will come; unblocked by the child's end."""
        await self._over.wait()

    async def reaped(self, seconds: float = _END_SECONDS) -> None:
        """Wait until the kernel has said how the process ended, and its last words were read."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process: then it could not say itself what is wrong.

        So is one whose machine was lost.
        """
        status = self.process.returncode
        return self.process.loss is not None or (status is not None and status < 0)

    def ending(self) -> str:
        """Say how the process ended."""
        status = self.process.returncode
        if self._garbled:
            return self._garbled
        if self.process.loss is not None:
            return self.process.loss
        if status is None:
            return "did not end"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    async def end(self) -> None:
        """Kill the process and what it started, and reap it. Idempotent."""
        await self.process.end()
        for task in self._tasks:
            await asyncio.wait({task}, timeout=_END_SECONDS)
            task.cancel()
        self.process.close()
        await asyncio.sleep(0)

    async def _listen(self) -> None:
        """Waits for answers; unblocked by the child, and ended by its end."""
        try:
            while True:
                self._take(await read_answer(self.process.stdout))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever a pickle of garbage raises
            self._garbled = f"answered what nobody can read ({type(error).__name__}: {error})"
        finally:
            self._over.set()
            for future in self.expected.values():
                if not future.done():
                    future.set_exception(ChildEndedError())
            self.expected.clear()

    def _take(self, answer: Answer) -> None:
        future = self.expected.pop(answer.number, None)
        if future is None or future.done():
            self.num_unexpected += 1
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(answer.error)

    async def _hear(self) -> None:
        """Keeps the last that it prints; ended by its end."""
        while said := await self.process.stderr.read(_LAST_WORDS):
            self._said = (self._said + said.decode(errors="replace"))[-_LAST_WORDS:]


async def launch(module: str, environment: Mapping[str, str] | None = None) -> LocalProcess:
    """Start ``module`` as a process of its own. ``environment`` gives way to what is set."""
    process = await asyncio.create_subprocess_exec(
        # -P: the current folder shadows no module.
        *(sys.executable, "-P", "-m", module),
        env=dict(environment or {}) | os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Its own session: Ctrl-C at a terminal does not reach it, and a kill takes its children.
        start_new_session=True,
    )
    return LocalProcess(process)


def _hear_of_it(answer: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an error that nobody asked for."""
    if not answer.cancelled():
        answer.exception()


def state_of(pid: int) -> str:
    """Return the kernel's letter for what ``pid`` does, as in proc(5); ``?`` where it says none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"
