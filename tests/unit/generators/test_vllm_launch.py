"""A start of vLLM that is given up, and calls to one that answers wrongly or not in time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import GeneratorFailure
from headrace.generators.vllm import VllmSettings
from headrace.generators.vllm import launch as launching
from headrace.generators.vllm.engine import UpdateRefused, VllmEngine
from headrace.generators.vllm.launch import Launch, Launched
from headrace.generators.vllm.processes import ProcessTree, is_running
from headrace.generators.vllm.segment import Segment
from headrace.models.weights import weight_update

SETTINGS = VllmSettings(model=Path(), dtype=torch.float32)
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class FakeClient:
    """Comes up as the test says."""

    come_up: Callable[[FakeClient], None]
    made: list[FakeClient]
    import_ends: threading.Event

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.was_shut_down = False
        manager = types.SimpleNamespace(processes=[])
        resources = types.SimpleNamespace(engine_manager=manager, engine_dead=False)
        self.engine_core = types.SimpleNamespace(resources=resources)

    @classmethod
    def from_engine_args(cls, _arguments: object) -> FakeClient:
        client = cls()
        cls.made.append(client)
        cls.come_up(client)
        return client

    def shutdown(self, _timeout: float) -> None:
        self.was_shut_down = True


Start = Callable[[Callable[[FakeClient], None]], Launch]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Start:
    def client_type() -> type[FakeClient]:
        FakeClient.import_ends.wait(30.0)
        return FakeClient

    monkeypatch.setattr(launching, "_client_type", client_type)
    monkeypatch.setattr(launching, "_engine_arguments", lambda _: None)
    monkeypatch.setattr(launching, "_TICK_SECONDS", 0.01)

    def made(come_up: Callable[[FakeClient], None]) -> Launch:
        FakeClient.come_up, FakeClient.made = staticmethod(come_up), []
        FakeClient.import_ends = threading.Event()
        return Launch(SETTINGS)

    return made


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not holds():  # noqa: ASYNC110 - the product has no event for tests
            await asyncio.sleep(0.01)


def test_a_start_that_is_given_up_while_vllm_is_imported_starts_no_engine(launch: Start) -> None:
    start = launch(lambda _: None)

    async def main() -> None:
        with pytest.raises(
            GeneratorFailure, match=r"not ready after .*start_deadline_seconds = 0\.0"
        ):
            await start.run(0.01)
        FakeClient.import_ends.set()
        await until(lambda: not start._directory.exists())

    asyncio.run(main())
    assert not FakeClient.made


def test_a_start_that_is_cancelled_kills_the_engine_that_it_waits_for(launch: Start) -> None:
    def wait_for_ever(client: FakeClient) -> None:
        client.child = subprocess.Popen(SLEEP)
        assert client.child.wait(30.0) < 0
        msg = "the core died"
        raise RuntimeError(msg)

    start = launch(wait_for_ever)
    other = subprocess.Popen(SLEEP)

    async def main() -> None:
        FakeClient.import_ends.set()
        run = asyncio.ensure_future(start.run(60.0))
        await until(lambda: bool(FakeClient.made and FakeClient.made[0].child))
        run.cancel()
        await asyncio.wait({run})
        await until(lambda: not start._directory.exists())

    try:
        asyncio.run(main())
        assert is_running(other.pid), "what the start did not start is not its to kill"
    finally:
        other.kill()
        other.wait()


def test_an_engine_that_comes_up_after_its_start_was_given_up_is_shut_down(launch: Start) -> None:
    came_up = threading.Event()
    start = launch(lambda _: assert_soon(came_up))

    async def main() -> None:
        FakeClient.import_ends.set()
        run = asyncio.ensure_future(start.run(60.0))
        await until(lambda: bool(FakeClient.made))
        run.cancel()
        await asyncio.wait({run})
        came_up.set()
        await until(lambda: not start._directory.exists())

    asyncio.run(main())
    assert FakeClient.made[0].was_shut_down


def assert_soon(event: threading.Event) -> None:
    assert event.wait(30.0)


def test_temporary_files_of_an_engine_are_in_a_folder_of_its_own(launch: Start) -> None:
    seen: list[str] = []
    start = launch(lambda _: seen.extend((os.environ["TMPDIR"], os.environ["VLLM_RPC_BASE_PATH"])))
    FakeClient.import_ends.set()
    launched = asyncio.run(start.run(60.0))
    assert seen == [str(launched.directory)] * 2
    assert launched.directory.is_dir()
    assert os.environ.get("TMPDIR") != str(launched.directory)
    launched.directory.rmdir()


class FakeCalls:
    """What `VllmEngine` calls of an AsyncLLM."""

    errored = False
    output_handler = None

    def __init__(self, num_unread: int = 0) -> None:
        self.num_unread = num_unread
        self.calls: list[str] = []
        resources = types.SimpleNamespace(engine_dead=False)
        self.engine_core = types.SimpleNamespace(resources=resources)
        self.output_processor = types.SimpleNamespace(propagate_error=lambda _: None)

    async def start_weight_update(self) -> None:
        self.calls.append("start")

    async def collective_rpc(self, name: str, kwargs: object = None) -> list[dict[str, int]]:
        del kwargs
        self.calls.append(name)
        return [{"num_unread": self.num_unread}]

    async def finish_weight_update(self, version: str) -> None:
        self.calls.append(f"finish {version}")

    async def add_request(self, request_id: str, *_: object) -> None:
        self.calls.append(f"add {request_id}")
        await asyncio.Event().wait()

    async def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")

    def shutdown(self, _timeout: float) -> None:
        self.calls.append("shutdown")


def with_engine(
    client: FakeCalls, folder: Path, work: Callable[[VllmEngine], Awaitable[None]]
) -> None:
    async def main() -> None:
        launched = Launched(client=client, roots=(), directory=folder)
        engine = VllmEngine(launched, SETTINGS, ProcessTree.below(()))
        try:
            await work(engine)
        finally:
            await engine.end()

    asyncio.run(main())
    assert client.calls[-1] == "shutdown"
    assert not folder.exists()


def test_weights_that_could_not_be_read_back_are_refused(tmp_path: Path) -> None:
    segment = Segment(weight_update(1, {"w": torch.ones(1)}))

    async def work(engine: VllmEngine) -> None:
        with pytest.raises(UpdateRefused, match="2 of the published tensors could not be read"):
            await engine.load(segment)

    folder = tmp_path / "engine"
    folder.mkdir()
    with_engine(FakeCalls(num_unread=2), folder, work)
    segment.close()


def test_a_request_that_is_cancelled_while_it_is_handed_over_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: Any = types.ModuleType("vllm.inputs.engine")
    inputs.tokens_input = lambda ids, cache_salt: (ids, cache_salt)
    for name in ("vllm", "vllm.inputs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", inputs)
    client = FakeCalls()

    async def work(engine: VllmEngine) -> None:
        stream = engine.stream("r1", [1], None, salt="")
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: client.calls == ["add r1"])
        first.cancel()
        await asyncio.wait({first})
        assert client.calls == ["add r1", "abort r1"]

    folder = tmp_path / "engine"
    folder.mkdir()
    with_engine(client, folder, work)
