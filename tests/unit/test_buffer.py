"""The buffer: order, bound and pace, on schedules that hypothesis makes up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.buffer import RolloutBuffer, Ticket
from headrace.buffer.order import Order, StrictOrder, WindowedOrder
from headrace.errors import RunError
from headrace.types import Late, Prompt, Rollout, RolloutGroup, SamplingParams, VersionSpan

HANG_SECONDS = 60.0


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
    """One side reserves and delivers in any order, the other trains and publishes beside its next
    step; every choice is random.
    """

    buffer: RolloutBuffer
    groups_per_step: int
    updates_per_step: int
    num_prompts: int
    rng: random.Random
    policy_version: int = 0
    published: int = 0
    """What a group that is admitted now is sampled with."""
    publication: asyncio.Task[None] | None = None
    num_drawn: int = 0
    pending: dict[Ticket, RolloutGroup] = field(default_factory=dict)
    turn: int = 0
    due_at: dict[Ticket, int] = field(default_factory=dict)
    """The turn before which a group is not whole."""
    dropped: set[str] = field(default_factory=set)
    late: list[int] = field(default_factory=list)
    """How many groups each batch left behind for good."""
    admitted: dict[str, int] = field(default_factory=dict)
    """Group id -> ticket."""
    taken: list[tuple[RolloutGroup, ...]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    async def generate(self) -> None:
        while self.num_drawn < self.num_prompts:
            for ticket in await self.buffer.reserve(self.buffer.wave_size):
                await self._admit(ticket)
        await self.buffer.close_admission()

    async def _admit(self, ticket: Ticket) -> None:
        if self.num_drawn == self.num_prompts:
            await self.buffer.drop(ticket)
            return
        # The stalest a group can be: all of it sampled the moment its slot was reserved.
        made = group(self.num_drawn, self.published)
        self.num_drawn += 1
        self.admitted[made.group_id] = ticket
        self.pending[ticket] = made
        self.due_at[ticket] = self.turn + self.rng.choice([0, 0, 0, 30])

    async def deliver(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1
            whole = [ticket for ticket in sorted(self.pending) if self.due_at[ticket] <= self.turn]
            for ticket in self.rng.sample(whole, len(whole)):
                made = self.pending.pop(ticket)
                if self.rng.random() < 0.1 or not await self.buffer.deliver(ticket, made):
                    self.dropped.add(made.group_id)
                    await self.buffer.drop(ticket)
                if self.rng.random() < 0.5:
                    break

    async def learn(self, tasks: asyncio.TaskGroup) -> None:
        while batch := await self.buffer.take_batch(lambda: self.policy_version):
            self.taken.append(batch)
            late = self.buffer.take_late()
            self.late.append(len(late))
            for ticket, made in late.items():
                if made is not None:
                    self.dropped.add(made.group_id)
                    await self.buffer.drop(ticket)
            updates = self.rng.randint(0, self.updates_per_step)
            oldest = min(made.oldest_version or 0 for made in batch)
            self.staleness.append(self.policy_version + max(updates - 1, 0) - oldest)
            await self.turns()
            self.policy_version += updates
            if updates:
                await self.publish(tasks)
            tasks.create_task(self.release(self.publication, len(batch)))
        if self.publication is not None:
            await self.publication

    async def publish(self, tasks: asyncio.TaskGroup) -> None:
        if self.publication is not None:
            await self.publication
        self.publication = tasks.create_task(self.bring(self.policy_version))

    async def bring(self, version: int) -> None:
        await self.turns()
        self.published = version

    async def release(self, publication: asyncio.Task[None] | None, count: int) -> None:
        if publication is not None:
            await asyncio.shield(publication)
        await self.buffer.release(count)

    async def turns(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 5, 40])):
            await asyncio.sleep(0)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.generate())
            delivering = tasks.create_task(self.deliver())
            await self.learn(tasks)
            delivering.cancel()


class HastySchedule(Schedule):
    """The planted fault: slots are free before the weights of their step are published."""

    async def release(self, publication: asyncio.Task[None] | None, count: int) -> None:
        del publication
        await super().release(None, count)


class CrowdedSchedule(Schedule):
    """The planted fault: two publications are under way, and the older one may end last."""

    async def publish(self, tasks: asyncio.TaskGroup) -> None:
        self.publication = tasks.create_task(self.bring(self.policy_version))


def play(
    seed: int,
    *,
    eta: int,
    size: int,
    updates: int,
    num_prompts: int,
    order: Callable[[], Order] | None = None,
    kind: type[RolloutBuffer] = RolloutBuffer,
    player: type[Schedule] = Schedule,
    **options: Any,  # noqa: ANN401 - of RolloutBuffer
) -> Schedule:
    buffer = kind(groups_per_step=size, max_staleness=eta, updates_per_step=updates, **options)
    if order is not None:
        buffer._order = order()
    schedule = player(buffer, size, updates, num_prompts, random.Random(seed))  # noqa: S311 - no secret
    run(schedule.run())
    return schedule


SEEDS = st.integers(0, 2**32)
LATE = st.sampled_from(["wait", "carry_over", "cancel"])


@settings(deadline=None, max_examples=150)
@given(
    SEEDS,
    LATE,
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
    st.integers(1, 25),
)
def test_no_schedule_exceeds_the_bound_or_loses_a_group_or_hangs(
    seed: int,
    late: Late,
    eta: int,
    size: int,
    updates: int,
    depth: int | None,
    num_prompts: int,
) -> None:
    eta = max(eta, updates - 1)
    surplus = seed % 3 + 1 if late == "cancel" else 0
    sizes = {"eta": eta, "size": size, "updates": updates, "num_prompts": num_prompts}
    schedule = play(seed, **sizes, late=late, surplus=surplus, depth=depth)

    assert all(staleness <= eta for staleness in schedule.staleness)
    trained = [made.group_id for batch in schedule.taken for made in batch]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & schedule.dropped
    assert set(trained) | schedule.dropped == {f"0/{n}" for n in range(num_prompts)}
    for batch in schedule.taken:
        tickets = [schedule.admitted[made.group_id] for made in batch]
        assert tickets == sorted(tickets), "a batch is in the order of reservation"
    if late == "wait":
        tickets = [schedule.admitted[name] for name in trained]
        assert tickets == sorted(tickets), "batches leave in the order of reservation"
    assert all(len(batch) == size for batch in schedule.taken[:-1]), "only the last may be short"
    assert max(schedule.late, default=0) <= surplus
    assert schedule.buffer._num_free == schedule.buffer.num_slots
    assert not schedule.buffer._late
    if depth is not None:
        assert schedule.buffer.num_slots <= depth * size + surplus


class CarelessOrder(WindowedOrder):
    """The planted fault: whatever is complete leaves, so a slow group is overtaken for ever."""

    def _may_leave(self, step: int, size: int) -> bool:
        del step, size
        return True

    def overdue(self, step: int) -> Sequence[Ticket]:
        del step
        return ()


class ForgivingOrder(WindowedOrder):
    """The planted fault: what a batch left behind is trained on by a later one."""

    def overdue(self, step: int) -> Sequence[Ticket]:
        del step
        return ()


class EagerBuffer(RolloutBuffer):
    """The planted fault: the slots of a surplus are filled while no batch to come may hold more."""

    def _is_in_time(self) -> bool:
        return True


def careless() -> Order:
    return CarelessOrder(groups_per_step=1, surplus=0)


def forgiving() -> Order:
    return ForgivingOrder(groups_per_step=1, surplus=1)


@pytest.mark.parametrize(
    ("options", "eta"),
    [
        ({"late": "carry_over", "order": careless}, 1),
        ({"late": "cancel", "surplus": 1, "order": forgiving}, 1),
        ({"late": "cancel", "surplus": 1, "kind": EagerBuffer}, 0),
        ({"late": "cancel", "surplus": 1, "kind": EagerBuffer}, 1),
        ({"player": HastySchedule}, 1),
        ({"player": CrowdedSchedule}, 1),
    ],
    ids=[
        "a group is overtaken for ever",
        "nothing is given up",
        "admitted too early",
        "admitted while two batches are out",
        "free before it is published",
        "two publications at once",
    ],
)
def test_some_schedule_finds_each_planted_fault(options: dict[str, Any], eta: int) -> None:
    @settings(deadline=None, max_examples=300, database=None, phases=[Phase.generate])
    @given(SEEDS)
    def search(seed: int) -> None:
        try:
            play(seed, eta=eta, size=1, updates=1, num_prompts=12, **options)
        except BaseExceptionGroup as failures:
            raise FoundError from failures

    with pytest.raises(FoundError) as found:
        search()
    group = found.value.__cause__
    assert isinstance(group, BaseExceptionGroup)
    assert group.subgroup(RunError), "the check at consumption caught it"


class FoundError(Exception):
    """A schedule broke the bound."""


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

    def play_against(order: Order) -> None:
        buffer = RolloutBuffer(groups_per_step=1, max_staleness=1)
        buffer._order = order
        asyncio.run(overtake(buffer))

    with pytest.raises(RunError, match="above max_staleness = 1"):
        play_against(CarelessOrder(groups_per_step=1, surplus=0))
    for right in (StrictOrder(), WindowedOrder(groups_per_step=1, surplus=0)):
        with pytest.raises(TimeoutError):  # the slow group is waited for
            play_against(right)


def test_a_slow_group_is_overtaken_as_long_as_the_bound_allows() -> None:
    async def play_out() -> None:
        buffer = RolloutBuffer(groups_per_step=2, max_staleness=1, late="carry_over")
        tickets = await buffer.reserve(4)
        for ticket in tickets[1:3]:
            await buffer.deliver(ticket, group(ticket, 0))
        batch = await buffer.take_batch(lambda: 0)
        assert [made.group_id for made in batch] == ["0/1", "0/2"]
        await buffer.release(2)
        for ticket in await buffer.reserve(2):
            await buffer.deliver(ticket, group(ticket, 1))
        taking = asyncio.create_task(buffer.take_batch(lambda: 1))
        await asyncio.sleep(0)
        assert not taking.done(), "0/0 and 0/3 can be of no later batch"
        for ticket in (0, 3):
            await buffer.deliver(ticket, group(ticket, 0))
        assert [made.group_id for made in await taking] == ["0/0", "0/3"]

    run(play_out())


def test_what_is_left_behind_for_good_is_told_once_and_holds_its_slot_until_it_is_dropped() -> None:
    async def play_out() -> None:
        buffer = RolloutBuffer(groups_per_step=2, max_staleness=0, late="cancel", surplus=2)
        assert buffer.wave_size == 4
        tickets = await buffer.reserve(4)
        for ticket in tickets[1:]:
            await buffer.deliver(ticket, group(ticket, 0))
        batch = await buffer.take_batch(lambda: 0)
        assert [made.group_id for made in batch] == ["0/1", "0/2"]
        late = buffer.take_late()
        assert {ticket: made and made.group_id for ticket, made in late.items()} == {
            0: None,
            3: "0/3",
        }
        assert not buffer.take_late()
        assert not await buffer.deliver(0, group(0, 0))
        for ticket in late:
            await buffer.drop(ticket)
        reserving = asyncio.create_task(buffer.reserve(4))
        await asyncio.sleep(0)
        assert not reserving.done(), "what is sampled now could be of no batch in time"
        await buffer.release(2)
        assert len(await reserving) == 4

    run(play_out())


@pytest.mark.parametrize(("depth", "num_batches"), [(None, 4), (2, 2), (1, 1), (9, 4)])
def test_the_depth_is_a_bound_of_its_own(depth: int | None, num_batches: int) -> None:
    buffer = RolloutBuffer(groups_per_step=3, max_staleness=3, depth=depth)

    assert (buffer.num_batches, buffer.num_slots) == (num_batches, 3 * num_batches)


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.integers(1, 4), st.integers(1, 20))
def test_without_staleness_generation_and_learning_take_turns(
    seed: int, size: int, num_prompts: int
) -> None:
    schedule = play(seed, eta=0, size=size, updates=1, num_prompts=num_prompts)

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
