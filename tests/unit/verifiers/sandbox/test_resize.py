"""A sandbox with more and fewer cells while jobs run: each is answered once, and by its program."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
from sandbox_lab import job, make_pool, strongest

from headrace.verifiers.sandbox.execution import Execution, Limits
from headrace.verifiers.sandbox.pool import SandboxPool

PATIENCE_SECONDS = 240.0
SPINNING = Limits(cpu_seconds=900, wall_seconds=900)


@pytest.fixture
def single() -> Iterator[SandboxPool]:
    pool = make_pool(strongest())
    yield pool
    pool.close_blocking()
    assert pool.process_ids == ()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - cells tell nobody
        await asyncio.sleep(0.01)


def spinning(pool: SandboxPool, count: int) -> list[asyncio.Task[Execution]]:
    made = (job("while True: pass", limits=SPINNING) for _ in range(count))
    return [asyncio.create_task(pool.run(one)) for one in made]


async def cancel(tasks: list[asyncio.Task[Execution]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_more_cells_take_what_waits_at_once(single: SandboxPool) -> None:
    async def grow() -> None:
        jobs = spinning(single, 3)
        await until(lambda: len(single.process_ids) == 1)
        await single.resize(3)
        await until(lambda: len(single.process_ids) == 3)
        await cancel(jobs)

    asyncio.run(grow())
    assert single.num_workers == 3


def test_a_cell_too_many_goes_once_its_job_has_ended_and_not_before(single: SandboxPool) -> None:
    async def shrink() -> None:
        await single.resize(3)
        jobs = spinning(single, 3)
        await until(lambda: len(single.process_ids) == 3)
        resize = asyncio.ensure_future(single.resize(1))
        await until(lambda: single.num_workers == 1)
        await asyncio.sleep(0.05)
        assert not resize.done()
        await cancel(jobs[:2])
        await resize
        assert not jobs[2].done()
        await cancel(jobs[2:])
        assert (await single.run(job("print(1)"))).stdout == b"1\n"
        assert len(single.process_ids) == 1

    asyncio.run(shrink())


@pytest.mark.parametrize("seed", range(2))
def test_every_job_is_answered_by_its_own_program_however_cells_come_and_go(
    single: SandboxPool, seed: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - no secret

    async def work() -> list[Execution]:
        calls, resizes = [], []
        for k in range(24):
            calls.append(asyncio.ensure_future(single.run(job(f"print({k})"))))
            if dice.random() < 0.3:
                resizes.append(asyncio.ensure_future(single.resize(dice.randint(1, 3))))
            if dice.random() < 0.3:
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        found = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_SECONDS)
        await asyncio.gather(*resizes)
        return found

    assert [int(done.stdout) for done in asyncio.run(work())] == list(range(24))


def test_who_waits_for_fewer_cells_is_let_go_when_the_pool_is_closed(single: SandboxPool) -> None:
    async def close() -> None:
        await single.resize(2)
        jobs = spinning(single, 2)
        await until(lambda: len(single.process_ids) == 2)
        resize = asyncio.ensure_future(single.resize(1))
        await until(lambda: single.num_workers == 1)
        await single.close()
        await resize
        await asyncio.wait(jobs)

    asyncio.run(close())
