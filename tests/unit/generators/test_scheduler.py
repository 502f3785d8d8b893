from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.scheduler import Scheduler
from headrace.types import GenerationRequest, Prompt, SamplingParams


def request(name: str, size: int, length: int = 4) -> GenerationRequest:
    prompt = Prompt(prompt_id=name, source="test", text="", token_ids=(1,) * length)
    return GenerationRequest(
        group_id=name, prompt=prompt, group_size=size, sampling=SamplingParams(), seed=0
    )


def admitted(scheduler: Scheduler, num_running: int) -> list[tuple[str, int]]:
    """Let one prefill pass happen; return the groups that are complete by it, and how many."""
    done = scheduler.finished(scheduler.next_parts(num_running))
    return [(b.tickets[0].request.group_id, len(b.tickets)) for b in done]


def scheduler_of(max_running: int, *requests: GenerationRequest, **options: int) -> Scheduler:
    blocks = BlockManager(num_blocks=options.pop("num_blocks", 10_000), block_size=4)
    options = {"max_running": max_running, "max_prefill_tokens": 100, **options}
    scheduler = Scheduler(blocks, **options)
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


def test_a_long_prompt_is_prefilled_in_parts_between_which_others_go_on() -> None:
    requests = [request("a", 1, 60), request("b", 1, 61), request("c", 1, 150), request("d", 1)]
    scheduler = scheduler_of(8, *(with_ids(r, n) for n, r in enumerate(requests)))
    assert [admitted(scheduler, 0) for _ in range(3)] == [
        [("a", 1)],
        [("b", 1)],
        [("c", 1), ("d", 1)],
    ]
    assert scheduler.is_empty


def test_a_beginning_that_is_known_is_not_prefilled_again() -> None:
    scheduler = scheduler_of(8, request("a", 1, 30))
    assert admitted(scheduler, 0) == [("a", 1)]
    scheduler.submit([request("b", 1, 30)])
    (part,) = scheduler.next_parts(1)
    assert part.num_tokens == 30 - 28  # seven whole blocks of four


def test_a_group_waits_until_the_cache_has_room_for_it() -> None:
    scheduler = scheduler_of(8, request("a", 2, 8), with_ids(request("b", 1, 8), 2), num_blocks=4)
    assert admitted(scheduler, 0) == [("a", 2)]
    # Two blocks are left, for the prompt of "b" but not for what it would sample.
    assert admitted(scheduler, 2) == []
    assert admitted(scheduler, 0) == [("b", 1)]


def test_what_is_taken_back_comes_before_what_waits() -> None:
    scheduler = scheduler_of(8, request("a", 2), request("b", 1))
    first, _ = scheduler.finished(scheduler.next_parts(5))
    scheduler.submit([request("c", 1)])
    scheduler.take_back(first.tickets)
    assert admitted(scheduler, 0) == [("a", 2), ("c", 1)]


def test_what_begins_like_a_prompt_in_prefill_waits_until_that_is_found() -> None:
    scheduler = scheduler_of(8, request("a", 1, 9), request("b", 1, 10), request("c", 1, 11))
    assert [part.num_tokens for part in scheduler.next_parts(0)] == [9]
    assert admitted(scheduler, 0) == [("a", 1)]
    assert [part.num_tokens for part in scheduler.next_parts(1)] == [10 - 8, 11 - 8]


def test_the_youngest_prefill_gives_its_blocks_back_first() -> None:
    scheduler = scheduler_of(8, with_ids(request("a", 1, 80), 1), with_ids(request("b", 1, 80), 2))
    scheduler.finished(scheduler.next_parts(0))
    assert scheduler.preempt_prefill()
    assert not scheduler.preempt_prefill()
    assert admitted(scheduler, 1) == [("b", 1)]


def with_ids(request: GenerationRequest, token: int) -> GenerationRequest:
    """Return ``request`` with a prompt that begins like no other one's."""
    ids = (token + 10,) * len(request.prompt.token_ids)
    return replace(request, prompt=replace(request.prompt, token_ids=ids))


def test_dropping_takes_out_one_group_alone_and_gives_its_blocks_back() -> None:
    blocks = BlockManager(num_blocks=100, block_size=4)
    scheduler = Scheduler(blocks, max_running=4, max_prefill_tokens=10)
    first, _ = scheduler.submit([with_ids(request("a", 2, 30), 1), request("b", 2)])
    scheduler.finished(scheduler.next_parts(0))
    assert blocks.num_held == 8
    scheduler.drop({first})
    assert blocks.num_held == 0
    assert admitted(scheduler, 0) == [("b", 2)]


@given(st.integers(1, 20), st.lists(st.integers(1, 30), max_size=8), st.data())
def test_every_rollout_starts_once_and_no_slot_is_given_twice(
    max_running: int, sizes: list[int], data: st.DataObject
) -> None:
    scheduler = scheduler_of(max_running, *(request(str(i), s) for i, s in enumerate(sizes)))
    running, started = 0, []
    while not scheduler.is_empty:
        branches = scheduler.finished(scheduler.next_parts(running))
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
