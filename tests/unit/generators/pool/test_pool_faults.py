"""The role over members that die, hang, lie and come back."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from fake_members import FakeProxy, PoolLab, collect, kill_at_random, of_incarnation, until
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_lab import notice, request, sampled

from headrace.errors import ConfigError, GeneratorFailure
from headrace.generators.pool.pool import GeneratorPool
from headrace.generators.pool.proxy import Delivery


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_members=st.integers(1, 4),
    num_groups=st.integers(1, 24),
    max_rollouts=st.integers(1, 12),
    are_zombies=st.booleans(),
)
def test_every_group_comes_once_and_the_same_whoever_dies(
    *, seed: int, num_members: int, num_groups: int, max_rollouts: int, are_zombies: bool
) -> None:
    lab = PoolLab(are_zombies=are_zombies)
    lab.before_group = kill_at_random(seed, chance=0.3, most=6)
    asked = [request(f"g{n}", 1 + n % 3, seed=n) for n in range(num_groups)]

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(2))
        half = len(asked) // 2
        calls = (collect(pool, asked[:half]), collect(pool, asked[half:]))
        first, second = await asyncio.gather(*calls)
        assert first | second == {a.group_id: sampled(a, 2) for a in asked}

    lab.run(work, num_members=num_members, max_rollouts=max_rollouts, max_restarts=6)


def test_a_member_that_died_comes_back_with_the_weights_of_now() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 2)
        lab.of(1).die()
        await until(lambda: pool.num_members == 1)
        await pool.update_from(notice(2))
        await until(lambda: pool.num_members == 2)
        assert lab.of(1).incarnation > lab.of(0).incarnation
        assert lab.of(1).generator.version == 2
        assert pool.metrics()["generator/pool/num_restarts"] == 1

    lab.run(work, num_members=2)


def test_weights_that_come_while_a_member_starts_are_loaded_before_it_gets_work() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        loaded = asyncio.Event()
        joining = asyncio.Event()

        await pool.update_from(notice(1))
        lab.of(0).die()
        await until(lambda: not pool.num_members)
        # The next incarnation stops in the middle of loading version 1.
        update = FakeProxy.ask

        async def ask(self: FakeProxy, question: str, *arguments: object) -> object:
            answer = await update(self, question, *arguments)  # type: ignore[arg-type]
            if question == "update_weights" and not joining.is_set():
                joining.set()
                await loaded.wait()
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeProxy, "ask", ask)
            await joining.wait()
            later = asyncio.ensure_future(pool.update_from(notice(2)))
            await asyncio.sleep(0.01)
            assert not later.done()
            loaded.set()
            await later
        assert lab.of(0).generator.version == 2
        assert (await collect(pool, [request("a")]))["a"].oldest_version == 2

    lab.run(work, num_members=1)


def test_a_paused_pool_takes_a_member_back_paused() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, [request("a")]))
        await asyncio.sleep(0.01)
        lab.of(0).die()
        await until(lambda: len(lab.proxies) == 2 and pool.num_members)
        await asyncio.sleep(0.01)
        assert not call.done()
        assert not lab.of(0).generator.runs.is_set()
        await pool.resume()
        assert set(await call) == {"a"}

    lab.run(work, num_members=1)


def test_a_member_that_hangs_is_ended_and_its_groups_go_elsewhere() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 2)
        hung = lab.of(0)
        hung.goes_on.clear()
        found = await collect(pool, [request(f"g{n}", seed=n) for n in range(4)])
        assert len(found) == 4
        assert hung.was_killed
        assert "gave no sign of life for 3 s" in pool._roster.history()
        assert pool.metrics()["generator/pool/num_reissued_groups"] == 2

    lab.run(work, num_members=2, hang_seconds=3.0)


def test_late_answers_of_the_dead_are_counted_and_ignored() -> None:
    lab = PoolLab(are_zombies=True)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        member = pool._roster.members[0]

        def fence_the_first(proxy: FakeProxy) -> None:
            if proxy is lab.proxies[0]:
                pool._roster.fence(member, proxy, "seemed dead")

        lab.before_group = fence_the_first
        asked = [request(f"g{n}", seed=n) for n in range(3)]
        assert await collect(pool, asked) == {a.group_id: sampled(a, 1) for a in asked}
        await asyncio.sleep(0.02)
        found = pool.metrics()
        assert found["generator/pool/num_fenced_answers"] == 3
        assert found["generator/pool/num_reissued_groups"] == 3

    lab.run(work, num_members=1)


def test_an_answer_of_another_incarnation_is_none() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        told: list[int] = []

        def lie(proxy: FakeProxy, delivery: Delivery) -> Delivery:
            if told:
                return delivery
            told.append(proxy.incarnation)
            return of_incarnation(delivery, proxy.incarnation - 1)

        lab.lie = lie
        found = await collect(pool, [request("a")])
        assert set(found) == {"a"}
        assert pool.metrics()["generator/pool/num_fenced_answers"] == 1
        assert len(lab.proxies) == 2, "who does not give what was asked for is started again"

    lab.run(work, num_members=1)


def _of_another_prompt(delivery: Delivery) -> Delivery:
    prompt = replace(delivery.group.prompt, prompt_id="another")
    return replace(delivery, group=replace(delivery.group, prompt=prompt))


def _short(delivery: Delivery) -> Delivery:
    return replace(delivery, group=replace(delivery.group, rollouts=delivery.group.rollouts[1:]))


def _of_the_future(delivery: Delivery) -> Delivery:
    asked = request(delivery.group.group_id, delivery.group.group_size)
    return replace(delivery, group=replace(sampled(asked, 9), prompt=delivery.group.prompt))


def _unasked(delivery: Delivery) -> Delivery:
    return replace(delivery, group=replace(delivery.group, group_id="unasked"))


def _nothing(delivery: Delivery) -> Delivery:
    return replace(delivery, group=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (_of_another_prompt, "prompt another for prompt-of-a"),
        (_short, r"rollouts \[1\] for the 2 of group a"),
        (_of_the_future, "tokens of version 9, where 1 is the newest"),
        (_unasked, "group unasked, which it was not asked for"),
        (_nothing, "group None, which it was not asked for"),
    ],
)
def test_who_answers_garbage_is_ended_and_its_groups_are_sampled_again(
    lie: object, words: str
) -> None:
    lab = PoolLab()
    lied: list[int] = []

    def once(proxy: FakeProxy, delivery: Delivery) -> Delivery:
        if lied:
            return delivery
        lied.append(proxy.incarnation)
        return lie(delivery)  # type: ignore[operator, no-any-return]

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        lab.lie = once
        assert await collect(pool, [request("a")]) == {"a": sampled(request("a"), 1)}
        assert len(lab.proxies) == 2
        assert re.search(words, pool._roster.history())

    lab.run(work, num_members=1)


def test_restarts_are_bounded_and_the_error_names_the_first_cause() -> None:
    lab = PoolLab()

    def die_always(proxy: FakeProxy) -> None:
        proxy.die("out of memory" if proxy.incarnation == 1 else "of its wounds")

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        lab.before_group = die_always
        with pytest.raises(
            GeneratorFailure, match=r"no generator is left.*first generator 0: out of memory; .*"
        ):
            await collect(pool, [request("a")])
        assert len(lab.proxies) == 3
        with pytest.raises(GeneratorFailure, match="no generator is left"):
            await pool.update_from(notice(2))

    lab.run(work, num_members=1, max_restarts=2)


def test_a_start_that_never_goes_well_ends_the_first_update() -> None:
    lab = PoolLab(refusals=100)

    async def work(pool: GeneratorPool) -> None:
        with pytest.raises(GeneratorFailure, match="did not start"):
            await pool.update_from(notice(1))

    lab.run(work, num_members=2, max_restarts=1)


def test_a_history_that_was_taken_back_is_nobodys_fault() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(5))
        await pool.pause()
        before = asyncio.ensure_future(collect(pool, [request("a")]))
        await asyncio.sleep(0.01)
        # The learner died, whoever waited is gone, and training goes on from version 2.
        before.cancel()
        await asyncio.wait({before})
        await pool.update_from(notice(2))
        await pool.resume()
        assert (await collect(pool, [request("a")])) == {"a": sampled(request("a"), 2)}
        assert len(lab.proxies) == 1

    lab.run(work, num_members=1)


def test_one_member_that_cannot_be_had_does_not_stop_the_others() -> None:
    lab = PoolLab()

    def die_if_second(proxy: FakeProxy, question: str) -> None:
        if proxy.member == 1 and question == "update_weights":
            proxy.die("no such device")

    async def work(pool: GeneratorPool) -> None:
        lab.before_question = die_if_second
        await pool.update_from(notice(1))
        await until(lambda: any(member.is_over for member in pool._roster.members))
        asked = [request(f"g{n}", seed=n) for n in range(6)]
        assert len(await collect(pool, asked)) == 6
        assert pool.num_members == 1

    lab.run(work, num_members=2, max_restarts=2)


def test_a_group_that_ends_whoever_samples_it_ends_the_run_and_is_named() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))

        def die_of_it(proxy: FakeProxy) -> None:
            # As if other groups came through between, so that no restarts are used up.
            pool._roster.members[0].losses_in_a_row = 0
            proxy.die("segmentation fault")

        lab.before_group = die_of_it
        with pytest.raises(
            GeneratorFailure, match=r"group poison .* 4 generators .* lost"
        ) as failed:
            await collect(pool, [request("poison", 1)])
        assert "first generator 0: segmentation fault" in str(failed.value)
        lab.before_group = lambda _: None
        assert set(await collect(pool, [request("a")])) == {"a"}

    lab.run(work, num_members=1, max_restarts=2)


def test_an_aborted_group_of_a_member_that_dies_comes_back_as_it_was_asked_for() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, [request("a")]))
        await asyncio.sleep(0.01)

        def die(proxy: FakeProxy, question: str) -> None:
            if question == "abort":
                proxy.die()

        lab.before_question = die
        await pool.abort(["a"])
        found = await call
        assert [rollout.finish_reason for rollout in found["a"].rollouts] == ["abort", "abort"]

    lab.run(work, num_members=1)


# --- growing and shrinking ------------------------------------------------------------------------


def test_members_that_come_take_what_waits() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, [request(f"g{n}", seed=n) for n in range(8)]))
        await asyncio.sleep(0.01)
        await pool.resize(3)
        assert pool.num_members == 3
        await pool.resume()
        assert len(await call) == 8
        assert {member for member, _ in lab.sent} == {0, 1, 2}

    lab.run(work, num_members=1, max_rollouts=4)


def test_what_a_member_had_begun_goes_on_at_the_others_when_it_goes() -> None:
    lab = PoolLab()
    asked = [request(f"g{n}", 2, seed=n) for n in range(6)]

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 3)
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, asked))
        await asyncio.sleep(0.01)
        before = len(lab.sent)
        await pool.resize(1)
        assert pool.num_members == 1
        assert [proxy.was_killed for proxy in lab.proxies] == [False, True, True]
        await pool.resume()
        found = await call
        assert found == {a.group_id: found[a.group_id] for a in asked}
        for group in found.values():
            assert [r.completion_ids for r in group.rollouts] == [
                r.completion_ids for r in sampled(asked[int(group.group_id[1:])], 1).rollouts
            ]
        again = [sent for _, sent in lab.sent[before:]]
        assert len(again) == 4
        assert all(len(r.completion_ids) == 3 for sent in again for r in sent.begun)
        assert all(len(sent.begun) == 2 for sent in again)
        assert pool.metrics()["generator/pool/num_reissued_groups"] == 0

    lab.run(work)


def test_who_does_not_give_back_what_it_has_is_ended_all_the_same() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 2)
        await pool.pause()
        call = asyncio.ensure_future(collect(pool, [request(f"g{n}", seed=n) for n in range(4)]))
        await asyncio.sleep(0.01)
        lab.of(1).goes_on.clear()
        await pool.resize(1)
        await pool.resume()
        assert len(await call) == 4

    lab.run(work, num_members=2, hang_seconds=3.0)


def test_a_new_member_that_does_not_join_is_told_and_the_pool_is_as_before() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        lab.refusals = 100
        with pytest.raises(GeneratorFailure, match=r"1 of 1 new generators did not join.*did not"):
            await pool.resize(2)
        assert len(pool._roster.members) == 1
        assert set(await collect(pool, [request("a")])) == {"a"}

    lab.run(work, num_members=1, max_restarts=1)


def test_more_members_than_memory_holds_are_refused_before_one_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.host.available_memory", lambda: 5 * 2**30)
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        with pytest.raises(
            ConfigError, match=r"999 more generators: .*5\.0 GiB are free; .* 5 fit"
        ):
            await pool.resize(1000)
        assert len(pool._roster.members) == 1
        await pool.resize(3)
        assert pool.num_members == 3

    lab.run(work, num_members=1, member_bytes=2**30)


class SlowLab(PoolLab):
    """Members after the first start when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start = asyncio.Event()

    async def __call__(self, *, member: int, incarnation: int) -> FakeProxy:
        if member:
            await self.may_start.wait()
        return await super().__call__(member=member, incarnation=incarnation)


