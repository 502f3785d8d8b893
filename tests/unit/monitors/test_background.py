import threading
from collections.abc import Iterator
from typing import Never

import pytest

from headrace.monitors.background import BackgroundWriter


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds up what waits for it; opened at the end, so that no thread is left."""
    gate = threading.Event()
    yield gate
    gate.set()


def fail() -> Never:
    raise OSError(28, "No space left on device")


def test_what_is_queued_is_done_in_order_on_another_thread() -> None:
    writer, done = BackgroundWriter("test"), []
    for number in range(100):
        writer.submit(lambda number=number: done.append((number, threading.current_thread().name)))
    writer.flush()
    assert done == [(number, "test") for number in range(100)]
    writer.close()


def test_a_failure_is_told_to_everyone_who_comes_and_nothing_is_done_after_it() -> None:
    writer, done = BackgroundWriter("test"), []
    writer.submit(fail)
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    with pytest.raises(OSError, match="No space left"):
        writer.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert done == []


def test_what_was_queued_behind_a_failure_is_not_done(gate: threading.Event) -> None:
    writer, done = BackgroundWriter("test"), []
    writer.submit(gate.wait)
    writer.submit(fail)
    writer.submit(lambda: done.append(1))
    gate.set()
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert done == []


def test_no_more_than_the_bound_waits_and_who_waits_too_long_is_told(gate: threading.Event) -> None:
    writer = BackgroundWriter("test", max_pending=2, patience_seconds=0.05)
    begun = threading.Event()
    writer.submit(lambda: (begun.set(), gate.wait()))
    assert begun.wait(10)
    for _ in range(2):
        writer.submit(lambda: None)
    with pytest.raises(TimeoutError, match="test: 3 writes were not done"):
        writer.submit(lambda: None)
    with pytest.raises(TimeoutError, match="see whether the disk still answers"):
        writer.flush()


def test_closing_does_what_is_left_and_closing_again_does_nothing() -> None:
    writer, done = BackgroundWriter("test"), []
    writer.submit(lambda: done.append(1))
    writer.close()
    writer.close()
    assert done == [1]
