"""The machines of a cluster as those of a learner's ranks, one life of it at a time.

Owns: who waits for a rank hears within a deadline that its machine is gone; what is left of a life
is killed with it, and where it cannot be reached it neither meets the ranks of later ones, which
have another store, nor goes on for long (`rank_actor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

from ray.exceptions import RayActorError, RayError
from torch._C._distributed_c10d import TCPStore

from headrace.errors import LearnerFailure
from headrace.patience import wait_patiently
from headrace.runtime.ray.calls import answer_of, kill_actor, one_line, start_actor
from headrace.runtime.ray.cluster import own_address
from headrace.runtime.ray.rank_actor import BEAT_SECONDS, Heard, RankActor, Started
from headrace.runtime.ray.room import Room

_TRIES = 3
"""Actors that are sent off for one rank, where machines end before one is there."""
_END_SECONDS = 5.0
"""For an actor to end its process; it is killed then, and the process with it."""


class RankOnRay:
    """A rank's process on some machine: a `RankLine`."""

    def __init__(self, actor: Any, started: Started, *, silence_seconds: float) -> None:  # noqa: ANN401 - Ray's
        """``silence_seconds``: longest wait for a sign of life of its machine."""
        self._actor, self._silence = actor, silence_seconds
        self.pid = started.pid
        self.title = f"process {started.pid} on {started.host}"
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self.returncode: int | None = None
        self.loss: str | None = None
        self._is_ended = False
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self._writing = asyncio.create_task(self._write())

    def write(self, frame: bytes | None) -> None:
        """See `ProcessLine`."""
        self._frames.put_nowait(frame)

    async def wait(self) -> None:
        """See `ProcessLine`."""
        await asyncio.wait({self._reading})

    async def asked_where(self) -> str:
        """See `RankLine`."""
        try:
            found = await asyncio.wait_for(
                answer_of(self._actor.asked_where.remote()), self._silence
            )
        except (RayError, TimeoutError):
            return "?"
        assert isinstance(found, str)
        return found

    async def end(self) -> None:
        """See `ProcessLine`."""
        if self._is_ended:
            return
        self._is_ended = True
        self._writing.cancel()
        if self.loss is None:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(answer_of(self._actor.end.remote()), _END_SECONDS)
            await asyncio.wait({self._reading}, timeout=_END_SECONDS)
        self._reading.cancel()
        await kill_actor(self._actor)

    def close(self) -> None:
        """See `ProcessLine`. There are no pipes on this machine."""

    async def _read(self) -> None:
        """Waits for what the process says; unblocked by it, by its end, or by silence."""
        try:
            while True:
                heard = await self._heard()
                self.stdout.feed_data(heard.output)
                self.stderr.feed_data(heard.said)
                if heard.is_over:
                    self.returncode = heard.returncode
                    return
        except TimeoutError:
            self.loss = f"was lost with its machine, which was silent for {self._silence:g} s,"
        except RayError as error:
            self.loss = f"was lost with its machine or its actor ({one_line(error)})"
        finally:
            self.stdout.feed_eof()
            self.stderr.feed_eof()

    async def _heard(self) -> Heard:
        """Ask once; raises TimeoutError where no answer comes, and RayError."""
        asked: asyncio.Future[Heard] = asyncio.ensure_future(answer_of(self._actor.read.remote()))
        try:
            if await wait_patiently({asked}, self._silence):
                raise TimeoutError
            return asked.result()
        finally:
            asked.cancel()

    async def _write(self) -> None:
        """Waits for frames; one goes at a time, since Ray promises no order of calls."""
        while True:
            frame = await self._frames.get()
            try:
                await answer_of(self._actor.write.remote(frame))
            except RayError:
                return  # the reader hears of it too, and says so


class RayHosts:
    """The machines where a run has room for its ranks: `RankHosts`."""

    are_here = False

    def __init__(self, room: Room, *, silence_seconds: float, deadline_seconds: float) -> None:
        """``silence_seconds``: longest wait for a sign of life of a machine.

        ``deadline_seconds``: longest start of an actor, the wait for its room included.
        """
        self.num_threads = max(1, int(room.demand.num_cpus))
        self._room = room
        self._silence = max(silence_seconds, 2 * BEAT_SECONDS)
        self._deadline = deadline_seconds
        self._store: TCPStore | None
        self._store, self._meeting = _served(own_address())

    async def launch(self, rank: int) -> RankOnRay:
        """See `RankHosts`. Waits for the actor; unblocked by its first answer or the deadline."""
        deadline = time.monotonic() + self._deadline
        for tries_left in reversed(range(_TRIES)):
            actor = start_actor(RankActor, **self._room.options(rank))
            try:
                asked = actor.start.remote(self._silence)
                seconds = max(0.0, deadline - time.monotonic())
                started = await asyncio.wait_for(answer_of(asked), seconds)
            except (RayError, TimeoutError) as error:
                await kill_actor(actor)
                # Ray sends an actor to a machine of which it does not know yet that it is gone.
                if tries_left and isinstance(error, RayActorError):
                    continue
                msg = f"rank {rank} of the learner did not start: {self._why(error)}"
                raise LearnerFailure(msg) from error
            return RankOnRay(actor, started, silence_seconds=self._silence)
        raise AssertionError

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no machine took it within {self._deadline:g} s"
        return one_line(error)

    def meeting(self) -> str:
        """See `RankHosts`."""
        return self._meeting

    def device(self, kind: str, rank: int) -> str:
        """See `RankHosts`. Ray shows each actor its own device alone."""
        del rank
        return f"{kind}:0" if kind == "cuda" else kind

    def close(self) -> None:
        """See `RankHosts`."""
        self._store = None


def _served(address: str) -> tuple[TCPStore, str]:
    """Serve a store at ``address`` alone, on a free port; return it and how it is found."""
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, f"tcp://{address}:{port}"
