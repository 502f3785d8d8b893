"""What a lost member had told of its rollouts, another one goes on from; and nothing else."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fake_members import FakeProxy, PoolLab, collect, until
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_lab import notice, request
from stepping import SteppingGenerator, length_of, part_of, rollout, undisturbed

from headrace.generators.pool.pool import GeneratorPool
from headrace.generators.pool.proxy import Report
from headrace.generators.pool.saved import MisfitError, SavedGroup, those_that_go_on
from headrace.generators.progress import Marks, Progress, RolloutPart
from headrace.types import GenerationRequest, OnUpdate, Rollout, RolloutGroup

QUICK = {"save_seconds": 0.001, "on_update": "keep"}


def stepping_lab(
    *stops: int, on_update: OnUpdate = "keep", kind: type[SteppingGenerator] = SteppingGenerator
) -> PoolLab:
    """Members that follow one another; each stands still after one of ``stops``, if any is left."""
    left = iter(stops)
    return PoolLab(make=lambda: kind(on_update, next(left, None)))


def generator_of(proxy: FakeProxy) -> SteppingGenerator:
    assert isinstance(proxy.generator, SteppingGenerator)
    return proxy.generator


def saved_tokens(pool: GeneratorPool) -> int:
    """What the pool knows of groups that members have."""
    flights = [flight for member in pool._roster.members for flight in member.flights]
    return sum(flight.saved.num_tokens for flight in flights)


async def standing(pool: GeneratorPool, lab: PoolLab, known: int) -> FakeProxy:
    """Return member 0, once the pool knows of so many tokens."""
    await until(lambda: saved_tokens(pool) == known)
    return lab.of(0)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_members=st.integers(1, 4),
    num_groups=st.integers(1, 16),
    max_rollouts=st.integers(1, 12),
    are_zombies=st.booleans(),
)
def test_every_group_comes_once_and_the_same_whoever_dies_and_whatever_was_saved(
    *, seed: int, num_members: int, num_groups: int, max_rollouts: int, are_zombies: bool
) -> None:
    lab = stepping_lab()
    lab.are_zombies = are_zombies
    dice, left = random.Random(seed), [5]  # noqa: S311 - no secret

    def maybe_die(proxy: FakeProxy, question: str) -> None:
        if question == "progress" and left[0] and dice.random() < 0.2:
            left[0] -= 1
            proxy.die(f"fell at {seed}")

    lab.before_question = maybe_die
    asked = [request(f"g{n}", 1 + n % 3, seed=n, max_tokens=12) for n in range(num_groups)]

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(2))
        half = len(asked) // 2
        calls = (collect(pool, asked[:half]), collect(pool, asked[half:]))
        first, second = await asyncio.gather(*calls)
        assert first | second == {a.group_id: undisturbed(a, 2) for a in asked}

    lab.run(
        work,
        num_members=num_members,
        max_rollouts=max_rollouts,
        max_restarts=6,
        save_seconds=1e-6,
        on_update="keep",
    )


def test_the_next_member_goes_on_where_the_lost_one_was() -> None:
    lab, asked = stepping_lab(6), request("a", 3)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        # The last rollout has 6 tokens, so it has ended: its group has not.
        await (await standing(pool, lab, 18)).kill()
        assert await call == {"a": undisturbed(asked, 1)}
        (_, first), (_, second) = lab.sent
        assert first.begun == ()
        assert [len(r.completion_ids) for r in second.begun] == [6, 6, 6]
        assert [r.may_go_on for r in second.begun] == [True, True, False]
        assert second.begun[2].text == "6 tokens"
        assert generator_of(lab.of(0)).num_sampled == 2 + 1
        found = pool.metrics()
        assert found["generator/pool/num_continued_tokens"] == 18
        assert found["generator/pool/num_dropped_tokens"] == 0
        assert found["generator/saved/num_tokens"] >= 18
        assert 0 < found["generator/saved/byte_share"] < 1

    lab.run(work, num_members=1, **QUICK)


def test_tokens_are_told_once_however_often_a_member_is_asked() -> None:
    lab, asked = stepping_lab(4), request("a", 2)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        proxy = await standing(pool, lab, 8)
        before = proxy.questions.count("progress")
        await until(lambda: proxy.questions.count("progress") > before + 3)
        assert pool.metrics()["generator/saved/num_tokens"] == 8
        generator_of(proxy).steps_left = None
        assert await call == {"a": undisturbed(asked, 1)}

    lab.run(work, num_members=1, **QUICK)


def test_without_reports_a_group_begins_again_at_its_prompt() -> None:
    lab, asked = stepping_lab(3), request("a", 2)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        proxy = lab.of(0)
        await until(lambda: generator_of(proxy).steps_left == 0)
        proxy.die()
        assert await call == {"a": undisturbed(asked, 1)}
        assert [sent.begun for _, sent in lab.sent] == [(), ()]
        assert "progress" not in proxy.questions

    lab.run(work, num_members=1, save_seconds=0.0)


def test_what_an_incarnation_tells_after_its_end_is_counted_and_ignored() -> None:
    asked, late = request("a", 1), asyncio.Event()
    answered: list[int] = []

    class Late(SteppingGenerator):
        """Its first report arrives when it was ended long ago, and says what is not so."""

        async def progress(self, marks: Marks) -> Progress:
            if answered:
                return Progress()
            answered.append(len(marks))
            await late.wait()
            return Progress(parts={"a": (_wrong(asked),)})

    lab = stepping_lab(0, 0, kind=Late)
    lab.are_zombies = True

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        await until(lambda: answered)
        pool._roster.fence(pool._roster.members[0], lab.of(0), "seemed dead")
        await until(lambda: len(lab.sent) == 2)
        late.set()
        await until(lambda: pool._work.saving.counts.num_fenced == 1)
        assert saved_tokens(pool) == 0
        generator_of(lab.of(0)).steps_left = None
        assert await call == {"a": undisturbed(asked, 1)}
        assert pool.metrics()["generator/pool/num_fenced_answers"] >= 1

    lab.run(work, num_members=1, **QUICK)


def test_a_report_in_the_name_of_another_incarnation_is_none() -> None:
    asked = request("a", 1)

    class Liar(SteppingGenerator):
        async def progress(self, marks: Marks) -> Progress:
            return Progress(parts=dict.fromkeys(marks, (_wrong(asked),)))

    lab = stepping_lab(0, kind=Liar)
    asks = FakeProxy.ask

    async def ask(self: FakeProxy, question: str, *arguments: object) -> object:
        answer = await asks(self, question, *arguments)  # type: ignore[arg-type]
        if isinstance(answer, Report):
            return replace(answer, incarnation=answer.incarnation - 1)
        return answer

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        await until(lambda: pool._work.saving.counts.num_fenced)
        assert saved_tokens(pool) == 0
        generator_of(lab.of(0)).steps_left = None
        assert await call == {"a": undisturbed(asked, 1)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeProxy, "ask", ask)
        lab.run(work, num_members=1, **QUICK)


def _wrong(asked: GenerationRequest) -> RolloutPart:
    """Tokens that this group never has."""
    other = replace(asked, seed=asked.seed + 1)
    return part_of(rollout(other, 0, (1, 1)), 0)


def _gap(part: RolloutPart) -> RolloutPart:
    return replace(part, start=part.start + 1)


def _of_the_future(part: RolloutPart) -> RolloutPart:
    return replace(part, version_runs=((9, part.num_tokens),))


def _without_versions(part: RolloutPart) -> RolloutPart:
    return replace(part, version_runs=())


def _of_no_rollout(part: RolloutPart) -> RolloutPart:
    return replace(part, rollout_index=7)


def _not_finite(part: RolloutPart) -> RolloutPart:
    return replace(part, generator_logprobs=b"\x00\x00\xc0\x7f" * part.num_tokens)


def _too_long(part: RolloutPart) -> RolloutPart:
    many = part_of(rollout(request("x", max_tokens=40), 0, (1,) * 30), 0)
    return replace(many, rollout_index=part.rollout_index)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (_gap, "rollout 0 from token 1 on, where 0 are known"),
        (_of_the_future, "where 1 is the newest"),
        (_without_versions, r"rollout 0 with columns of \[0, 3\] tokens"),
        (_of_no_rollout, "rollout 7, which the group does not have"),
        (_not_finite, "log-probs that are not finite"),
        (_too_long, "rollout 0 beyond its end"),
    ],
)
def test_who_tells_garbage_is_ended_and_nothing_of_it_is_gone_on_from(
    lie: Callable[[RolloutPart], RolloutPart], words: str
) -> None:
    asked = request("a", 1)

    class Liar(SteppingGenerator):
        """The first one lies, and the next one has no time to."""

        async def progress(self, marks: Marks) -> Progress:
            if self.steps_left is None:
                return Progress()
            part = lie(part_of(rollout(asked, 0, (1, 1, 1)), 0))
            return Progress(parts=dict.fromkeys(marks, (part,)))

    lab = stepping_lab(0, kind=Liar)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        assert await collect(pool, [asked]) == {"a": undisturbed(asked, 1)}
        assert [sent.begun for _, sent in lab.sent] == [(), ()]
        history = pool._roster.history()
        assert "it told how far group a is by" in history
        assert re.search(words, history)

    lab.run(work, num_members=1, **QUICK)


# --- weights that change meanwhile ----------------------------------------------------------------


def _versions(group: RolloutGroup) -> list[list[int]]:
    return [[span.policy_version for span in r.version_spans] for r in group.rollouts]


@pytest.mark.parametrize(
    ("on_update", "found"),
    [
        # Rollout 2 had ended; with ``wait`` a group is of one version all the same.
        ("keep", [[1, 2], [1, 2], [1]]),
        ("recompute", [[1, 2], [1, 2], [1]]),
        ("restart", [[2], [2], [1]]),
        ("wait", [[2], [2], [2]]),
    ],
)
def test_what_goes_on_under_new_weights_follows_on_update_as_in_an_engine(
    on_update: OnUpdate, found: list[list[int]]
) -> None:
    lab, asked = stepping_lab(6, on_update=on_update), request("a", 3)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        proxy = await standing(pool, lab, 18)

        def die(hurt: FakeProxy, question: str) -> None:
            if hurt is proxy and question == "update_weights":
                hurt.die()

        lab.before_question = die
        await pool.update_from(notice(2))
        group = (await call)["a"]
        assert _versions(group) == found
        for index, known in enumerate(group.rollouts):
            assert known == rollout(asked, index, known.policy_versions)
            assert len(known.completion_ids) == length_of(asked, index)
        counted = pool.metrics()
        kept = sum(6 for versions in found if 1 in versions)
        assert counted["generator/pool/num_continued_tokens"] == kept
        assert counted["generator/pool/num_dropped_tokens"] == 18 - kept

    lab.run(work, num_members=1, save_seconds=0.001, on_update=on_update)


def test_with_wait_nobody_goes_on_while_it_is_open_which_weights_there_will_be() -> None:
    asked = request("a", 2)
    saved = [rollout(asked, 0, (2, 2)), rollout(asked, 1, (2,))]
    assert those_that_go_on(saved, (), "wait", 2) == tuple(saved)
    assert those_that_go_on(saved, (), "wait", None) == ()
    assert those_that_go_on(saved, (), "wait", 3) == ()
    begun = (rollout(asked, 0, (1,)),)
    assert those_that_go_on(saved, begun, "wait", 3) == begun
    assert those_that_go_on(saved, begun, "restart", 3) == begun


def test_a_rollout_that_began_anew_replaces_what_was_known_of_it() -> None:
    asked = request("a", 1)
    saved = SavedGroup(asked, ())
    saved.take(part_of(rollout(asked, 0, (1, 1, 1)), 0), 1)
    saved.take(part_of(rollout(asked, 0, (2, 2)), 0), 2)
    assert [r.policy_versions for r in saved.rollouts()] == [(2, 2)]
    assert saved.num_tokens == 2
    saved.take(part_of(rollout(asked, 0, (2, 2, 2)), 2), 2)
    assert saved.rollouts() == (replace(rollout(asked, 0, (2, 2, 2))),)


def test_a_rollout_that_has_ended_takes_nothing_more() -> None:
    asked = request("a", 1)
    saved = SavedGroup(asked, (rollout(asked, 0, (1,) * 8),))
    assert saved.marks() == {}
    with pytest.raises(MisfitError, match="beyond its end"):
        saved.take(part_of(rollout(asked, 0, (1, 1)), 0), 1)


# --- deaths of several members, and groups that nobody can end -----------------------------------


def test_a_group_goes_on_from_all_that_several_lost_members_had_told() -> None:
    lab, asked = stepping_lab(2, 2, 2), request("a", 1)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        for known in (2, 4, 6):
            (await standing(pool, lab, known)).die()
        assert await call == {"a": undisturbed(asked, 1)}
        assert [sum(len(r.completion_ids) for r in sent.begun) for _, sent in lab.sent] == [
            *(0, 2, 4, 6)
        ]

    lab.run(work, num_members=1, max_restarts=4, **QUICK)


def test_the_last_try_begins_at_the_prompt_since_what_was_saved_may_be_what_ends_them() -> None:
    lab, asked = stepping_lab(3, 1), request("a", 1)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        (await standing(pool, lab, 3)).die()
        second = await standing(pool, lab, 4)
        # As if other groups came through between, so that no restarts are used up.
        pool._roster.members[0].losses_in_a_row = 0
        second.die()
        assert await call == {"a": undisturbed(asked, 1)}
        assert [sum(len(r.completion_ids) for r in sent.begun) for _, sent in lab.sent] == [
            *(0, 3, 0)
        ]

    lab.run(work, num_members=1, max_restarts=1, **QUICK)


def test_a_group_that_is_aborted_after_a_loss_comes_back_with_nothing_that_has_no_text() -> None:
    lab, asked = stepping_lab(3, 0), request("a", 1)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        (await standing(pool, lab, 3)).die()
        await until(lambda: len(lab.sent) == 2)
        assert [len(r.completion_ids) for r in lab.sent[1][1].begun] == [3]

        def die(hurt: FakeProxy, question: str) -> None:
            if question == "abort":
                hurt.goes_on.clear()
                hurt.die()

        lab.before_question = die
        await pool.abort(["a"])
        (found,) = (await call)["a"].rollouts
        assert (found.completion_ids, found.finish_reason, found.text) == ((), "abort", "")

    lab.run(work, num_members=1, **QUICK)


def test_what_came_back_from_a_member_that_left_keeps_its_text_for_the_caller() -> None:
    asked = request("a", 1)
    lab = stepping_lab()

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        (flight,) = pool._work.admit([asked]) and list(pool._work._open)
        known: Rollout = replace(rollout(asked, 0, (1, 1)), text="so far")
        flight.go_on_from([known])
        assert flight._as_known() == (known,)
        pool._work.take_back(flight.call)

    lab.run(work, num_members=1, **QUICK)


class Slow(SteppingGenerator):
    """Obeys late: neither takes groups back nor tells how far they are before it is let."""

    def __init__(self, on_update: OnUpdate = "keep", steps_left: int | None = None) -> None:
        super().__init__(on_update, steps_left)
        self.is_asked, self.may_tell = asyncio.Event(), asyncio.Event()
        self.num_told = 0

    async def abort(self, group_ids: Sequence[str]) -> None:
        del group_ids

    async def progress(self, marks: Marks) -> Progress:
        self.is_asked.set()
        await self.may_tell.wait()
        self.num_told += 1
        return await super().progress(marks)


def test_what_is_told_of_a_history_that_was_taken_back_is_nobodys_fault() -> None:
    """After a learner's restart versions go back, and a member may still have groups of before."""
    lab = stepping_lab(4, kind=Slow)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(5))
        call = asyncio.ensure_future(collect(pool, [request("a", 1, max_tokens=12)]))
        await until(lambda: bool(lab.proxies))
        member = lab.of(0)
        generator = member.generator
        assert isinstance(generator, Slow)
        await generator.is_asked.wait()
        await until(lambda: generator.num_sampled == 4)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await pool.update_from(notice(2))
        generator.may_tell.set()
        beats = member.questions.count("beat")
        await until(lambda: generator.num_told > 0 and member.questions.count("beat") > beats + 3)
        assert pool.num_members == 1
        assert lab.of(0) is member

    lab.run(work, num_members=1, heartbeat_seconds=0.01, **QUICK)


def test_a_report_of_a_group_that_was_given_out_anew_meanwhile_is_of_before() -> None:
    lab, asked = stepping_lab(0), request("a", 1)

    async def work(pool: GeneratorPool) -> None:
        await pool.update_from(notice(1))
        call = asyncio.ensure_future(collect(pool, [asked]))
        await until(lambda: lab.sent)
        (member,) = pool._roster.members
        (flight,) = member.flights
        part = part_of(rollout(asked, 0, (1, 1)), 0)
        report = Report(incarnation=member.incarnation, progress=Progress(parts={"a": (part,)}))
        assert member.proxy is not None
        saving, before = pool._work.saving, flight.num_issues
        flight.issue("keep", 1)
        saving._save(member, member.proxy, {"a": (flight, before)}, report)
        assert flight.saved.num_tokens == 0
        saving._save(member, member.proxy, {"a": (flight, before + 1)}, report)
        assert flight.saved.num_tokens == 2
        generator_of(lab.of(0)).steps_left = None
        await call

    lab.run(work, num_members=1, save_seconds=0.0, on_update="keep")
