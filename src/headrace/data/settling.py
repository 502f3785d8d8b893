"""The rows of a step that are on their way to the ledger while training goes on.

A commit waits for the disk, and nothing of the next step needs to wait with it: a run that is
killed goes back to its last checkpoint, and the ledger with it. Owns: steps are recorded one after
the other, and whoever makes a checkpoint waits until its step is on record (`finish`), so that no
checkpoint is ahead of the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace.data.ledger import Ledger


class Settling:
    """At most one step is under way. Used from one event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._under_way: asyncio.Task[None] | None = None

    async def begin(self, step: int, trained: Sequence[str], dropped: Mapping[str, str]) -> None:
        """Have ``step`` recorded; wait for the one before it. Raises RunError if that failed."""
        await self.finish()
        write = asyncio.to_thread(self._ledger.settle, step, trained, dropped)
        self._under_way = asyncio.create_task(write, name=f"settle step {step}")

    async def finish(self) -> None:
        """Return once everything is recorded; unblocked by the disk. Raises RunError if not."""
        if self._under_way is None:
            return
        # A write cannot be taken back: cancelled, it stays under way, and is waited for again.
        await asyncio.shield(self._under_way)
        self._under_way = None
