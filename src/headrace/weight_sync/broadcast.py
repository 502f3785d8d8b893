"""Blocks by torch.distributed broadcasts: the writer sends to all readers at the same time.

Readers that were told of a version come by a connection of their own, and the writer gathers them
into a process group, `broadcast_group`. A group serves as long as its members stay the same. Who
comes alone (a generator that starts, while others have the version) gets a group of two.

Owns: a round that lost a member ends for all of its members within the deadline, and who is left
comes again and is served by a group without it; who has received all is served, whatever becomes of
the others; and no block is written over while it is sent.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.models.weight_layout import WeightLayout
from headrace.types import WeightPart
from headrace.weight_sync.blocks import BlockHeader, block_bytes, data_start, put_into, write_header
from headrace.weight_sync.broadcast_group import Group, Meeting, Seat
from headrace.weight_sync.network_wire import Line, Server, WireError

_LOG = logging.getLogger(__name__)

SCHEME = "broadcast://"
GATHER_SECONDS = 5.0
"""Longest wait for readers that were told of a version and did not come yet. Who comes later gets
a group of its own, so this costs time and never weights."""
KEEPALIVE_SECONDS = 1.0
"""Between two words to a reader that waits for its turn, by which each hears of the other's end."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Guest:
    """A reader that came and waits for its turn."""

    line: Line
    token: str
    reader: str
    """Which process it is."""
    num_expected: int
    """Readers that come at about the same time as it, itself included."""
    held_group: str
    """That it still has from the round before."""
    came: float = field(default_factory=time.monotonic)
    is_taken: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    """Its round has ended, well or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Formed:
    """The group of the last round."""

    group: Group
    readers: tuple[str, ...]
    """By rank, from 1 on."""


class BroadcastCarrier:
    """Sends blocks from memory of this process, one round after another, on a thread of its own."""

    def __init__(self, host: str, *, bucket_bytes: int, seconds: float) -> None:
        """``host``: the address to listen at. ``seconds``: longest wait for any member.

        Raises OSError.
        """
        self._host, self._bucket_bytes, self._seconds = host, bucket_bytes, seconds
        self._blocks: dict[str, mmap.mmap] = {}
        """By token: what was put and not dropped."""
        self._free: list[mmap.mmap] = []
        """What was dropped, and nothing is sent from."""
        self._sent: mmap.mmap | None = None
        self._guests: list[_Guest] = []
        self._formed: _Formed | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._meeting = Meeting(host, seconds)
        self._server = Server(host, self._receive, seconds)
        self._sender = threading.Thread(target=self._send_rounds, name="broadcasts", daemon=True)
        self._sender.start()

    def room(self, layout: WeightLayout) -> SendingRoom:
        """See `RoomCarrier`. Memory that nothing is sent from: written again it costs less."""
        memory = self._memory(block_bytes(layout))
        views = layout.views(memory, data_start(layout))
        return SendingRoom(carrier=self, memory=memory, layout=layout, tensors=views)

    def put(self, header: BlockHeader, tensors: Mapping[str, Tensor]) -> WeightPart:
        """See `Carrier`."""
        return put_into(self.room(header.layout), header, tensors)

    def use(self, memory: mmap.mmap) -> str:
        """Have ``memory`` sent to whoever comes for it; return where."""
        token = secrets.token_hex(16)
        with self._changed:
            self._blocks[token] = memory
        host, port = self._server.address
        return f"{SCHEME}{host}:{port}/{token}"

    def give_back(self, memory: mmap.mmap) -> None:
        """Take ``memory`` back unsent."""
        with self._changed:
            self._free.append(memory)

    def drop(self, part: WeightPart) -> None:
        """See `Carrier`. A round that has begun comes to its end."""
        with self._changed:
            memory = self._blocks.pop(part.place.rpartition("/")[2], None)
            if memory is not None and memory is not self._sent:
                self._free.append(memory)
            self._changed.notify_all()

    def close(self) -> None:
        """See `Carrier`."""
        with self._changed:
            self._is_closed = True
            self._blocks, self._free = {}, []
            self._changed.notify_all()
        self._server.close()
        self._sender.join(self._seconds)

    def _memory(self, num_bytes: int) -> mmap.mmap:
        with self._changed:
            fitting = [memory for memory in self._free if len(memory) == num_bytes]
            self._free = []
        try:
            return fitting[0] if fitting else mmap.mmap(-1, num_bytes)
        except OSError as error:
            msg = (
                f"the learner's process has no memory for a published version of {num_bytes} "
                f"bytes: {error}; train with less memory, or publish by weight_sync.transport = "
                '"files"'
            )
            raise WeightSyncError(msg) from error

    def _receive(self, line: Line) -> None:
        """Take a reader in. Waits for its round; ended by that, or by the reader's end."""
        asked = line.hear()
        guest = _Guest(
            line=line,
            token=str(asked["token"]),
            reader=str(asked["reader"]),
            num_expected=int(asked["num_expected"]),
            held_group=str(asked["held_group"]),
        )
        with self._changed:
            if self._is_closed:
                return
            self._guests.append(guest)
            self._changed.notify_all()
        while not guest.over.wait(KEEPALIVE_SECONDS):
            with self._changed:
                if guest.is_taken:
                    continue
                try:
                    line.say(wait=True)
                except WireError:
                    self._guests.remove(guest)
                    self._changed.notify_all()
                    raise

    def _send_rounds(self) -> None:
        """Waits for readers; unblocked by those that come, and ended by `close`."""
        try:
            while (guests := self._gathered()) is not None:
                try:
                    self._serve(guests)
                except (RuntimeError, WireError) as error:
                    # Members hear of it by what they wait for, and come again.
                    _LOG.warning("a broadcast of weights goes on without who was lost: %s", error)
                    self._formed = None
                finally:
                    self._let_go(guests)
        finally:
            # However this ends: nobody may wait for a round that will not be.
            with self._changed:
                self._is_closed = True
                for guest in self._guests:
                    guest.over.set()

    def _gathered(self) -> list[_Guest] | None:
        """Return those that were told of one version together, None once closed.

        Waits for the first of them, then for those that it expects; unblocked by them, or after
        `GATHER_SECONDS`.
        """
        with self._changed:
            while not self._is_closed:
                if not self._guests:
                    self._changed.wait()
                    continue
                first = self._guests[0]
                found = [guest for guest in self._guests if guest.token == first.token]
                left = first.came + GATHER_SECONDS - time.monotonic()
                is_known = first.token in self._blocks
                if is_known and len(found) < max(g.num_expected for g in found) and left > 0:
                    self._changed.wait(left)
                    continue
                for guest in found:
                    guest.is_taken = True
                    self._guests.remove(guest)
                self._sent = self._blocks.get(first.token)
                return found
            return None

    def _serve(self, guests: Sequence[_Guest]) -> None:
        """Send the block to ``guests``. Raises RuntimeError or WireError where one was lost."""
        memory = self._sent
        if memory is None:
            for guest in guests:
                guest.line.say(gone=True)
            return
        # One that came again has left behind what it came by before.
        here = {guest.reader: guest for guest in guests}
        group = self._group(here, len(memory))
        group.broadcast(torch.frombuffer(memory, dtype=torch.uint8), self._bucket_bytes)
        for guest in here.values():
            guest.line.hear()  # that it has all; one that has not ends the connection

    def _group(self, here: Mapping[str, _Guest], num_bytes: int) -> Group:
        """Return the group of who is ``here`` once all are in it: that of the last round or new."""
        formed = self._formed
        if formed is not None and (
            set(formed.readers) != set(here)
            or any(guest.held_group != formed.group.seat.name for guest in here.values())
        ):
            formed = self._formed = None  # its connections end before others begin
        name = secrets.token_hex(8) if formed is None else formed.group.seat.name
        readers = tuple(here) if formed is None else formed.readers
        for rank, reader in enumerate(readers, 1):
            here[reader].line.say(
                group=name,
                rank=rank,
                size=len(readers) + 1,
                meeting=self._meeting.address[1],
                bucket_bytes=self._bucket_bytes,
                num_bytes=num_bytes,
            )
        if formed is None:
            seat = Seat(name=name, rank=0, size=len(readers) + 1)
            group = Group(self._meeting.store, seat, self._host, self._seconds)
            formed = self._formed = _Formed(group=group, readers=readers)
        return formed.group

    def _let_go(self, guests: Sequence[_Guest]) -> None:
        with self._changed:
            memory, self._sent = self._sent, None
            if memory is not None and all(memory is not kept for kept in self._blocks.values()):
                self._free.append(memory)
        for guest in guests:
            guest.over.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingRoom:
    """Memory that a block is broadcast from: a `Room`."""

    carrier: BroadcastCarrier
    memory: mmap.mmap
    layout: WeightLayout
    tensors: Mapping[str, Tensor]

    def commit(self, header: BlockHeader) -> WeightPart:
        """See `Room`."""
        assert header.layout == self.layout, "the room was made for other tensors"
        write_header(self.memory, header)
        return header.part(self.carrier.use(self.memory))

    def give_back(self) -> None:
        """See `Room`."""
        self.carrier.give_back(self.memory)
