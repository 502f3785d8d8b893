"""How late the event loop is: what a part that computes on it costs all the others."""

from __future__ import annotations

import asyncio
import time

EVERY_SECONDS = 0.05


class LoopLag:
    """Sleeps again and again, and notes by how much it was woken too late."""

    def __init__(self) -> None:
        self._longest = 0.0

    async def measure(self) -> None:
        """Go on until cancelled."""
        while True:
            due = time.monotonic() + EVERY_SECONDS
            await asyncio.sleep(EVERY_SECONDS)
            self._longest = max(self._longest, time.monotonic() - due)

    def take(self) -> float:
        """Return the longest delay since the last call, in seconds."""
        longest, self._longest = self._longest, 0.0
        return longest
