"""Real processes: what comes through their pipes, and how their ends are told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from pool_lab import FakeSpec, notice, request, sampled

from headrace.errors import GeneratorFailure
from headrace.generators.pool.child_proxy import ChildLauncher, ChildProxy
from headrace.generators.pool.proxy import Delivery, MemberLostError

PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _children_find_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def with_child(spec: FakeSpec, work: Callable[[ChildProxy], Awaitable[None]]) -> None:
    async def main() -> None:
        launcher = ChildLauncher(spec, deadline_seconds=PATIENCE_SECONDS)
        proxy = await launcher(member=0, incarnation=1)
        try:
            await proxy.ask("update_weights", 1, notice(3))
            await asyncio.wait_for(work(proxy), PATIENCE_SECONDS)
        finally:
            await proxy.kill()
        assert is_gone(proxy.pid)

    asyncio.run(main())


def test_groups_of_several_calls_come_through_one_pipe() -> None:
    async def work(proxy: ChildProxy) -> None:
        async def call(*names: str) -> list[Delivery]:
            return [found async for found in proxy.generate([request(name) for name in names])]

        calls = await asyncio.gather(call("a", "b"), call("c"), call("a"))
        for names, found in zip((("a", "b"), ("c",), ("a",)), calls, strict=True):
            groups = {delivery.group.group_id: delivery.group for delivery in found}
            assert groups == {name: sampled(request(name), 3) for name in names}

    with_child(FakeSpec(), work)


def test_a_refusal_arrives_as_itself_and_the_child_lives_on() -> None:
    async def work(proxy: ChildProxy) -> None:
        with pytest.raises(GeneratorFailure, match="no such request"):
            async for _ in proxy.generate([request("a", seed=1)]):
                pass
        assert (await proxy.ask("beat")).policy_version == 3

    with_child(FakeSpec({1: "refuse"}), work)


def test_what_is_not_waited_for_is_taken_back() -> None:
    async def work(proxy: ChildProxy) -> None:
        await proxy.ask("pause")
        async with aclosing(proxy.generate([request("a")])) as groups:
            waiting = asyncio.ensure_future(anext(groups))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait({waiting})
        await proxy.ask("resume")
        assert (await proxy.ask("beat")).policy_version == 3

    with_child(FakeSpec(), work)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_ends_whatever_was_asked_and_is_named(number: signal.Signals) -> None:
    async def work(proxy: ChildProxy) -> None:
        await proxy.ask("pause")

        async def call() -> None:
            async for _ in proxy.generate([request("a")]):
                pass

        waiting = asyncio.ensure_future(call())
        await asyncio.sleep(0.01)
        os.kill(proxy.pid, number)
        with pytest.raises(MemberLostError, match=f"was killed by {number.name}"):
            await waiting
        with pytest.raises(MemberLostError, match=f"was killed by {number.name}"):
            await proxy.ask("beat")

    with_child(FakeSpec(), work)


def test_an_exit_is_told_with_the_last_words() -> None:
    async def work(proxy: ChildProxy) -> None:
        with pytest.raises(MemberLostError, match=r"exit status 3; its last words: .*on fire"):
            async for _ in proxy.generate([request("a", seed=1)]):
                pass

    with_child(FakeSpec({1: "exit"}), work)


@pytest.mark.parametrize(
    ("start", "words"),
    [("exit", "exit status 5"), ("refuse", "there is no such model"), ("hang", "within 3 s")],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(start: str, words: str) -> None:
    async def main() -> None:
        # Long enough for Python to be there, or the wrong thing would be late.
        deadline = 3.0 if start == "hang" else PATIENCE_SECONDS
        launcher = ChildLauncher(FakeSpec(start=start), deadline_seconds=deadline)
        with pytest.raises(MemberLostError, match=f"generator 4 did not start: .*{words}"):
            await launcher(member=4, incarnation=1)

    asyncio.run(main())
