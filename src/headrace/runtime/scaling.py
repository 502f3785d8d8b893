"""Growing and shrinking a run while it goes on: `headrace scale` at one end, the run at the other.

The run listens at a socket in its directory, which only its own user may open; one request is one
line of JSON, and so is the answer, which comes once what was asked has happened. Owns: whatever is
asked, and whoever hangs up, the run goes on. What it means to have more of a role is `resizing`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, HeadraceError, RunDirectoryError, RunError, UserError
from headrace.runtime.run_files import CONFIG_FILE

_LOG = logging.getLogger(__name__)

SOCKET_FILE = "control.sock"
_MOST = {"generators": 1024, "verifiers": 1024}
"""Roles that scale."""
_MAX_LINE = 4096
"""Bytes of a request."""
_MAX_ANSWER = 1 << 20
"""Bytes of an answer, which may quote the last words of many processes."""
_READ_SECONDS = 5.0
"""For a request to come whole, once somebody has connected."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of who connected, as the kernel says."""

Scale = Callable[[Mapping[str, int]], Awaitable[str]]
"""Has roles in such numbers, and says what happened. Raises HeadraceError."""


# --- what can be asked ----------------------------------------------------------------------------


def check_scale(wanted: Mapping[str, int]) -> None:
    """Raise ConfigError for what no run can have."""
    for role, number in wanted.items():
        most = _MOST.get(role)
        if most is None:
            msg = f"{role}: no role that scales; {' and '.join(_MOST)} are"
            raise ConfigError(msg)
        if not 1 <= number <= most:
            msg = f"{role} = {number}: must be from 1 to {most}"
            raise ConfigError(msg)


# --- the run's end --------------------------------------------------------------------------------


@asynccontextmanager
async def listening(directory: Path, scale: Scale) -> AsyncIterator[None]:
    """Answer requests at a socket in ``directory``; it must be locked by this run.

    Where there can be no socket the run goes on without, and says so.
    """
    desk = _Desk(scale)
    with contextlib.ExitStack() as files:
        try:
            bound = _bound(files.enter_context(_reachable(directory)))
        except OSError as error:
            _LOG.warning("this run cannot be scaled: no socket in %s: %s", directory, error)
            yield
            return
        server = await asyncio.start_unix_server(desk.serve, sock=bound, limit=_MAX_LINE)
        try:
            yield
        finally:
            server.close()
            (directory / SOCKET_FILE).unlink(missing_ok=True)
            await desk.close()


def _bound(path: str) -> socket.socket:
    """Return a socket at ``path``, in place of what a killed run left there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - a path through a descriptor
    made = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        made.bind(path)
    except OSError:
        made.close()
        raise
    finally:
        os.umask(before)
    return made


@contextmanager
def _reachable(directory: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough, however long that of ``directory`` is."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        yield str(directory / SOCKET_FILE)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield str(descriptors / str(descriptor) / SOCKET_FILE)
    finally:
        os.close(descriptor)


class _Desk:
    """Takes requests, each in a task of its own."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. Waits for it no longer than `_READ_SECONDS`."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            answer = await self._answer(reader, writer)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except ConnectionError:
            _LOG.info("whoever asked to scale the run did not wait for the answer")
        finally:
            writer.close()

    async def close(self) -> None:
        """Let go of whoever is not answered yet."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, str]:
        try:
            # Read first: who is refused must have sent all, or it would not hear why.
            line = await asyncio.wait_for(reader.readline(), _READ_SECONDS)
            _check_user(writer.get_extra_info("socket"))
            wanted = _request(line)
            check_scale(wanted)
            said = await self._scale(wanted)
        except UserError as error:
            return {"refused": str(error)}
        except HeadraceError as error:
            return {"failed": str(error)}
        except (ValueError, RecursionError) as error:
            return {"refused": f"not a request: {error}"}
        except TimeoutError:
            return {"refused": f"no request came within {_READ_SECONDS:g} s"}
        return {"done": said}


def _check_user(connection: socket.socket) -> None:
    """Raise ConfigError unless the run's own user, or root, is at the other end."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return
    raw = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user not in {os.geteuid(), 0}:
        msg = f"user {user} is not the user of this run"
        raise ConfigError(msg)


def _request(line: bytes) -> dict[str, int]:
    """Return roles and numbers. Raises ValueError."""
    found = json.loads(line)
    if not isinstance(found, dict) or not found:
        msg = "it names no role"
        raise ValueError(msg)
    for role, number in found.items():
        if not isinstance(number, int) or isinstance(number, bool):
            msg = f"{role} = {number} is no whole number"
            raise ValueError(msg)  # noqa: TRY004 - of what was sent, not of an argument
    return found


# --- the command's end ----------------------------------------------------------------------------


def scale_run(directory: Path, wanted: Mapping[str, int], *, deadline_seconds: float) -> str:
    """Ask the run in ``directory`` and return what it did; blocks until it has.

    Raises UserError where it refuses or none is at work there, RunError where it could not do it or
    did not answer in time.
    """
    check_scale(wanted)
    if not (directory / CONFIG_FILE).is_file():
        msg = f"{directory} holds no run (no {CONFIG_FILE} in it); give the --output of one"
        raise RunDirectoryError(msg)
    with _connected(directory, deadline_seconds) as connection:
        request = json.dumps(dict(wanted)).encode() + b"\n"
        answer = _asked(connection, request, directory, deadline_seconds)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    if "failed" in answer:
        raise RunError(answer["failed"])
    return answer["done"]


@contextmanager
def _connected(directory: Path, deadline_seconds: float) -> Iterator[socket.socket]:
    with _reachable(directory) as path, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(deadline_seconds)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            msg = f"no run is at work in {directory}; one that starts can be scaled once it trains"
            raise RunDirectoryError(msg) from error
        except OSError as error:
            msg = f"the run in {directory} cannot be asked: {error}; only its own user may"
            raise RunDirectoryError(msg) from error
        yield connection


def _asked(
    connection: socket.socket, request: bytes, directory: Path, deadline_seconds: float
) -> dict[str, str]:
    try:
        connection.sendall(request)
        with connection.makefile("rb") as stream:
            line = stream.readline(_MAX_ANSWER)
    except TimeoutError as error:
        msg = (
            f"the run in {directory} did not answer within {deadline_seconds:g} s; what was asked "
            "may still happen: generator/pool/num_members in its metrics says"
        )
        raise RunError(msg) from error
    except ConnectionError:
        line = b""
    if not line.endswith(b"\n"):
        msg = f"the run in {directory} ended before it answered"
        raise RunError(msg)
    answer: dict[str, str] = json.loads(line)
    return answer
