"""What a run's log hears of members that are lost, come back and answer too late."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from fake_members import FakeProxy, PoolLab, collect, until
from pool_lab import notice, request

from headrace.errors import GeneratorFailure
from headrace.generators.pool.pool import GeneratorPool

Event = tuple[str, str, Mapping[str, object]]


@dataclass
class Log:
    events: list[Event] = field(default_factory=list)

    def __call__(self, kind: str, message: str, fields: Mapping[str, object]) -> None:
        self.events.append((kind, message, fields))

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event[0] == kind]


def test_a_loss_is_told_with_its_cause_and_what_was_given_to_others_and_so_is_the_return() -> None:
    lab, log = PoolLab(), Log()

    def die_once(proxy: FakeProxy) -> None:
        if proxy.incarnation == lab.proxies[0].incarnation:
            proxy.die("out of memory")

    async def work(pool: GeneratorPool) -> None:
        pool.tell_events(log)
        await pool.update_from(notice(1))
        lab.before_group = die_once
        await collect(pool, [request(f"g{n}", seed=n) for n in range(2)])
        await until(lambda: log.of("generator_restart"))
        first, second = (proxy.incarnation for proxy in lab.proxies)
        given = "; groups g0, g1 are given to others"
        assert log.events == [
            (
                "generator_lost",
                f"generator 0 (incarnation {first}) was lost: out of memory{given}",
                {
                    "member": 0,
                    "incarnation": first,
                    "cause": "out of memory",
                    "reissued": ["g0", "g1"],
                },
            ),
            (
                "generator_restart",
                f"generator 0 is back, as incarnation {second}",
                {"member": 0, "incarnation": second, "losses_in_a_row": 1},
            ),
        ]

    lab.run(work, num_members=1)


def test_a_member_that_was_busy_with_nothing_gives_nothing_away() -> None:
    lab, log = PoolLab(), Log()

    async def work(pool: GeneratorPool) -> None:
        pool.tell_events(log)
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 2)
        lab.of(1).die("by hand")
        await until(lambda: log.of("generator_restart"))
        ((_, message, fields),) = log.of("generator_lost")
        assert message.endswith("was lost: by hand")
        assert (fields["member"], fields["reissued"]) == (1, [])

    lab.run(work, num_members=2)


def test_a_start_that_fails_is_a_loss_and_the_last_of_them_is_told_as_such() -> None:
    lab, log = PoolLab(refusals=100), Log()

    async def work(pool: GeneratorPool) -> None:
        pool.tell_events(log)
        with pytest.raises(GeneratorFailure):
            await pool.update_from(notice(1))
        lost = [fields for _, _, fields in log.of("generator_lost")]
        assert [fields["cause"] for fields in lost] == ["did not start"] * 3
        assert len({fields["incarnation"] for fields in lost}) == 3
        ((_, message, fields),) = log.of("generator_given_up")
        assert "generator 0 is not started again: it was lost 3 times" in message
        assert fields == {
            "member": 0,
            "incarnation": lost[-1]["incarnation"],
            "losses_in_a_row": 3,
        }
        assert not log.of("generator_restart")

    lab.run(work, num_members=1, max_restarts=2)


def test_an_answer_that_came_too_late_is_told_by_its_group() -> None:
    lab, log = PoolLab(are_zombies=True), Log()

    async def work(pool: GeneratorPool) -> None:
        pool.tell_events(log)
        await pool.update_from(notice(1))
        member = pool._roster.members[0]

        def fence_the_first(proxy: FakeProxy) -> None:
            if proxy is lab.proxies[0]:
                pool._roster.fence(member, proxy, "seemed dead")

        lab.before_group = fence_the_first
        await collect(pool, [request("a")])
        await until(lambda: log.of("generator_fenced"))
        ((_, message, fields),) = log.of("generator_fenced")
        first = lab.proxies[0].incarnation
        assert message.startswith(f"group a came from incarnation {first} of generator 0")
        assert fields == {"member": 0, "incarnation": first, "group": "a"}

    lab.run(work, num_members=1)


def test_members_that_are_asked_to_go_are_no_loss() -> None:
    lab, log = PoolLab(), Log()

    async def work(pool: GeneratorPool) -> None:
        pool.tell_events(log)
        await pool.update_from(notice(1))
        await until(lambda: pool.num_members == 3)
        await pool.resize(1)
        await pool.resize(2)
        await asyncio.sleep(0)
        assert log.events == []

    lab.run(work, num_members=3)


def test_of_many_groups_a_message_names_a_few_and_its_fields_all() -> None:
    lab, log = PoolLab(), Log()

    async def work(pool: GeneratorPool) -> None:
        pool.tell_events(log)
        await pool.update_from(notice(1))
        lab.of(0).goes_on.clear()
        asked = [request(f"g{n}", 1, seed=n) for n in range(8)]
        waiting = asyncio.ensure_future(collect(pool, asked))
        await until(lambda: len(pool._roster.members[0].flights) == 8)
        lab.of(0).die("by hand")
        await waiting
        ((_, message, fields),) = log.of("generator_lost")
        assert message.endswith("; groups g0, g1, g2, g3, g4 and 3 more are given to others")
        assert fields["reissued"] == [f"g{n}" for n in range(8)]

    lab.run(work, num_members=1)
