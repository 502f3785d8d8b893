import asyncio
import contextlib

from headrace.verifiers.slots import SlotFigures, Slots, slot_metrics


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_jobs_queue_for_places_and_every_figure_says_so() -> None:
    clock = Clock()
    slots = Slots(2, clock=clock)

    async def job(end: asyncio.Event) -> None:
        async with slots.taken():
            await end.wait()

    async def run() -> SlotFigures:
        end = asyncio.Event()
        jobs = [asyncio.create_task(job(end)) for _ in range(5)]
        await turns()
        clock.now += 3.0
        end.set()
        await asyncio.gather(*jobs)
        clock.now += 1.0
        return slots.read()

    figures = asyncio.run(run())
    assert figures.max_waiting == 3
    assert figures.num_jobs == 5
    assert figures.busy_seconds == 6.0
    assert figures.elapsed_seconds == 4.0
    assert slot_metrics("verifier/kind/x", [figures])["verifier/kind/x/slots/utilisation"] == 0.75


def test_work_that_goes_on_is_counted_in_each_reading() -> None:
    clock = Clock()
    slots = Slots(1, clock=clock)

    async def run() -> list[float]:
        found = []
        async with slots.taken():
            clock.now += 2.0
            found.append(slots.read().busy_seconds)
            clock.now += 3.0
        found.append(slots.read().busy_seconds)
        return found

    assert asyncio.run(run()) == [2.0, 3.0]


def test_a_job_that_is_cancelled_frees_its_place_and_is_counted_apart() -> None:
    slots = Slots(1)

    async def job() -> None:
        async with slots.taken():
            await asyncio.Event().wait()

    async def run() -> None:
        working, waiting = asyncio.create_task(job()), asyncio.create_task(job())
        await turns()
        for task in (waiting, working):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        async with asyncio.timeout(60), slots.taken():
            pass

    asyncio.run(run())
    figures = slots.read()
    assert (figures.num_cancelled, figures.num_jobs) == (2, 1)


def test_a_job_that_fails_has_ended_all_the_same() -> None:
    slots = Slots(1)

    async def run() -> None:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                async with slots.taken():
                    raise ValueError

    asyncio.run(run())
    assert slots.read().num_jobs == 3
    assert slots.read().num_jobs == 0


def test_the_places_of_one_kind_are_told_together() -> None:
    one = SlotFigures(
        num_slots=1,
        elapsed_seconds=1.0,
        busy_seconds=0.5,
        num_jobs=50,
        max_waiting=2,
        num_cancelled=1,
        num_retries=3,
    )
    assert slot_metrics("verifier/kind/judge", [one, one]) == {
        "verifier/kind/judge/slots/num_jobs": 100.0,
        "verifier/kind/judge/slots/num_cancelled": 2.0,
        "verifier/kind/judge/slots/num_retries": 6.0,
        "verifier/kind/judge/slots/max_waiting": 2.0,
        "verifier/kind/judge/slots/utilisation": 0.5,
    }


def test_places_that_come_between_two_readings_count_for_as_long_as_they_were_there() -> None:
    now = [0.0]
    slots = Slots(2, clock=lambda: now[0])
    now[0] = 3.0
    slots.note_count(6)
    now[0] = 4.0
    assert slots.read().num_slots == 3.0
    now[0] = 5.0
    assert slots.read().num_slots == 6
