"""A gate that several may hold shut, and a clock that does not count the time it was shut."""

from __future__ import annotations

import asyncio
import time


class Gate:
    """Open while nobody holds it."""

    def __init__(self) -> None:
        self._holders: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._shut_seconds = 0.0
        self._shut_since: float | None = None

    def hold(self, holder: str) -> None:
        """Shut it for ``holder``. Idempotent."""
        if not self._holders:
            self._shut_since = time.monotonic()
        self._holders.add(holder)
        self._open.clear()

    def release(self, holder: str) -> None:
        """Open it if nobody else holds it. Idempotent."""
        self._holders.discard(holder)
        if self._holders or self._shut_since is None:
            return
        self._shut_seconds += time.monotonic() - self._shut_since
        self._shut_since = None
        self._open.set()

    @property
    def shut_seconds(self) -> float:
        """How long it has been shut, all times together."""
        now = 0.0 if self._shut_since is None else time.monotonic() - self._shut_since
        return self._shut_seconds + now

    async def passed(self) -> None:
        """Wait until it is open; unblocked by `release`."""
        while self._holders:  # it may be shut again before its waiters run
            await self._open.wait()
