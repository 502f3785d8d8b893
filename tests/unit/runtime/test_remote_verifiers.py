"""What `headrace check` says of the servers that a recipe names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from verifier_site import FakeExecutor, serving

from headrace.config import RemoteConfig
from headrace.runtime.remote_verifiers import remote_findings
from headrace.verifiers.remote.server import Gate
from headrace.verifiers.sandbox.execution import Tier

NOBODY = "http://127.0.0.1:9"
TOKEN = "0123456789abcdef"


@contextmanager
def server(tier: Tier = Tier.CELL) -> Iterator[str]:
    """Serve from a thread, because what is tested has an event loop of its own."""
    ready, end = threading.Event(), asyncio.Event()
    urls: list[str] = []
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with serving(FakeExecutor(tier), gate=Gate(token=TOKEN)) as (url, _):
            urls.append(url)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(20.0)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(20.0)
        loop.close()


def findings(*urls: str, **options: object) -> tuple[list[str], list[str]]:
    config = RemoteConfig(endpoints=urls, token_env="T", health_seconds=2.0, **options)
    problems, notes = remote_findings(config, {"T": TOKEN})
    return list(problems), list(notes)


def test_endpoints_that_are_well_are_not_spoken_of() -> None:
    with server() as url:
        assert findings(url) == ([], [])


def test_where_none_answers_it_is_a_problem_with_what_to_do() -> None:
    ((problem,), notes) = findings(NOBODY)
    assert problem.startswith("verifier.remote.endpoints: http://127.0.0.1:9: ConnectError")
    assert "start `headrace serve-verifiers`" in problem
    assert not notes


def test_one_that_is_down_beside_one_that_is_well_is_a_note() -> None:
    with server() as url:
        problems, (note,) = findings(NOBODY, url)
    assert not problems
    assert NOBODY in note


def test_one_that_isolates_too_little_is_a_problem_beside_one_that_is_well() -> None:
    with server() as good, server(Tier.LOCK) as bad:
        (problem,), notes = findings(good, bad, minimum_tier="cell")
    assert f"{bad}: it isolates by lock" in problem
    assert not notes


@pytest.mark.parametrize("environ", [{}, {"T": "another token 123"}])
def test_without_its_token_it_is_a_problem(environ: dict[str, str]) -> None:
    config = RemoteConfig(endpoints=(NOBODY,), token_env="T")
    (problem,), _ = remote_findings(config, environ)
    assert 'verifier.remote.token_env = "T"' in problem
