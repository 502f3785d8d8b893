"""The desk: how much runs and waits, what runs once, and what nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verifier_site import FakeExecutor, job, until

from headrace.verifiers.remote.desk import DeskFullError, DeskLimits, JobDesk
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Tier


def run(work: Callable[[JobDesk, FakeExecutor], Awaitable[None]], **limits: Any) -> None:  # noqa: ANN401 - of DeskLimits
    async def main() -> None:
        executor = FakeExecutor()
        desk = JobDesk(executor, Tier.CELL, DeskLimits(**{"num_slots": 2, **limits}))
        await asyncio.wait_for(work(desk, executor), 120.0)
        await desk.close()
        assert executor.num_running == 0
        assert not desk._open
        assert not desk._tasks

    asyncio.run(main())


def test_one_job_asked_by_two_runs_once() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        asked = [asyncio.create_task(desk.run(job("wait\nprint 7"))) for _ in range(2)]
        await until(lambda: bool(executor.begun))
        executor.let_go.set()
        first, second = await asyncio.gather(*asked)
        assert first is second
        assert executor.begun == ["a"]
        assert desk.counts.num_repeated == 1

    run(work)


def test_a_job_asked_again_later_is_remembered() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        assert await desk.run(job()) is await desk.run(job())
        assert executor.begun == ["a"]

    run(work)


def test_another_program_under_the_same_id_is_another_job() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        await desk.run(job("print 1"))
        other = await desk.run(job("print 2"))
        assert other.stdout == b"2\n"
        await desk.run(job("print 2", stdin=b"x"))
        await desk.run(job("print 2", files={"x": b""}))
        assert len(executor.begun) == 4

    run(work)


def test_an_executor_never_meets_one_id_for_two_programs_at_once() -> None:
    class Strict(FakeExecutor):
        ids: dict[str, str] = {}  # noqa: RUF012 - one instance

        async def run(self, job: Job) -> Execution:
            assert self.ids.setdefault(job.job_id, job.source) == job.source
            return await super().run(job)

    async def main() -> None:
        desk = JobDesk(Strict(), Tier.CELL, DeskLimits(num_slots=2))
        asked = (desk.run(job(f"sleep 0.01\nprint {n}")) for n in range(2))
        answers = await asyncio.gather(*asked)
        assert [(one.job_id, one.stdout) for one in answers] == [("a", b"0\n"), ("a", b"1\n")]

    asyncio.run(main())


@pytest.mark.parametrize("source", ["infra broken", "raise"])
def test_our_own_failure_is_told_and_not_remembered(source: str) -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        for _ in range(2):
            execution = await desk.run(job(source))
            assert execution.ending is Ending.INFRA
            assert execution.detail
        assert executor.begun == ["a", "a"]
        assert desk.counts.num_infra == 2

    run(work)


def test_beyond_slots_and_queue_a_job_is_turned_away_until_there_is_room() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        asked = [asyncio.create_task(desk.run(job("wait", str(n)))) for n in range(5)]
        await until(lambda: executor.num_running == 2)
        assert desk.num_queued == 3
        with pytest.raises(DeskFullError) as full:
            await desk.run(job("wait", "one more"))
        assert 0.0 < full.value.retry_after_seconds <= 10.0
        joining = asyncio.create_task(desk.run(job("wait", "0")))  # takes no room
        executor.let_go.set()
        await asyncio.gather(*asked, joining)
        await desk.run(job("wait", "one more"))
        assert executor.most_running == 2
        assert desk.counts.num_refused == 1

    run(work, max_queued=3)


def test_a_job_that_nobody_waits_for_any_more_is_ended_and_its_slot_is_free() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        first, second = (asyncio.create_task(desk.run(job("wait"))) for _ in range(2))
        await until(lambda: bool(executor.begun))
        first.cancel()
        await asyncio.wait([first])
        assert executor.cancelled == [], "another caller waits for it"
        second.cancel()
        await until(lambda: executor.cancelled == ["a"])
        assert desk.counts.num_cancelled == 1
        await desk.run(job("print 1", "b"))

    run(work, num_slots=1)


def test_a_job_that_waits_and_is_given_up_never_begins() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        running = asyncio.create_task(desk.run(job("wait", "runs")))
        waiting = asyncio.create_task(desk.run(job("wait", "waits")))
        await until(lambda: desk.num_queued == 1)
        waiting.cancel()
        await until(lambda: desk.num_queued == 0)
        executor.let_go.set()
        await running
        assert executor.begun == ["runs"]

    run(work, num_slots=1)


def test_a_job_asked_again_while_it_is_being_ended_runs_anew() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        asked = asyncio.create_task(desk.run(job("wait")))
        await until(lambda: bool(executor.begun))
        asked.cancel()
        again = asyncio.create_task(desk.run(job("wait")))
        executor.let_go.set()
        assert (await again).ending is Ending.EXITED

    run(work, num_slots=1)


def test_what_is_remembered_is_bounded_in_number_and_in_bytes() -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        for n in range(10):
            await desk.run(job("spill 1000", str(n)))
        assert len(desk._remembered) == 3
        await desk.run(job("spill 4000", "large"))
        assert len(desk._remembered) == 1
        await desk.run(job("spill 9000", "larger than all room"))
        assert not desk._remembered
        assert desk._remembered_bytes == 0
        assert len(executor.begun) == 12

    run(work, max_remembered=3, max_remembered_bytes=6000)


def test_the_bytes_of_requests_are_bounded_and_given_back() -> None:
    async def work(desk: JobDesk, _executor: FakeExecutor) -> None:
        with desk.holding(600):
            with pytest.raises(DeskFullError), desk.holding(500):
                pass
            with desk.holding(400):
                pass
        with desk.holding(1000):
            pass

    run(work, max_held_bytes=1000)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_no_schedule_exceeds_the_bounds_or_loses_an_answer_or_a_slot(
    data: st.DataObject, num_slots: int, max_queued: int
) -> None:
    async def work(desk: JobDesk, executor: FakeExecutor) -> None:
        asked: list[asyncio.Task[Any]] = []
        for _ in range(data.draw(st.integers(1, 25))):
            match data.draw(st.sampled_from(["ask", "ask", "give up", "let go", "turn"])):
                case "ask":
                    name = str(data.draw(st.integers(0, 6)))
                    asked.append(asyncio.create_task(desk.run(job("wait", name))))
                case "give up" if asked:
                    data.draw(st.sampled_from(asked)).cancel()
                case "let go":
                    executor.let_go.set()
                    await asyncio.sleep(0)
                    executor.let_go.clear()
                case _:
                    await asyncio.sleep(0)
            assert executor.num_running <= num_slots
            assert desk.num_queued <= max_queued + num_slots
            assert len(desk._tasks) <= max_queued + num_slots
        executor.let_go.set()
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if not isinstance(answer, DeskFullError | asyncio.CancelledError):
                assert answer.ending is Ending.EXITED

    run(work, num_slots=num_slots, max_queued=max_queued)
