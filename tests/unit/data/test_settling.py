from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from headrace.data import Ledger, LedgerCounts, Settling
from headrace.errors import RunError


class HeldLedger(Ledger):
    """Records nothing before it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go_on = threading.Event()

    def settle(self, step: int, trained: Sequence[str], dropped: Mapping[str, str]) -> None:
        assert self.go_on.wait(20.0)
        super().settle(step, trained, dropped)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_a_step_is_under_way_until_it_is_waited_for(path: Path) -> None:
    async def settle(ledger: HeldLedger) -> None:
        settling = Settling(ledger)
        await settling.begin(1, ["0/a"], {"0/b": "too long"})
        assert ledger.counts() == LedgerCounts(num_trained=0, num_dropped=0)
        ledger.go_on.set()
        await settling.finish()
        assert ledger.counts() == LedgerCounts(num_trained=1, num_dropped=1)
        await settling.finish()

    with HeldLedger(path) as ledger:
        asyncio.run(settle(ledger))


def test_a_step_that_failed_is_told_to_whoever_waits_and_to_the_next_one(path: Path) -> None:
    async def settle(ledger: Ledger) -> None:
        settling = Settling(ledger)
        await settling.begin(1, ["0/a"], {})
        await settling.begin(2, ["0/a"], {})
        for _ in range(2):
            with pytest.raises(RunError, match="group 0/a of step 2 was already settled at step 1"):
                await settling.begin(3, ["0/b"], {})
        with pytest.raises(RunError, match="already settled"):
            await settling.finish()
        assert ledger.counts() == LedgerCounts(num_trained=1, num_dropped=0)

    with Ledger(path) as ledger:
        asyncio.run(settle(ledger))


def test_whoever_is_cancelled_while_waiting_leaves_the_write_to_be_waited_for(path: Path) -> None:
    async def settle(ledger: HeldLedger) -> None:
        settling = Settling(ledger)
        await settling.begin(1, ["0/a"], {})
        waiting = asyncio.create_task(settling.finish())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        ledger.go_on.set()
        await settling.finish()
        assert ledger.settled(0) == {"a"}

    with HeldLedger(path) as ledger:
        asyncio.run(settle(ledger))
