"""The socket by which a run is scaled: who may, what is answered, what is left behind."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from headrace.errors import (
    ConfigError,
    GeneratorFailure,
    HeadraceError,
    RunDirectoryError,
    RunError,
)
from headrace.runtime import scaling
from headrace.runtime.scaling import SOCKET_FILE, listening, scale_run


class Asked:
    """What a run was asked; fails or waits where it is told to."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int]] = []
        self.error: HeadraceError | None = None
        self.came = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def scale(self, wanted: Mapping[str, int]) -> str:
        self.all += wanted.items()
        self.came.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return "; ".join(f"{number} {role} now" for role, number in wanted.items())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    # Longer than the path of a socket may be.
    directory = tmp_path / ("very" * 20) / ("long" * 20)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}", encoding="utf-8")
    return directory


def ask(directory: Path, number: int = 3, deadline: float = 60.0) -> Awaitable[str]:
    return asyncio.to_thread(
        scale_run, directory, {"generators": number}, deadline_seconds=deadline
    )


def while_listening(directory: Path, work: Callable[[Asked], Awaitable[None]]) -> None:
    async def main() -> None:
        asked = Asked()
        async with listening(directory, asked.scale):
            await work(asked)
        assert not (directory / SOCKET_FILE).exists()

    asyncio.run(main())


def test_a_run_answers_once_it_has_happened(run: Path) -> None:
    async def work(asked: Asked) -> None:
        asked.gate.clear()
        answer = asyncio.ensure_future(ask(run))
        await asked.came.wait()
        await asyncio.sleep(0.01)
        assert not answer.done()
        asked.gate.set()
        assert await answer == "3 generators now"
        assert asked.all == [("generators", 3)]

    while_listening(run, work)


def test_only_its_own_user_may_open_the_socket(run: Path) -> None:
    async def work(_: Asked) -> None:
        mode = stat.S_IMODE((run / SOCKET_FILE).stat().st_mode)
        assert mode & 0o077 == 0

    while_listening(run, work)


def test_another_user_is_refused_by_the_kernels_word(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(asked: Asked) -> None:
        with pytest.raises(ConfigError, match="is not the user of this run"):
            await ask(run)
        assert not asked.all

    credentials = scaling._CREDENTIALS

    class OfSomebody:
        size = credentials.size

        @staticmethod
        def unpack(raw: bytes) -> tuple[int, int, int]:
            process, _, group = credentials.unpack(raw)
            return process, 999, group

    monkeypatch.setattr(scaling, "_CREDENTIALS", OfSomebody)
    while_listening(run, work)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConfigError("not like this"), ConfigError), (GeneratorFailure("x"), RunError)],
)
def test_what_goes_wrong_is_told_and_the_run_goes_on(
    run: Path, error: HeadraceError, kind: type[HeadraceError]
) -> None:
    async def work(asked: Asked) -> None:
        asked.error = error
        with pytest.raises(kind, match=str(error)):
            await ask(run)
        asked.error = None
        assert await ask(run, 4) == "4 generators now"

    while_listening(run, work)


@pytest.mark.parametrize(
    "line",
    [b"\n", b"{}\n", b"[]\n", b"nonsense\n", b'{"generators": "4"}\n', b'{"generators": 1.5}\n',
     b'{"generators": true}\n', b"\xff\xfe\n", b'{"generators":' + b" " * 10000 + b"4}\n",
     b"[" * 4000 + b"\n"],
)  # fmt: skip
def test_nonsense_is_refused_and_reaches_nobody(run: Path, line: bytes) -> None:
    def send() -> bytes:
        with scaling._reachable(run) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60.0)
            connection.connect(path)
            connection.sendall(line)
            return connection.makefile("rb").readline()

    async def work(asked: Asked) -> None:
        assert "not a request" in json.loads(await asyncio.to_thread(send))["refused"]
        assert not asked.all
        assert await ask(run) == "3 generators now"

    while_listening(run, work)


def test_who_connects_and_says_nothing_is_let_go(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "_READ_SECONDS", 0.05)

    def wait() -> bytes:
        with scaling._reachable(run) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60.0)
            connection.connect(path)
            return connection.makefile("rb").readline()

    async def work(_: Asked) -> None:
        assert "no request came" in json.loads(await asyncio.to_thread(wait))["refused"]

    while_listening(run, work)


def test_who_does_not_wait_is_told_that_it_may_still_happen(run: Path) -> None:
    async def work(asked: Asked) -> None:
        asked.gate.clear()
        with pytest.raises(RunError, match=r"did not answer within 0\.05 s; .*may still happen"):
            await ask(run, deadline=0.05)
        asked.gate.set()
        assert await ask(run) == "3 generators now"

    while_listening(run, work)


def test_a_run_that_ends_meanwhile_is_told(run: Path) -> None:
    async def main() -> None:
        asked = Asked()
        asked.gate.clear()
        async with listening(run, asked.scale):
            answer = asyncio.ensure_future(ask(run))
            await asked.came.wait()
        with pytest.raises(RunError, match="ended before it answered"):
            await answer

    asyncio.run(main())


def test_a_long_history_of_what_went_wrong_is_told_whole(run: Path) -> None:
    async def work(asked: Asked) -> None:
        asked.error = GeneratorFailure("last words " * 5000)
        with pytest.raises(RunError) as failure:
            await ask(run)
        assert str(failure.value) == str(asked.error)

    while_listening(run, work)


def test_a_run_that_hangs_up_on_who_asks_is_told(run: Path) -> None:
    with scaling._reachable(run) as path, scaling._bound(path) as bound:
        bound.listen()
        with scaling._connected(run, 60.0) as connection:
            bound.close()
            with pytest.raises(RunError, match="ended before it answered"):
                scaling._asked(connection, b'{"generators": 2}\n', run, 60.0)


def test_what_a_killed_run_left_is_in_nobodys_way(run: Path) -> None:
    with scaling._reachable(run) as path:
        scaling._bound(path).close()
    with pytest.raises(RunDirectoryError, match="no run is at work"):
        scale_run(run, {"generators": 2}, deadline_seconds=1.0)

    async def work(_: Asked) -> None:
        assert await ask(run) == "3 generators now"

    while_listening(run, work)


def test_a_directory_without_a_run_and_one_at_rest_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        scale_run(tmp_path, {"generators": 2}, deadline_seconds=1.0)
    with pytest.raises(RunDirectoryError, match="no run is at work"):
        scale_run(run, {"generators": 2}, deadline_seconds=1.0)


@pytest.mark.parametrize(
    ("role", "number", "reason"),
    [
        ("generators", 0, "from 1 to 1024"),
        ("generators", -3, "from 1 to 1024"),
        ("generators", 5000, "from 1 to 1024"),
        ("verifiers", 0, "from 1 to 1024"),
        ("learners", 2, "no role that scales"),
    ],
)
def test_what_no_run_can_have_is_refused_before_it_is_asked(
    run: Path, role: str, number: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        scale_run(run, {role: number}, deadline_seconds=1.0)
