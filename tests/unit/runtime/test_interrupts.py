"""What a signal asks of a run, by how many came before it."""

from __future__ import annotations

import asyncio
import signal

import pytest

from headrace.runtime.interrupts import _Interrupts

INT, TERM = signal.SIGINT, signal.SIGTERM


class Stops:
    """A controller that counts how often it is asked to stop."""

    def __init__(self) -> None:
        self.count = 0

    def request_stop(self) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("signals", "is_cancelled"),
    [
        ([INT], False),
        ([TERM], False),
        ([TERM, TERM, TERM], False),
        ([INT, TERM], False),
        ([INT, INT], True),
        ([TERM, INT], True),
    ],
)
def test_ctrl_c_after_any_signal_stops_at_once_and_sigterm_only_after_the_step(
    signals: list[signal.Signals], is_cancelled: bool
) -> None:
    async def main() -> None:
        work = asyncio.create_task(asyncio.sleep(1000.0))
        interrupts, controller = _Interrupts(work), Stops()
        interrupts.watch(controller)  # type: ignore[arg-type]
        before = [signal.getsignal(number) for number in (INT, TERM)]
        try:
            for number in signals:
                interrupts.receive(number)
        finally:
            for number, handler in zip((INT, TERM), before, strict=True):
                signal.signal(number, handler)
        await asyncio.sleep(0)
        assert (
            (work.cancelled() or work.cancelling() > 0) == is_cancelled == interrupts.stop_at_once
        )
        assert controller.count == 1
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(main())
