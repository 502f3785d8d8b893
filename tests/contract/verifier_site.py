"""Executors that are told what to do by the program they are given, and servers of them.

The language of a program is a line for each thing to do: ``print TEXT``, ``sleep SECONDS``,
``wait`` (until the test lets go), ``exit STATUS``, ``infra TEXT``, ``raise``, ``spill BYTES``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from headrace.verifiers.remote.connections import BoundedConnection
from headrace.verifiers.remote.desk import DeskLimits, JobDesk
from headrace.verifiers.remote.server import Gate, build_app
from headrace.verifiers.remote.serving import ServeOptions, serve, server_config
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Limits, Tier


def job(source: str = "print 1", job_id: str = "a", **fields: Any) -> Job:  # noqa: ANN401 - of Job
    return Job(job_id=job_id, source=source, **{"limits": Limits(wall_seconds=30.0), **fields})


class FakeExecutor:
    """An `Executor` without processes."""

    def __init__(self, tier: Tier = Tier.CELL, seconds: float = 0.0) -> None:
        self.tier = tier
        self.seconds = seconds
        """Of every job, beside what it does."""
        self.begun: list[str] = []
        """Job ids, in order; once for each execution."""
        self.cancelled: list[str] = []
        self.num_running = 0
        self.most_running = 0
        self.let_go = asyncio.Event()
        self.is_closed = False

    async def run(self, job: Job) -> Execution:
        # As clients know it: a desk makes it unique.
        job_id = job.job_id.partition("#")[0]
        self.begun.append(job_id)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._do(job)
        except asyncio.CancelledError:
            self.cancelled.append(job_id)
            raise
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        self.is_closed = True

    async def _do(self, job: Job) -> Execution:
        done = Execution(job_id=job.job_id, tier=self.tier, ending=Ending.EXITED, exit_status=0)
        await asyncio.sleep(self.seconds)
        for line in job.source.splitlines():
            word, _, rest = line.partition(" ")
            match word:
                case "print":
                    done = replace(done, stdout=done.stdout + rest.encode() + b"\n")
                case "echo":
                    done = replace(done, stdout=done.stdout + job.stdin)
                case "spill":
                    done = replace(done, stdout=b"x" * int(rest))
                case "sleep":
                    await asyncio.sleep(float(rest))
                case "wait":
                    await self.let_go.wait()
                case "exit":
                    return replace(done, exit_status=int(rest))
                case "infra":
                    return replace(done, ending=Ending.INFRA, exit_status=None, detail=rest)
                case "raise":
                    raise ZeroDivisionError(rest)
        return done


@contextlib.asynccontextmanager
async def serving(
    executor: FakeExecutor,
    *,
    gate: Gate | None = None,
    port: int = 0,
    http: type[BoundedConnection] = BoundedConnection,
    **limits: Any,  # noqa: ANN401 - of DeskLimits
) -> AsyncIterator[tuple[str, JobDesk]]:
    """Serve ``executor`` in this event loop over a real socket; yield its URL and desk."""
    desk = JobDesk(executor, executor.tier, DeskLimits(**{"num_slots": 2, **limits}))
    app = build_app(desk, gate or Gate(token=None))
    listener = socket.create_server(("127.0.0.1", port))
    config = server_config(app, _options(desk.limits, drain_seconds=0))
    config.http, config.log_level = http, "critical"
    config.configure_logging()
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", desk
    finally:
        server.should_exit = True
        await task
        await desk.close()
        listener.close()


Raw = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(answer: Raw) -> AsyncIterator[str]:
    """Let ``answer`` do what it likes with each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_message(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return head and body of one request or answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lengths = [
        int(line.split(":")[1])
        for line in head.splitlines()
        if line.lower().startswith("content-length")
    ]
    return head, await reader.readexactly(lengths[0] if lengths else 0)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return path and body of one request."""
    head, body = await read_message(reader)
    return head.split(" ")[1], body


def http(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """Return one whole answer."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what announces itself by no event."""
    while not condition():  # noqa: ASYNC110 - as the docstring says
        await asyncio.sleep(0.002)


def main(port_file: str, token: str) -> None:
    """Serve a fake as a process of its own, the way the command does."""

    options = _options(DeskLimits(num_slots=2), drain_seconds=20)
    on_ready = partial(_write, Path(port_file))
    serve(FakeExecutor(), Tier.CELL, replace(options, token=token or None, on_ready=on_ready))


def _options(limits: DeskLimits, *, drain_seconds: int) -> ServeOptions:
    return ServeOptions(
        host="127.0.0.1", port=0, token=None, limits=limits, drain_seconds=drain_seconds
    )


def _write(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
