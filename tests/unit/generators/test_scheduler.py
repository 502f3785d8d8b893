from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.generators.torch_engine.scheduler import Scheduler
from headrace.types import GenerationRequest, Prompt, SamplingParams


def request(name: str, size: int, length: int = 4) -> GenerationRequest:
    prompt = Prompt(prompt_id=name, source="test", text="", token_ids=(1,) * length)
    return GenerationRequest(
        group_id=name, prompt=prompt, group_size=size, sampling=SamplingParams(), seed=0
    )


def admitted(scheduler: Scheduler, num_running: int) -> list[tuple[str, int]]:
    return [(b.prompt.prompt_id, len(b.tickets)) for b in scheduler.admit(num_running)]


def scheduler_of(max_running: int, *requests: GenerationRequest, **options: int) -> Scheduler:
    scheduler = Scheduler(**{"max_running": max_running, "max_prefill_tokens": 100, **options})
    scheduler.submit(requests)
    return scheduler


def test_groups_are_admitted_whole_and_in_order() -> None:
    scheduler = scheduler_of(16, request("a", 8), request("b", 8), request("c", 8))
    assert admitted(scheduler, 0) == [("a", 8), ("b", 8)]
    assert admitted(scheduler, 16) == []
    assert admitted(scheduler, 8) == [("c", 8)]
    assert scheduler.is_empty


def test_a_group_waits_whole_while_few_slots_are_idle() -> None:
    scheduler = scheduler_of(64, request("a", 8))
    assert admitted(scheduler, 57) == []
    assert admitted(scheduler, 56) == [("a", 8)]


def test_a_group_is_torn_apart_before_many_slots_stand_idle() -> None:
    scheduler = scheduler_of(8, request("a", 8))
    assert admitted(scheduler, 1) == [("a", 7)]
    assert admitted(scheduler, 7) == [("a", 1)]


def test_a_group_larger_than_the_engine_is_split() -> None:
    scheduler = scheduler_of(4, request("a", 10))
    assert [admitted(scheduler, 0) for _ in range(3)] == [[("a", 4)], [("a", 4)], [("a", 2)]]


def test_a_prefill_is_bounded_and_a_longer_prompt_gets_its_own() -> None:
    requests = [request("a", 1, 60), request("b", 1, 60), request("c", 1, 150), request("d", 1)]
    scheduler = scheduler_of(8, *requests)
    assert admitted(scheduler, 0) == [("a", 1)]
    assert admitted(scheduler, 0) == [("b", 1)]
    assert admitted(scheduler, 0) == [("c", 1)]
    assert admitted(scheduler, 0) == [("d", 1)]


def test_dropping_takes_out_one_group_alone() -> None:
    scheduler = Scheduler(max_running=4, max_prefill_tokens=100)
    first, _ = scheduler.submit([request("a", 2), request("b", 2)])
    scheduler.drop({first})
    assert admitted(scheduler, 0) == [("b", 2)]


@given(st.integers(1, 20), st.lists(st.integers(1, 30), max_size=8), st.data())
def test_every_rollout_starts_once_and_no_slot_is_given_twice(
    max_running: int, sizes: list[int], data: st.DataObject
) -> None:
    scheduler = scheduler_of(max_running, *(request(str(i), s) for i, s in enumerate(sizes)))
    running, started = 0, []
    while not scheduler.is_empty:
        branches = scheduler.admit(running)
        assert branches or running
        started += [
            (ticket.request.group_id, ticket.rollout_index)
            for b in branches
            for ticket in b.tickets
        ]
        running += sum(len(branch.tickets) for branch in branches)
        assert running <= max_running
        running -= data.draw(st.integers(1, running))
    assert started == [(str(i), k) for i, size in enumerate(sizes) for k in range(size)]
