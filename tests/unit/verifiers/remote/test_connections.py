"""Whoever opens connections and says nothing, or says it slowly, keeps nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import pytest
from verifier_site import FakeExecutor, job, serving, until

from headrace.config import RemoteConfig
from headrace.verifiers.remote.connections import BoundedConnection
from headrace.verifiers.remote.desk import DeskLimits
from headrace.verifiers.remote.executor import RemoteExecutor
from headrace.verifiers.remote.server import Gate
from headrace.verifiers.remote.serving import ServeOptions, server_config
from headrace.verifiers.remote.wire import ALIVE_PATH, METRICS_PATH, RUN_PATH

HANG_SECONDS = 120.0
TOKEN = "0123456789abcdef"
HEAD = f"GET {ALIVE_PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


class Patient(BoundedConnection):
    head_seconds = HANG_SECONDS
    unread_seconds = 0.3


class Hasty(Patient):
    head_seconds = 0.3


class Few(Patient):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.limit_concurrency = 8


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def visit(
    work: Callable[[str], Awaitable[None]],
    http: type[BoundedConnection] = Hasty,
    token: str | None = TOKEN,
) -> None:
    async def main() -> None:
        async with serving(FakeExecutor(), gate=Gate(token=token), http=http) as (url, _):
            await asyncio.wait_for(work(url), HANG_SECONDS)

    asyncio.run(main())


async def connected(url: str) -> Streams:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Wait for the end of a connection; return what came before."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def answered(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(3)


async def drip(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in HEAD * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)


async def never_ending(send: Callable[[], Awaitable[None]]) -> None:
    while True:
        await send()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_that_never_ends_its_head_is_ended(said: bytes) -> None:
    async def work(url: str) -> None:
        reader, writer = await connected(url)
        writer.write(said)
        assert await ended(reader) == b""
        writer.close()

    visit(work)


def test_a_head_that_comes_a_byte_at_a_time_has_one_deadline_for_all_of_it() -> None:
    async def work(url: str) -> None:
        reader, writer = await connected(url)
        dripping = asyncio.create_task(drip(writer))
        assert await ended(reader) == b""
        dripping.cancel()
        writer.close()

    visit(work)


def test_the_head_of_a_second_request_has_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(url: str) -> None:
        reader, writer = await connected(url)
        writer.write(HEAD)
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        # Of this head alone: a busy machine may be late with the first one.
        monkeypatch.setattr(Patient, "head_seconds", 0.3)
        writer.write(HEAD[:10])
        assert await ended(reader) == b""
        writer.close()

    visit(work, http=Patient)


def test_the_rest_of_a_request_that_was_refused_is_not_read_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(url: str) -> None:
        reader, writer = await connected(url)
        writer.write(HEAD)
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(Patient, "head_seconds", 0.3)
        writer.write(
            f"POST {RUN_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n".encode()
        )
        assert b" 401 " in await reader.readline()
        dripping = asyncio.create_task(drip(writer))
        await ended(reader)
        dripping.cancel()
        writer.close()

    visit(work, http=Patient)


def test_who_reads_no_answers_is_ended() -> None:
    many = f"GET {METRICS_PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 100

    async def work(url: str) -> None:
        quiet = socket.socket()
        # Small, so that a few answers fill what is on the way.
        quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        quiet.settimeout(0.0)
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(quiet, (parts.hostname, parts.port))
        with quiet, pytest.raises(ConnectionError):
            await never_ending(lambda: loop.sock_sendall(quiet, many))

    visit(work, http=Patient, token=None)


def test_an_idle_connection_is_kept_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(url: str) -> None:
        reader, writer = await connected(url)
        writer.write(HEAD)
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(Patient, "head_seconds", 0.3)
        await asyncio.sleep(3 * Patient.head_seconds)
        monkeypatch.setattr(Patient, "head_seconds", HANG_SECONDS)
        writer.write(HEAD)
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        writer.write(HEAD * 3)
        for _ in range(3):
            assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        writer.close()

    visit(work, http=Patient)


def test_a_request_that_waits_for_its_answer_has_no_deadline_of_a_head() -> None:
    async def main() -> None:
        slow = FakeExecutor(seconds=3 * Hasty.head_seconds)
        async with serving(slow, http=Hasty) as (url, _):
            executor = RemoteExecutor(RemoteConfig(endpoints=(url,)), None)
            assert (await executor.run(job())).is_clean
            await executor.close()
        assert len(slow.begun) == 1

    asyncio.run(main())


def test_where_there_are_too_many_the_one_that_said_nothing_longest_makes_room() -> None:
    async def work(url: str) -> None:
        kept = await connected(url)
        kept[1].write(HEAD)
        await answered(kept[0])
        silent = [await connected(url) for _ in range(30)]
        late = await connected(url)
        for reader, writer in (kept, late):
            writer.write(HEAD)
            assert (await answered(reader)).startswith(b"HTTP/1.1 200")
        await until(lambda: sum(reader.at_eof() for reader, _ in silent) >= 20)
        assert not silent[-1][0].at_eof()
        for _, writer in (kept, late, *silent):
            writer.close()

    visit(work, http=Few)


def test_what_is_served_is_served_by_bounded_connections() -> None:
    limits = DeskLimits(num_slots=1)
    options = ServeOptions(host="::1", port=0, token=None, limits=limits, drain_seconds=1)
    config = server_config(lambda: None, options)
    assert config.http is BoundedConnection
    assert config.limit_concurrency is not None
