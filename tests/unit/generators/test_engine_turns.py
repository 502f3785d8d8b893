"""Every command is answered, whatever breaks: a turn, an answer, the compute thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators import TorchGenerator, torch_generator
from headrace.types import OnUpdate, WeightUpdate

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

HANG_SECONDS = 240
STALL_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _stalls_are_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_generator, "STALL_SECONDS", STALL_SECONDS)


def check(lab: Lab, work: Callable[[TorchGenerator], Awaitable[None]], **options: object) -> None:
    """Run ``work`` with a generator that holds version 1 and that ``work`` closes."""

    async def main() -> None:
        generator = lab.generator(lab.config(), **options)
        await generator.update_weights(lab.update(lab.decoder()))
        await asyncio.wait_for(work(generator), HANG_SECONDS)

    asyncio.run(main())


async def fails(lab: Lab, generator: TorchGenerator, name: str, **kw: object) -> str:
    with pytest.raises(GeneratorFailure) as caught:
        await lab.collect(generator, [lab.request(name, **kw)])
    return str(caught.value)


async def refuses_weights(lab: Lab, generator: TorchGenerator) -> str:
    with pytest.raises(WeightSyncError) as caught:
        await generator.update_weights(lab.update(lab.decoder(1), 2))
    return str(caught.value)


def test_a_turn_that_breaks_answers_everything_with_the_cause(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(_ids: Sequence[int]) -> str:
        raise KeyError(0)

    def clear() -> None:
        msg = "no memory to clear"
        raise MemoryError(msg)

    async def work(generator: TorchGenerator) -> None:
        monkeypatch.setattr(generator._engine._engine, "clear", clear)
        calls = [fails(lab, generator, name, max_tokens=20) for name in "abc"]
        found = await asyncio.gather(*calls, refuses_weights(lab, generator))
        assert all("MemoryError: no memory to clear" in words for words in found)
        later = await fails(lab, generator, "d")
        assert "MemoryError" in later
        assert "make a new generator" in later
        assert "MemoryError" in await refuses_weights(lab, generator)
        with pytest.raises(GeneratorFailure, match="MemoryError"):
            await generator.pause()
        await generator.close()

    check(lab, work, decode=decode)


@pytest.mark.parametrize("paused", [False, True])
def test_a_compute_thread_that_is_closed_first_leaves_no_call_open(
    lab: Lab, *, paused: bool
) -> None:
    async def work(generator: TorchGenerator) -> None:
        lab.slow_down(generator, 0.1)
        call = asyncio.ensure_future(fails(lab, generator, "a", size=400, max_tokens=60))
        while generator._engine.num_steps < 2:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        if paused:
            await generator.pause()
        await asyncio.to_thread(lab.threads[-1].close)
        if paused:
            assert "compute thread" in await fails(lab, generator, "b")
        assert "the compute thread generator was closed" in await call
        assert "compute thread" in await fails(lab, generator, "c")
        assert "compute thread" in await refuses_weights(lab, generator)
        await generator.close()

    check(lab, work)


def test_an_idle_generator_closes_after_its_compute_thread(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        await asyncio.to_thread(lab.threads[-1].close)
        await generator.close()
        assert "closed" in await fails(lab, generator, "a")

    check(lab, work)


def test_a_close_that_an_engine_step_holds_up_says_so(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, stuck = threading.Event(), threading.Event()

    def decode(_ids: Sequence[int]) -> str:
        entered.set()
        stuck.wait(HANG_SECONDS)
        return ""

    async def work(generator: TorchGenerator) -> None:
        call = asyncio.ensure_future(fails(lab, generator, "a", size=2, max_tokens=60))
        first = asyncio.ensure_future(lab.collect(generator, [lab.request("b", max_tokens=1)]))
        await asyncio.to_thread(entered.wait, HANG_SECONDS)
        monkeypatch.setattr(torch_generator, "STALL_SECONDS", 0.1)
        with pytest.raises(GeneratorFailure, match="has not ended"):
            await generator.close()
        monkeypatch.setattr(torch_generator, "STALL_SECONDS", STALL_SECONDS)
        stuck.set()
        await generator.close()
        assert "closed" in await call
        await first

    check(lab, work, decode=decode)


def test_an_update_given_up_while_it_loads_holds_its_caller_and_nobody_else(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stuck = threading.Event(), threading.Event()

    def load(_update: WeightUpdate, _on_update: OnUpdate) -> None:
        begun.set()
        stuck.wait(HANG_SECONDS)

    async def work(generator: TorchGenerator) -> None:
        monkeypatch.setattr(generator._engine._engine, "load", load)
        update = lab.update(lab.decoder(), 2)
        call = asyncio.ensure_future(generator.update_weights(update))
        await asyncio.to_thread(begun.wait, HANG_SECONDS)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0.01)
            assert not call.done()
        stuck.set()
        await asyncio.wait({call})
        assert call.cancelled()
        await generator.close()

    check(lab, work)


def test_an_abort_that_fails_hands_nothing_back_and_nothing_comes_twice(lab: Lab) -> None:
    faulty = False
    num_decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += faulty
        if faulty and num_decoded > 1:
            raise KeyError(0)
        return lab.decode(ids)

    async def work(generator: TorchGenerator) -> None:
        nonlocal faulty
        in_haste = lab.slow_down(generator, 0.1)
        first = asyncio.ensure_future(fails(lab, generator, "a", size=400, max_tokens=60))
        while generator._engine.num_steps < 2:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        update = asyncio.ensure_future(generator.update_weights(lab.update(lab.decoder(1), 2)))
        await asyncio.sleep(0)
        behind = [lab.request("b"), lab.request("c")]
        call = asyncio.ensure_future(lab.collect(generator, behind))
        await asyncio.sleep(0)
        faulty = True
        with pytest.raises(GeneratorFailure, match="KeyError"):
            await generator.abort(["b", "c"])
        faulty = False
        in_haste.set()
        assert "KeyError" in await first
        await update
        found = await call
        assert {g.rollouts[0].finish_reason for g in found.values()} == {"length"}
        await generator.close()

    check(lab, work, decode=decode)
