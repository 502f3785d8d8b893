"""The gate in front of the servers."""

from __future__ import annotations

import asyncio

from headrace.generators.sglang.gate import Gate


def test_it_is_open_when_nobody_holds_it_also_if_several_did() -> None:
    async def work() -> None:
        gate = Gate()
        await gate.passed()
        gate.hold("pause")
        gate.hold("update")
        waiting = asyncio.create_task(gate.passed())
        gate.release("pause")
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.release("update")
        await waiting

    asyncio.run(work())


def test_nobody_slips_through_when_it_is_shut_again_at_once() -> None:
    async def work() -> None:
        gate = Gate()
        gate.hold("pause")
        waiting = asyncio.create_task(gate.passed())
        await asyncio.sleep(0)
        gate.release("pause")
        gate.hold("update")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.release("update")
        await waiting

    asyncio.run(work())


def test_only_time_at_a_standstill_is_counted() -> None:
    gate = Gate()
    assert gate.shut_seconds == 0.0
    gate.hold("pause")
    gate.hold("pause")
    assert gate.shut_seconds > 0.0
    gate.release("pause")
    once = gate.shut_seconds
    assert gate.shut_seconds == once > 0.0
