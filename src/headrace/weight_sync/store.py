"""The two ends of a weight sync between processes, whatever carries the bytes.

Owns: a version is told of only once its block is whole, its checksum is that of the tensors it was
given, and a block is kept for as long as a notice of it may be opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.errors import WeightSyncError
from headrace.models.weight_layout import WeightLayout
from headrace.types import WeightNotice, WeightPart, WeightUpdate
from headrace.weight_sync.blocks import BlockHeader, Carrier, Fetcher, Room, RoomCarrier

T = TypeVar("T")


class WholeStore:
    """A `WeightStore` that writes all weights each time."""

    def __init__(self, carrier: Carrier, compute: ComputeThread | None = None) -> None:
        """``compute``: where tensors are copied; None takes any thread, with one core."""
        self._carrier, self._compute = carrier, compute
        self._parts: list[WeightPart] = []

    async def write(self, update: WeightUpdate, *, is_whole: bool = False) -> WeightNotice:
        """See `WeightStore`. Always whole, whatever ``is_whole`` says."""
        del is_whole
        return await on_thread(self._compute, lambda: self._put(update))

    def _put(self, update: WeightUpdate) -> WeightNotice:
        part = self._part(update)
        # Noted here, where it also happens if nobody waits for it any more.
        self._parts.append(part)
        return WeightNotice(parts=(part,))

    def _part(self, update: WeightUpdate) -> WeightPart:
        header = whole_header(update, WeightLayout.of_tensors(update.tensors))
        return self._carrier.put(header, update.tensors)

    def release(self, policy_version: int) -> None:
        """See `WeightStore`. After a learner's restart versions go back, and order decides."""
        since = last_index([p.policy_version == policy_version for p in self._parts])
        kept = [
            part
            for index, part in enumerate(self._parts)
            if part.policy_version >= policy_version and index >= since
        ]
        for part in self._parts:
            if part not in kept:
                self._carrier.drop(part)
        self._parts = kept

    def close(self) -> None:
        """See `WeightStore`."""
        self._carrier.close()


class RoomStore(WholeStore):
    """A `WholeStore` in whose memory a learner may compute what it publishes: a `WeightRoom`."""

    def __init__(self, carrier: RoomCarrier, compute: ComputeThread | None = None) -> None:
        """See `WholeStore`."""
        super().__init__(carrier, compute)
        self._rooms = carrier
        self._room: Room | None = None

    def take(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """See `WeightRoom`."""
        self._give_back()
        self._room = self._rooms.room(WeightLayout.of(shapes, dict.fromkeys(shapes, dtype)))
        return self._room.tensors

    def close(self) -> None:
        """See `WeightStore`."""
        self._give_back()
        super().close()

    def _part(self, update: WeightUpdate) -> WeightPart:
        room = self._room
        if room is None or update.tensors is not room.tensors:
            return super()._part(update)
        self._room = None
        return room.commit(whole_header(update, room.layout))

    def _give_back(self) -> None:
        if self._room is not None:
            self._room.give_back()
            self._room = None


def whole_header(update: WeightUpdate, layout: WeightLayout) -> BlockHeader:
    """Return what heads a block of all tensors of ``update``."""
    return BlockHeader(
        policy_version=update.policy_version, checksum=update.checksum, layout=layout
    )


class WholeReader:
    """A `WeightReader` of what a `WholeStore` writes. Its pickle is how to open it."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    @contextmanager
    def open(self, notice: WeightNotice) -> Iterator[WeightUpdate]:
        """See `WeightReader`."""
        if len(notice.parts) != 1:
            msg = (
                f"version {notice.policy_version} was published as changes since version "
                f"{notice.parts[0].policy_version}, which this reader does not add up; give "
                "generators the reader that was made with the store"
            )
            raise WeightSyncError(msg)
        with self._fetcher.fetch(notice.parts[0]) as block:
            yield WeightUpdate(
                policy_version=notice.policy_version,
                tensors=block.tensors,
                checksum=notice.checksum,
            )

    def close(self) -> None:
        """See `WeightReader`."""
        self._fetcher.close()


def last_index(holds: Sequence[bool]) -> int:
    """Return where ``holds`` is true for the last time; 0 where it never is."""
    return max((index for index, is_held in enumerate(holds) if is_held), default=0)


async def on_thread(compute: ComputeThread | None, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, done on ``compute`` or on any thread."""
    if compute is None:
        return await asyncio.to_thread(work)
    return await asyncio.wrap_future(compute.submit(work))
