"""Connections of a server, bounded in number and in what they may take to say what they want.

Owns: a connection that is in no request has ``HEAD_SECONDS`` for the head of its next one, from
its first byte on, or from its beginning where it never sent one; one that does not read its answers
has ``UNREAD_SECONDS``; where there are too many, the one that has gone longest without a request
makes room. So whoever opens connections and says nothing, or a byte at a time, or listens to
nothing, keeps nobody out. uvicorn bounds idle connections and the bytes of heads, no more.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_SECONDS = 10.0
"""For the head of a request to arrive; it is a few hundred bytes."""


UNREAD_SECONDS = 30.0
"""For the other side to read what is more than the buffers on the way hold."""


class BoundedConnection(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, with a deadline for heads."""

    head_seconds = HEAD_SECONDS
    unread_seconds = UNREAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._quiet_since = self.loop.time()
        """When it began, or when its last request was answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, and end the connections that are too many."""
        self._make_room()
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._unwatch()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on. What is no whole head yet has a deadline that further bytes do not move."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may be there already."""
        self._quiet_since = self.loop.time()
        super().on_response_complete()
        if self._is_in_request:
            self._unwatch()

    def pause_writing(self) -> None:
        """Wait for the other side to read, but not for ever."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: it has read."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection at once: a close would wait for the other side to read."""
        self.transport.abort()

    @property
    def _is_in_request(self) -> bool:
        # Not None, says uvicorn's type; it is, until the first head has come.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch(self) -> None:
        if self._is_in_request:
            self._unwatch()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        """End the longest without a request, those that never had one first."""
        most = self.limit_concurrency
        if most is None or len(self.connections) < most - 1:
            return
        others = [one for one in self.connections if isinstance(one, BoundedConnection)]
        quiet = [one for one in others if not one._is_in_request]  # noqa: SLF001 - of this class
        if quiet:
            first = min(quiet, key=lambda one: (one.scope is not None, one._quiet_since))  # noqa: SLF001 - of this class
            self.connections.discard(first)
            first.transport.abort()
