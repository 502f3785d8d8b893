"""Members of a broadcast that stop in the middle of it, as real processes: readers and a writer."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sync_lab import DEADLINE, update
from torch import Tensor

from headrace.roles import WeightReader
from headrace.types import WeightNotice, WeightUpdate
from headrace.weight_sync.broadcast import BroadcastCarrier
from headrace.weight_sync.broadcast_group import Group
from headrace.weight_sync.broadcast_reader import BroadcastReader
from headrace.weight_sync.store import RoomStore

BUCKET_BYTES = 4096


def stop_in_the_middle(with_signal: signal.Signals) -> None:
    """Have this process take part in one bucket of its next broadcast and then get the signal."""
    whole = Group.broadcast

    def one_bucket(self: Group, memory: Tensor, bucket_bytes: int) -> None:
        assert len(memory) > bucket_bytes, "there is no middle"
        whole(self, memory[:bucket_bytes], bucket_bytes)
        os.kill(os.getpid(), with_signal)

    Group.broadcast = one_bucket  # type: ignore[method-assign]


def stop_at_the_door(with_signal: signal.Signals) -> None:
    """Have this process get the signal when it was given its place in a group."""

    def never(*_: object) -> None:
        os.kill(os.getpid(), with_signal)

    Group.__init__ = never  # type: ignore[method-assign]


@dataclass(slots=True)
class StoppingReader:
    """A reader whose process stops in the middle of a broadcast, or before it."""

    reader: WeightReader
    with_signal: signal.Signals
    is_in_the_middle: bool = True

    @contextmanager
    def open(self, notice: WeightNotice) -> Iterator[WeightUpdate]:
        stop = stop_in_the_middle if self.is_in_the_middle else stop_at_the_door
        stop(self.with_signal)
        with self.reader.open(notice) as found:
            yield found

    def close(self) -> None:
        self.reader.close()


def made(
    *, bucket_bytes: int = BUCKET_BYTES, seconds: float = DEADLINE
) -> tuple[RoomStore, BroadcastReader]:
    carrier = BroadcastCarrier("127.0.0.1", bucket_bytes=bucket_bytes, seconds=seconds)
    return RoomStore(carrier), BroadcastReader(seconds=seconds)


@contextmanager
def dying_writer() -> Iterator[WeightNotice]:
    """The notice of version 1, whose writer is killed in the middle of its broadcast."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        yield pickle.load(process.stdout)  # noqa: S301 - our own child
        assert process.wait(DEADLINE) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stdout.close()


def _write() -> None:
    store, _ = made()
    notice = asyncio.run(store.write(update(1)))
    stop_in_the_middle(signal.SIGKILL)
    pickle.dump(notice, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    signal.pause()


if __name__ == "__main__":
    _write()
