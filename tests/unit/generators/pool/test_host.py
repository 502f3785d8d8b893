"""A generator as its pool sees it: versions, incarnations, and whose fault it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pool_lab import FakeGenerator, FakeReader, notice, request, sampled

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.pool.host import GeneratorHost
from headrace.generators.pool.proxy import Beat, Delivery, Hosted, MemberLostError
from headrace.types import WeightNotice, WeightPart


def hosted(generator: FakeGenerator, work: Callable[[GeneratorHost], Awaitable[None]]) -> None:
    async def main() -> None:
        generator.runs.set()
        host = GeneratorHost(Hosted(generator=generator, weights=FakeReader()), incarnation=7)
        await work(host)
        await host.close()

    asyncio.run(main())


def test_what_it_delivers_carries_its_incarnation() -> None:
    async def work(host: GeneratorHost) -> None:
        await host.answer("update_weights", 1, notice(4))
        found = [delivery async for delivery in host.generate([request("a"), request("b")])]
        assert found == [
            Delivery(incarnation=7, group=sampled(request(name), 4)) for name in ("a", "b")
        ]
        beat = await host.answer("beat")
        assert beat == Beat(
            incarnation=7, policy_version=4, metrics={"generator/engine/num_asked": 2.0}
        )

    hosted(FakeGenerator(), work)


def test_a_publication_that_comes_late_is_refused_whatever_its_version() -> None:
    generator = FakeGenerator()

    async def work(host: GeneratorHost) -> None:
        await host.answer("update_weights", 5, notice(9))
        for publication in (4, 5):
            with pytest.raises(WeightSyncError, match="stale"):
                await host.answer("update_weights", publication, notice(10))
        assert generator.version == 9
        # A learner that was restarted publishes an earlier version, later.
        await host.answer("update_weights", 6, notice(3))
        assert generator.version == 3

    hosted(generator, work)


def test_weights_that_are_not_there_leave_the_old_ones() -> None:
    generator = FakeGenerator()
    lost = WeightNotice(
        parts=(WeightPart(policy_version=2, checksum=2, place="lost", num_bytes=0),)
    )

    async def work(host: GeneratorHost) -> None:
        await host.answer("update_weights", 1, notice(1))
        with pytest.raises(WeightSyncError, match="not there"):
            await host.answer("update_weights", 2, lost)
        assert generator.version == 1
        assert (await host.answer("beat")).policy_version == 1

    hosted(generator, work)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("refuse", GeneratorFailure), ("break", MemberLostError), ("stray", MemberLostError)],
)
def test_what_is_wrong_with_the_process_is_told_from_what_the_generator_says(
    fault: str, error: type[Exception]
) -> None:
    async def work(host: GeneratorHost) -> None:
        await host.answer("update_weights", 1, notice(1))
        with pytest.raises(error):
            async for _ in host.generate([request("a", seed=1)]):
                pass

    hosted(FakeGenerator({1: fault}), work)
