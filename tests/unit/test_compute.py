from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from headrace.compute import ComputeThread


def test_work_is_done_in_order_on_one_thread_with_its_own_number_of_cores() -> None:
    others = torch.get_num_threads()
    compute = ComputeThread("test", others + 1)
    hold, begun = threading.Event(), list[int]()
    compute.submit(hold.wait)

    def work(number: int) -> tuple[int, int, int]:
        begun.append(number)
        return number, threading.get_ident(), torch.get_num_threads()

    futures = [compute.submit(partial(work, number)) for number in range(20)]
    assert not begun, "the thread is held"
    hold.set()
    seen = [future.result() for future in futures]
    compute.close()

    assert begun == list(range(20))
    assert [number for number, _, _ in seen] == begun
    (thread,) = {thread for _, thread, _ in seen}
    assert thread != threading.get_ident()
    assert {cores for _, _, cores in seen} == {others + 1}
    assert torch.get_num_threads() == others, "the caller keeps its own"


def test_a_thread_that_starts_later_is_given_no_more_cores_than_the_caller() -> None:
    others = torch.get_num_threads()
    compute = ComputeThread("test", others + 1)
    seen: list[int] = []

    late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    late.start()
    late.join()
    compute.close()

    assert seen == [others]


def test_a_failure_belongs_to_whoever_waits_and_the_thread_goes_on() -> None:
    compute = ComputeThread("test", 1)

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        compute.submit(fail).result()
    assert compute.submit(lambda: 7).result() == 7
    compute.close()


def test_closing_does_what_was_queued_and_takes_nothing_more() -> None:
    compute = ComputeThread("test", 1)
    hold = threading.Event()
    compute.submit(hold.wait)
    queued = compute.submit(lambda: "done")
    hold.set()

    compute.close()
    compute.close()

    assert queued.result(timeout=0) == "done"
    with pytest.raises(RuntimeError, match="test was closed"):
        compute.submit(lambda: None)


def test_a_thread_that_was_given_up_takes_no_work_and_nobody_waits_for_it() -> None:
    compute = ComputeThread("test", 1)
    hold = threading.Event()
    compute.submit(hold.wait)

    compute.give_up()
    compute.close()

    assert not hold.is_set(), "or it was waited for"
    with pytest.raises(RuntimeError, match="test was closed"):
        compute.submit(lambda: None)
    hold.set()


def test_work_that_nobody_wants_any_more_is_not_begun() -> None:
    compute = ComputeThread("test", 1)
    hold, begun = threading.Event(), threading.Event()
    compute.submit(hold.wait)
    unwanted = compute.submit(begun.set)

    assert unwanted.cancel()
    hold.set()
    compute.close()

    assert not begun.is_set()


def test_a_call_waits_for_the_thread_and_on_the_thread_itself_is_made_at_once() -> None:
    compute = ComputeThread("test", 1)
    threads = [compute.call(threading.get_ident)]
    threads.append(compute.submit(lambda: compute.call(threading.get_ident)).result(timeout=60))
    compute.close()

    assert threads[0] == threads[1] != threading.get_ident()
    with pytest.raises(RuntimeError, match="was closed"):
        compute.call(threading.get_ident)
