"""The role over members that are well: who gets what, which weights, pauses, aborts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from fake_members import FakeProxy, PoolLab, collect, until
from pool_lab import notice, request, sampled

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.pool.pool import GeneratorPool
from headrace.types import WeightNotice, WeightPart, WeightUpdate


def test_it_refuses_to_generate_before_its_first_weights() -> None:
    async def work(pool: GeneratorPool) -> None:
        with pytest.raises(GeneratorFailure, match="before the first"):
            await collect(pool, [request("a")])

    PoolLab().run(work)


def test_members_are_told_how_many_are_told_at_the_same_time() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 3)
        await pool.update_from(notice(2))
        assert lab.told[:3] == [(1, 1)] * 3, "who starts comes alone"
        assert lab.told[3:] == [(2, 3)] * 3

    lab.run(work)


def test_every_group_is_yielded_once_as_it_was_asked_for() -> None:
    asked = [request(f"g{n}", seed=n) for n in range(20)]

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(5))
        found = await collect(pool, asked)
        assert found == {a.group_id: sampled(a, 5) for a in asked}
        assert found["g3"].prompt is asked[3].prompt

    PoolLab().run(work)


def test_no_member_is_told_what_the_answer_is() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await collect(pool, [request("a")])
        ((_, sent),) = lab.sent
        assert sent.prompt.answer is None
        assert not sent.prompt.metadata

    lab.run(work)


def test_groups_go_to_the_member_with_the_least_left_to_compute() -> None:
    lab = PoolLab()
    lengths = (50, 10, 10, 10, 10, 10, 10)
    asked = [request(f"g{n}", 1, max_tokens=length) for n, length in enumerate(lengths)]

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 3)
        await collect(pool, asked)
        placed: dict[int, list[str]] = {0: [], 1: [], 2: []}
        for member, sent in lab.sent:
            placed[member].append(sent.group_id)
        assert placed == {0: ["g0"], 1: ["g1", "g3", "g5"], 2: ["g2", "g4", "g6"]}

    lab.run(work, num_members=3)


def test_a_member_is_not_given_more_than_it_may_run_and_the_rest_goes_to_who_is_free() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 2)
        most = 0

        def look(_: FakeProxy) -> None:
            nonlocal most
            held = (sum(f.request.group_size for f in m.flights) for m in pool._roster.members)
            most = max(most, *held)

        lab.before_group = look
        found = await collect(pool, [request(f"g{n}", 2, seed=n) for n in range(12)])
        assert len(found) == 12
        assert most == 4
        assert all(len(proxy.asked) >= 2 for proxy in lab.proxies)

    lab.run(work, num_members=2, max_rollouts=4)


def test_a_group_larger_than_a_member_may_run_is_sampled_all_the_same() -> None:
    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        assert set(await collect(pool, [request("a", 16), request("b", 16)])) == {"a", "b"}

    PoolLab().run(work, num_members=1, max_rollouts=4)


def test_two_open_calls_with_one_group_id_both_get_it() -> None:
    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await pool.pause()
        calls = [asyncio.ensure_future(collect(pool, [request("a", seed=n)])) for n in (1, 2)]
        await asyncio.sleep(0.01)
        await pool.resume()
        first, second = await asyncio.gather(*calls)
        assert first["a"] == sampled(request("a", seed=1), 1)
        assert second["a"] == sampled(request("a", seed=2), 1)

    PoolLab().run(work, num_members=1)


def test_twins_in_one_call_are_refused() -> None:
    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        with pytest.raises(GeneratorFailure, match=r"group a .*asked for twice"):
            await collect(pool, [request("a"), request("a")])

    PoolLab().run(work)


def test_all_members_have_new_weights_when_an_update_returns() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        for version in (1, 2, 7):
            await pool.update_weights(
                WeightUpdate(policy_version=version, tensors={}, checksum=version)
            )
            assert {proxy.generator.version for proxy in lab.proxies} == {version}
            found = await collect(pool, [request("a")])
            assert found["a"].newest_version == found["a"].oldest_version == version
        assert lab.store.released == [1, 2, 7]

    # One member would do to go on; all that are there are told.
    async def all_there(pool: GeneratorPool) -> None:
        await pool.update_from(notice(0))
        await until(lambda: pool.num_members == 3)
        await work(pool)

    lab.run(all_there)


def test_weights_that_cannot_be_read_are_the_publishers_to_hear_of() -> None:
    lost = WeightNotice(
        parts=(WeightPart(policy_version=2, checksum=2, place="lost", num_bytes=0),)
    )

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        with pytest.raises(WeightSyncError, match="not there"):
            await pool.update_from(lost)
        await pool.update_from(notice(2))
        assert (await collect(pool, [request("a")]))["a"].newest_version == 2

    PoolLab().run(work)


def test_a_pause_stops_everything_and_a_resumption_goes_on() -> None:
    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, [request(f"g{n}") for n in range(6)]))
        await asyncio.sleep(0.02)
        assert not call.done()
        await pool.resume()
        assert len(await call) == 6

    PoolLab().run(work)


def test_aborted_groups_come_back_as_they_are_wherever_they_are() -> None:
    asked = [request(f"g{n}", 2, seed=n) for n in range(6)]

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, asked))
        await asyncio.sleep(0.01)
        with pytest.raises(GeneratorFailure, match="nowhere"):
            await pool.abort(["g0", "nowhere"])
        # One member that may run two rollouts: only the first group is under way.
        await pool.abort(["g0", "g5"])
        await pool.resume()
        found = await call
        lengths = {
            name: [len(rollout.completion_ids) for rollout in found[name].rollouts]
            for name in ("g0", "g1", "g5")
        }
        assert lengths == {"g0": [3, 3], "g1": [8, 8], "g5": [0, 0]}
        assert all(rollout.may_go_on for rollout in found["g5"].rollouts)

    PoolLab().run(work, num_members=1, max_rollouts=2)


def test_what_a_caller_does_not_wait_for_is_taken_back() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        async with aclosing(pool.generate([request(f"g{n}") for n in range(20)])) as groups:
            async for _ in groups:
                break
        assert not pool._work._open
        assert not pool._work._waiting
        await until(lambda: not any(member.flights for member in pool._roster.members))
        assert len(lab.sent) < 20
        assert set(await collect(pool, [request("g19")])) == {"g19"}

    lab.run(work, num_members=1, max_rollouts=4)


def test_a_failure_of_the_generators_own_reaches_its_caller_and_no_one_else() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        lab.of(0).generator.faults[13] = "refuse"
        good = asyncio.ensure_future(collect(pool, [request("good")]))
        with pytest.raises(GeneratorFailure, match="no such request"):
            await collect(pool, [request("bad", seed=13)])
        assert set(await good) == {"good"}
        assert len(lab.proxies) == 1

    lab.run(work, num_members=1)


def test_closing_answers_whoever_waits() -> None:
    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, [request("a")]))
        await asyncio.sleep(0.01)
        await pool.close()
        with pytest.raises(GeneratorFailure, match="closed"):
            await call
        with pytest.raises(GeneratorFailure, match="closed"):
            await collect(pool, [request("b")])
        await pool.close()

    PoolLab().run(work)


def test_metrics_are_those_of_all_members_in_one() -> None:
    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 3)
        await collect(pool, [request(f"g{n}") for n in range(9)])
        await asyncio.sleep(0.05)  # for a sign of life of each
        found = pool.metrics()
        assert found["generator/engine/num_asked"] == 9
        assert found["generator/pool/num_members"] == 3
        assert found["generator/pool/num_restarts"] == 0
        shares = [found[f"generator/member_{index}/busy_share"] for index in range(3)]
        assert all(0.0 < share <= 1.0 for share in shares)

    PoolLab().run(work)
