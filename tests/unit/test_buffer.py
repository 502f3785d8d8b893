"""The buffer: order, bound and pace, on schedules that hypothesis makes up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer import RolloutBuffer, Ticket
from headrace.errors import RunError
from headrace.types import Prompt, Rollout, RolloutGroup, SamplingParams, VersionSpan

HANG_SECONDS = 20.0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, HANG_SECONDS))


def group(name: int, version: int) -> RolloutGroup:
    rollout = Rollout(
        rollout_index=0,
        completion_ids=(1, 2),
        loss_mask=(True, True),
        generator_logprobs=(-0.1, -0.2),
        version_spans=(VersionSpan(policy_version=version, start=0, end=2),),
        finish_reason="stop",
        text="a",
    )
    return RolloutGroup(
        group_id=f"0/{name}",
        prompt=Prompt(prompt_id=str(name), source="s", text="q", token_ids=(1,)),
        rollouts=(rollout, rollout),
        sampling=SamplingParams(),
    )


@dataclass(slots=True)
class Schedule:
    """One side reserves and delivers in any order, the other trains; every choice is drawn."""

    buffer: RolloutBuffer
    groups_per_step: int
    updates_per_step: int
    num_prompts: int
    data: st.DataObject
    policy_version: int = 0
    num_drawn: int = 0
    pending: dict[Ticket, RolloutGroup] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    admitted: dict[str, int] = field(default_factory=dict)
    """Group id -> ticket."""
    taken: list[tuple[RolloutGroup, ...]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    async def generate(self) -> None:
        while self.num_drawn < self.num_prompts:
            for ticket in await self.buffer.reserve(self.groups_per_step):
                await self._admit(ticket)
        await self.buffer.close_admission()

    async def _admit(self, ticket: Ticket) -> None:
        if self.num_drawn == self.num_prompts:
            await self.buffer.drop(ticket)
            return
        # The stalest a group can be: all of it sampled the moment its slot was reserved.
        made = group(self.num_drawn, self.policy_version)
        self.num_drawn += 1
        self.admitted[made.group_id] = ticket
        self.pending[ticket] = made

    async def deliver(self) -> None:
        while True:
            await asyncio.sleep(0)
            for ticket in self.data.draw(st.permutations(sorted(self.pending))):
                made = self.pending.pop(ticket)
                if self.data.draw(st.integers(0, 9)) == 0:
                    self.dropped.add(made.group_id)
                    await self.buffer.drop(ticket)
                else:
                    await self.buffer.deliver(ticket, made)
                if self.data.draw(st.booleans()):
                    break

    async def learn(self) -> None:
        while batch := await self.buffer.take_batch(lambda: self.policy_version):
            self.taken.append(batch)
            updates = self.data.draw(st.integers(0, self.updates_per_step))
            oldest = min(made.oldest_version or 0 for made in batch)
            self.staleness.append(self.policy_version + max(updates - 1, 0) - oldest)
            await asyncio.sleep(0)
            self.policy_version += updates
            await self.buffer.release(len(batch))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.generate())
            delivering = tasks.create_task(self.deliver())
            await self.learn()
            delivering.cancel()


class CompletionOrderBuffer(RolloutBuffer):
    """The planted fault: whatever is finished leaves first, so a slow group is overtaken."""

    async def deliver(self, ticket: Ticket, group: RolloutGroup) -> None:
        async with self._changed:
            self._reserved.remove(ticket)
            place = sum(self._groups[other] is not None for other in self._reserved)
            self._reserved.insert(place, ticket)
        await super().deliver(ticket, group)


def play(
    data: st.DataObject,
    *,
    eta: int,
    size: int,
    updates: int,
    num_prompts: int,
    kind: type = RolloutBuffer,
) -> Schedule:
    buffer = kind(groups_per_step=size, max_staleness=eta, updates_per_step=updates)
    schedule = Schedule(buffer, size, updates, num_prompts, data)
    run(schedule.run())
    return schedule


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 25))
def test_no_schedule_exceeds_the_bound_or_loses_a_group_or_hangs(
    data: st.DataObject, eta: int, size: int, updates: int, num_prompts: int
) -> None:
    eta = max(eta, updates - 1)
    schedule = play(data, eta=eta, size=size, updates=updates, num_prompts=num_prompts)

    assert all(staleness <= eta for staleness in schedule.staleness)
    trained = [made.group_id for batch in schedule.taken for made in batch]
    assert len(set(trained)) == len(trained)
    assert set(trained) | schedule.dropped == {f"0/{n}" for n in range(num_prompts)}
    tickets = [schedule.admitted[name] for name in trained]
    assert tickets == sorted(tickets), "batches leave in the order of reservation"
    assert all(len(batch) == size for batch in schedule.taken[:-1]), "only the last may be short"
    assert schedule.buffer._num_free == schedule.buffer.num_slots


def test_taking_groups_in_order_of_completion_would_break_the_bound() -> None:
    async def overtake(buffer: RolloutBuffer) -> None:
        (slow,) = await buffer.reserve(1)
        # One group a step, each step one version.
        for version in range(5):
            (ticket,) = await buffer.reserve(1)
            await buffer.deliver(ticket, group(1 + version, version))
            if version == 2:
                await buffer.deliver(slow, group(0, 0))
            async with asyncio.timeout(0.05):
                await buffer.take_batch(partial(int, version))
            await buffer.release(1)

    def play_against(kind: type[RolloutBuffer]) -> None:
        asyncio.run(overtake(kind(groups_per_step=1, max_staleness=1)))

    with pytest.raises(RunError, match="above max_staleness = 1"):
        play_against(CompletionOrderBuffer)
    with pytest.raises(TimeoutError):  # the right buffer waits for the slow group
        play_against(RolloutBuffer)


@settings(deadline=None, max_examples=20)
@given(st.data(), st.integers(1, 4), st.integers(1, 20))
def test_without_staleness_generation_and_learning_take_turns(
    data: st.DataObject, size: int, num_prompts: int
) -> None:
    schedule = play(data, eta=0, size=size, updates=1, num_prompts=num_prompts)

    assert schedule.buffer.num_slots == size
    assert set(schedule.staleness) <= {0}


@pytest.mark.parametrize(
    ("eta", "updates", "num_batches"), [(0, 1, 1), (1, 1, 2), (3, 1, 4), (1, 2, 1), (3, 2, 2)]
)
def test_slots_are_as_many_batches_as_the_bound_allows(
    eta: int, updates: int, num_batches: int
) -> None:
    buffer = RolloutBuffer(groups_per_step=5, max_staleness=eta, updates_per_step=updates)

    assert buffer.num_slots == 5 * num_batches


def test_a_short_last_batch_leaves_once_admission_is_closed() -> None:
    async def play_out() -> None:
        buffer = RolloutBuffer(groups_per_step=3, max_staleness=0)
        tickets = await buffer.reserve(2)
        for ticket in tickets:
            await buffer.deliver(ticket, group(ticket, 0))
        taking = asyncio.create_task(buffer.take_batch(lambda: 0))
        await asyncio.sleep(0.01)
        assert not taking.done(), "a short batch waits as long as more may come"
        await buffer.close_admission()
        assert [made.group_id for made in await taking] == ["0/0", "0/1"]
        assert await buffer.take_batch(lambda: 0) == ()

    run(play_out())


def test_a_dropped_group_makes_room_for_another() -> None:
    async def play_out() -> None:
        buffer = RolloutBuffer(groups_per_step=2, max_staleness=0)
        first, second = await buffer.reserve(2)
        waiting = asyncio.create_task(buffer.reserve(2))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await buffer.drop(first)
        (third,) = await waiting
        await buffer.deliver(third, group(3, 0))
        await buffer.deliver(second, group(2, 0))
        batch = await buffer.take_batch(lambda: 0)
        assert [made.group_id for made in batch] == ["0/2", "0/3"]

    run(play_out())


def test_a_token_beyond_the_bound_is_refused_by_name() -> None:
    async def play_out() -> None:
        buffer = RolloutBuffer(groups_per_step=1, max_staleness=1)
        (ticket,) = await buffer.reserve(1)
        await buffer.deliver(ticket, group(7, 3))
        with pytest.raises(RunError, match=r"group 0/7 holds a token of version 3.*staleness 2"):
            await buffer.take_batch(lambda: 5)

    run(play_out())


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ((3, 5), "holds a token of version 3.*staleness 2"),
        ((5, 6), "token of version 6, and the policy is at version 5: .* another run"),
    ],
    ids=["too old at its beginning", "of another run"],
)
def test_a_rollout_that_went_on_from_older_tokens_is_judged_by_each_of_them(
    versions: tuple[int, int], words: str
) -> None:
    async def play_out() -> None:
        buffer = RolloutBuffer(groups_per_step=1, max_staleness=1)
        (ticket,) = await buffer.reserve(1)
        fresh = group(7, 5)
        spans = tuple(
            VersionSpan(policy_version=version, start=at, end=at + 1)
            for at, version in enumerate(versions)
        )
        went_on = replace(fresh.rollouts[0], version_spans=spans)
        await buffer.deliver(ticket, replace(fresh, rollouts=(fresh.rollouts[0], went_on)))
        with pytest.raises(RunError, match=f"group 0/7 .*{words}"):
            await buffer.take_batch(lambda: 5)

    run(play_out())