def test_weights_and_groups_do_not_wait_for_a_member_that_is_slow_to_start() -> None:
    lab = SlowLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        growing = asyncio.ensure_future(pool.resize(2))
        await until(lambda: len(pool._roster.members) == 2)
        await asyncio.wait_for(pool.update_from(notice(2)), 20.0)
        assert (await collect(pool, [request("a")]))["a"].oldest_version == 2
        shrinking = asyncio.ensure_future(pool.resize(1))
        assert not growing.done()
        lab.may_start.set()
        await growing
        assert lab.of(1).generator.version == 2
        await shrinking
        assert pool.num_members == 1

    lab.run(work, num_members=1)


def test_a_pool_may_be_closed_while_it_grows() -> None:
    lab = SlowLab()
    growing: list[asyncio.Future[None]] = []

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        growing.append(asyncio.ensure_future(pool.resize(3)))
        await until(lambda: len(pool._roster.members) == 3)

    lab.run(work, num_members=1)
    assert isinstance(growing[0].exception(), GeneratorFailure)


def test_a_member_that_was_given_up_is_replaced_when_the_pool_is_resized() -> None:
    lab = PoolLab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 2)
        lab.refusals = 100
        lab.of(1).die()
        await until(lambda: any(member.is_over for member in pool._roster.members))
        lab.refusals = 0
        await pool.resize(2)
        assert pool.num_members == 2

    lab.run(work, num_members=2, max_restarts=1)
