"""Servers as processes: how they begin, drain and die."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import verifier_site
from verifier_site import job

from headrace.config import RemoteConfig
from headrace.errors import ConfigError
from headrace.verifiers.remote.desk import DeskLimits
from headrace.verifiers.remote.executor import RemoteExecutor
from headrace.verifiers.remote.serving import (
    ServeOptions,
    check_certificate,
    listening,
    read_token,
)
from headrace.verifiers.remote.wire import HEALTH_PATH, Health
from headrace.verifiers.sandbox.execution import Ending, Execution

START_SECONDS = 60.0
TOKEN = "0123456789abcdef"


class Servers:
    """Processes that serve a fake executor."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int) -> list[str]:
        """Start ``count`` and return their addresses once they answer."""
        files = [self._directory / f"{len(self.processes) + n}.url" for n in range(count)]
        for file in files:
            command = [sys.executable, verifier_site.__file__, str(file), TOKEN]
            self.processes.append(subprocess.Popen(command))
        return [self._url(file) for file in files]

    def _url(self, file: Path) -> str:
        deadline = time.monotonic() + START_SECONDS
        while not file.exists():
            assert time.monotonic() < deadline, "a server did not start"
            time.sleep(0.01)
        return file.read_text(encoding="utf-8")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    for process in servers.processes:
        process.kill()
        process.wait()


async def num_running(url: str) -> int:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
        return Health.model_validate_json((await http.get(HEALTH_PATH)).content).num_running


@contextlib.asynccontextmanager
async def remote(*urls: str):  # noqa: ANN201 - an async iterator
    executor = RemoteExecutor(RemoteConfig(endpoints=urls, patience_seconds=60.0), TOKEN)
    try:
        yield executor
    finally:
        await executor.close()


def test_what_runs_when_a_server_is_told_to_end_is_still_answered(servers: Servers) -> None:
    (url,) = servers.start(1)

    async def work() -> tuple[Execution, Execution]:
        async with remote(url) as executor:
            await executor.run(job("print 1", "first"))
            running = asyncio.create_task(executor.run(job("sleep 1\nprint 7", "runs")))
            while await num_running(url) == 0:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            servers.processes[0].send_signal(signal.SIGTERM)
            done = await running
        async with remote(url) as executor:
            executor._config = RemoteConfig(endpoints=(url,), patience_seconds=0.1)
            return done, await executor.run(job("print 1", "later", limits=BRIEF))

    done, later = asyncio.run(work())
    assert done.stdout == b"7\n"
    assert later.ending is Ending.INFRA
    assert servers.processes[0].wait(120.0) == 0


BRIEF = verifier_site.Limits(wall_seconds=0.1)


def test_servers_killed_in_the_middle_cost_no_job(servers: Servers) -> None:
    urls = servers.start(2)

    async def work() -> list[Execution]:
        async with remote(*urls) as executor:
            asked = [
                asyncio.create_task(executor.run(job("sleep 0.02\nprint 1", str(n))))
                for n in range(60)
            ]
            for process in servers.processes[:1]:
                await asyncio.sleep(0.1)
                process.kill()
            return await asyncio.gather(*asked)

    answers = asyncio.run(work())
    assert {one.ending for one in answers} == {Ending.EXITED}
    assert [one.job_id for one in answers] == [str(n) for n in range(60)]


def options(host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> ServeOptions:
    limits = DeskLimits(num_slots=1)
    return ServeOptions(host=host, port=port, token=token, limits=limits, drain_seconds=1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="--token-file"), listening(options(host)):
        pass
    if host == "0.0.0.0":
        with listening(options(host, token=TOKEN)) as listener:
            assert listener.getsockname()[0] == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_alone_may_be_served_without_one(host: str) -> None:
    with listening(options(host)) as listener:
        port = listener.getsockname()[1]
        taken = pytest.raises(ConfigError, match=rf"--port {port}: .*another")
        with taken, listening(options("127.0.0.1", port)):
            pass


def test_a_host_that_does_not_exist_is_an_error_of_the_user() -> None:
    unknown = pytest.raises(ConfigError, match=r"--host host\.invalid")
    with unknown, listening(options("host.invalid")):
        pass


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file=file, variable=None, environ={}) == TOKEN
    assert read_token(file=None, variable="T", environ={"T": TOKEN}) == TOKEN
    assert read_token(file=None, variable=None, environ={"T": TOKEN}) is None


@pytest.mark.parametrize("text", ["", "short", "sixteen letters!", "ümlautümlautümlaut"])
def test_what_is_no_token_is_refused_without_being_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    for source in ({"file": file, "variable": None}, {"file": None, "variable": "T"}):
        with pytest.raises(ConfigError, match="--token-") as error:
            read_token(**source, environ={"T": text})
        assert not text or text not in str(error.value)


def test_a_token_from_two_places_or_from_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        read_token(file=tmp_path, variable="T", environ={})
    with pytest.raises(ConfigError, match="--token-file"):
        read_token(file=tmp_path / "absent", variable=None, environ={})
    with pytest.raises(ConfigError, match="--token-env T"):
        read_token(file=None, variable="T", environ={})


def test_a_certificate_that_cannot_be_used_is_an_error_before_anything_is_bound(
    tmp_path: Path,
) -> None:
    check_certificate(options())
    file = tmp_path / "certificate.pem"
    file.write_text("no PEM")
    for changes in ({"certificate": file}, {"certificate": tmp_path / "absent"}, {"key": file}):
        with pytest.raises(ConfigError, match=r"--certificate .* --key "):
            check_certificate(replace(options(), **changes))
