"""The generator's end of broadcasts: comes to the writer, joins the group it is given, receives.

Owns: what is handed on has arrived to its last byte, over one group. Where a member of that was
lost nothing of it is kept, and the reader comes again, for the group without the lost one. Memory
for a version is there from its first bucket until the generator has made it its own.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.distributed_c10d import Store

from headrace.errors import WeightSyncError
from headrace.types import WeightNotice, WeightPart, WeightUpdate
from headrace.weight_sync.blocks import read_block
from headrace.weight_sync.broadcast import SCHEME
from headrace.weight_sync.broadcast_group import Group, Seat, meeting_at
from headrace.weight_sync.network_wire import Line, Message, WireError, where_from

MAX_ROUNDS = 6
"""In which others were lost, before the fault is taken for this process's own."""


class BroadcastReader:
    """A `WeightReader`. Its pickle is how to make another one."""

    def __init__(self, *, seconds: float) -> None:
        """``seconds``: longest wait for the writer or any member of a group."""
        self._seconds = seconds
        self._name = secrets.token_hex(8)
        self._meeting: tuple[int, Store] | None = None
        self._group: Group | None = None
        """Of the last round; serves again where its members come again."""

    def __reduce__(self) -> tuple[object, ...]:
        """Connections stay where they are."""
        return _reader, (self._seconds,)

    @contextmanager
    def open(self, notice: WeightNotice) -> Iterator[WeightUpdate]:
        """See `WeightReader`. Waits for its round, as `_received` says."""
        (part,) = notice.parts
        memory = self._received(part, notice.num_readers)
        block = read_block(memory, part)
        yield WeightUpdate(
            policy_version=notice.policy_version, tensors=block.tensors, checksum=notice.checksum
        )

    def close(self) -> None:
        """See `WeightReader`."""
        self._group = self._meeting = None

    def _received(self, part: WeightPart, num_readers: int) -> mmap.mmap:
        """Return the block, from one round or another.

        Waits for the writer and the other readers; unblocked by them, by the end of one, or by the
        deadline. Raises WeightSyncError, without a cause only where the writer has it no more: all
        else may go well in another process.
        """
        expected = num_readers
        for left in reversed(range(MAX_ROUNDS)):
            try:
                return self._round(part, expected)
            except (RuntimeError, WireError) as error:
                self._group = None
                if not left:
                    msg = (
                        f"version {part.policy_version} did not arrive by broadcast in "
                        f"{MAX_ROUNDS} rounds: {error}"
                    )
                    raise WeightSyncError(msg) from error
            expected = max(1, expected - 1)  # one was lost
        raise AssertionError

    def _round(self, part: WeightPart, num_expected: int) -> mmap.mmap:
        (host, port), token = where_from(part, SCHEME, "place of broadcast weights")
        line = Line.to((host, port), self._seconds)
        try:
            line.say(
                token=token,
                reader=self._name,
                num_expected=num_expected,
                held_group="" if self._group is None else self._group.seat.name,
            )
            told = line.hear()
            while told.get("wait"):
                told = line.hear()
            if told.get("gone") or told["num_bytes"] != part.num_bytes:
                msg = f"version {part.policy_version} is gone: it is no longer broadcast"
                raise WeightSyncError(msg)
            group = self._joined(told, host, line.connection.getsockname()[0])
            memory = mmap.mmap(-1, part.num_bytes)
            group.broadcast(torch.frombuffer(memory, dtype=torch.uint8), int(told["bucket_bytes"]))
            line.say(done=True)
        finally:
            line.close()
        return memory

    def _joined(self, told: Message, host: str, own_host: str) -> Group:
        if self._group is not None and self._group.seat.name == told["group"]:
            return self._group
        self._group = None  # its connections end before others begin
        seat = Seat(name=told["group"], rank=int(told["rank"]), size=int(told["size"]))
        port = int(told["meeting"])
        if self._meeting is None or self._meeting[0] != port:
            self._meeting = port, meeting_at((host, port), self._seconds)
        self._group = Group(self._meeting[1], seat, own_host, self._seconds)
        return self._group


def _reader(seconds: float) -> BroadcastReader:
    return BroadcastReader(seconds=seconds)
