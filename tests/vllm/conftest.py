from __future__ import annotations

import asyncio
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_lab import VllmLab

from headrace.generators.vllm import VllmGenerator

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # An engine takes a quarter of a minute to start, and many times that on a busy machine.
            item.add_marker(pytest.mark.timeout(1200))
            # What vLLM and what it imports warn of is theirs.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip("vLLM is not installed: make test-vllm"))


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with asyncio.Runner() as runner:
            yield runner


@pytest.fixture(scope="session")
def lab(runner: asyncio.Runner) -> VllmLab:
    return VllmLab(runner)


@pytest.fixture(scope="session")
def shared(lab: VllmLab) -> Iterator[VllmGenerator]:
    """One engine for all tests that leave it whole; each gives it weights of its own."""
    generator = lab.generator()
    yield generator
    lab.run(generator.close())
