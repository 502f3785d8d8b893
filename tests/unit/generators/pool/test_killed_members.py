"""Engines in real processes that are killed in the middle of a group: what comes is the same."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

import pytest
from fake_members import collect
from pool_lab import FakeStore, notice, request
from torch_members import TorchSpec, generator, weights

from headrace.generators.pool.child_proxy import ChildLauncher, ChildProxy
from headrace.generators.pool.pool import GeneratorPool
from headrace.generators.pool.roster import PoolSettings
from headrace.types import GenerationRequest, RolloutGroup

PATIENCE_SECONDS = 240.0

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _children_find_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def long_request(seed: int) -> GenerationRequest:
    asked = request(f"g{seed}", 3, seed=seed)
    sampling = replace(
        asked.sampling,
        max_tokens=500,
        # Some of the group end early, by chance, and some are still under way.
        stop_token_ids=(5,),
        min_tokens=40,
        top_k=20,
        kept_support=True,
        raw_logprobs=True,
    )
    return replace(asked, sampling=sampling)


async def undisturbed(asked: GenerationRequest) -> RolloutGroup:
    made, compute = generator()
    try:
        await made.update_weights(weights(1))
        (group,) = [group async for group in made.generate([asked])]
        return group
    finally:
        await made.close()
        compute.close(PATIENCE_SECONDS)


def known(pool: GeneratorPool) -> int:
    return sum(flight.saved.num_tokens for m in pool._roster.members for flight in m.flights)


async def until_known(pool: GeneratorPool, call: asyncio.Future[dict[str, RolloutGroup]]) -> bool:
    """Pause once something is known of an unfinished group; whether that could be."""
    while not known(pool) and not call.done():  # noqa: ASYNC110 - the pool tells nobody
        await asyncio.sleep(0.001)
    await pool.pause()
    return not call.done()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_group_whose_process_ends_goes_on_in_the_next_one_with_the_same_bits(
    how: signal.Signals,
) -> None:
    settings = PoolSettings(
        num_members=1,
        max_rollouts=8,
        heartbeat_seconds=0.05,
        # Long enough for a busy machine; where the process hangs, the test waits for it.
        hang_seconds=8.0 if how is signal.SIGSTOP else PATIENCE_SECONDS,
        backoff_seconds=0.0,
        save_seconds=0.01,
    )

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        for seed in range(1000):
            asked = long_request(seed)
            call = asyncio.ensure_future(collect(pool, [asked]))
            if await until_known(pool, call):
                break
            # It was whole before anybody could look.
            await pool.resume()
            await call
        pool.metrics()
        (member,) = pool._roster.members
        victim = member.proxy
        assert isinstance(victim, ChildProxy)
        os.kill(victim.pid, how)
        while pool.metrics()["generator/pool/num_reissued_groups"] == 0:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        await pool.resume()
        assert (await call)[asked.group_id] == replace(
            await undisturbed(asked), prompt=asked.prompt
        )
        assert pool.metrics()["generator/pool/num_continued_tokens"] > 0
        assert member.incarnation > 1

    async def main() -> None:
        launch = ChildLauncher(TorchSpec(), deadline_seconds=PATIENCE_SECONDS)
        pool = GeneratorPool(launch, settings, FakeStore())
        try:
            await asyncio.wait_for(work(pool), PATIENCE_SECONDS)
        finally:
            await pool.close()

    asyncio.run(main())
