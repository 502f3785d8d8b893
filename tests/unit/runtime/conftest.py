"""A lab whose recipe can be altered, and a run that is looked at before its first step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lab import Lab, make_lab

from headrace.config import check_config
from headrace.controller import Controller
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun, preflight

Prepare = Callable[..., PreparedRun]
Look = Callable[[Controller], None]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A run sets the number of threads of the whole process: put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Shared: tests give their own output and change nothing."""
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def prepare(lab: Lab) -> Prepare:
    """Settings as ``--set`` takes them -> the lab's recipe with those, checked."""

    def make(*settings: str) -> PreparedRun:
        return preflight(check_config(lab.recipe, settings)).require()

    return make


@pytest.fixture
def start(prepare: Prepare, tmp_path: Path) -> Callable[..., Controller]:
    """Start a run with these settings and stop it before its first step.

    ``look`` is called when everything is built and nothing has begun; the controller is returned
    when all is closed again.
    """

    def make(
        *settings: str, look: Look = lambda _: None, output: str = "run", resume: bool = False
    ) -> Controller:
        seen: list[Controller] = []

        def on_start(controller: Controller) -> None:
            look(controller)
            seen.append(controller)
            controller.request_stop()

        run = LocalRun(prepared=prepare(*settings), output=tmp_path / output, resume=resume)
        asyncio.run(run.train(on_start))
        return seen[0]

    return make
