"""Deadlines do not run out while this process stands still."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.patience import LOOKS, wait_patiently

SECONDS = 1000.0


class Clock:
    """The event loop's, which may be set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            true_time = loop.time
            loop.time = lambda: true_time() + self.ahead  # type: ignore[method-assign]
            await work()

        asyncio.run(main())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_hours_in_which_the_process_stood_still_are_not_held_against_anybody() -> None:
    clock = Clock()

    async def work() -> None:
        answer = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(wait_patiently({answer}, SECONDS))
        await turns(3)
        clock.ahead += 100 * SECONDS
        await turns(10)
        assert not waiting.done()
        answer.set_result(None)
        assert not await waiting

    clock.run(work)


def test_what_never_answers_is_late_once_the_time_has_passed() -> None:
    clock = Clock()

    async def work() -> None:
        answer = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(wait_patiently({answer}, SECONDS))
        for look in itertools.count():
            await turns(5)
            if waiting.done():
                break
            assert look < LOOKS
            clock.ahead += SECONDS / LOOKS
        assert await waiting == {answer}
        assert not answer.done()

    clock.run(work)


@pytest.mark.parametrize("stops", [True, False])
def test_a_failure_ends_the_wait_for_the_others_where_it_is_to(stops: bool) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        one, other = loop.create_future(), loop.create_future()
        waiting = asyncio.ensure_future(
            wait_patiently([one, other], SECONDS, stops_at_failure=stops)
        )
        await turns(3)
        one.set_exception(ValueError("no"))
        await turns(5)
        assert waiting.done() == stops
        if not stops:
            other.set_result(None)
        assert await waiting == ({other} if stops else set())

    Clock().run(work)


def test_nothing_to_wait_for_is_no_wait() -> None:
    async def work() -> None:
        assert not await wait_patiently([], SECONDS)

    Clock().run(work)
