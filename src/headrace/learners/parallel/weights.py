"""Weights out of shards, in buckets: what generators read of a learner of several ranks.

A bucket is shared memory of this process into which every rank writes the parts it holds, each in
its place and in the generators' dtype; ranks on other machines send theirs. One bucket is there at
a time, beside what a reader still holds of the one before, and no rank ever holds more than its own
part: nowhere stands a second model. Readers ask for whole weights, or for the slices that a
generator of several ranks holds.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.learners.parallel.pieces import Piece
from headrace.learners.parallel.regions import Region

MAX_BYTES = 128 << 20
"""Of two buckets, where no block has more than half of it."""
_ALIGNMENT = 64
"""Bytes; a tensor begins at a whole cache line."""
_OF_BLOCK = re.compile(r"^(.*\.\d+\.\w+)\.")
"""The attention or the MLP of a layer: what is multiplied together is read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one weight, or a slice of it, lies in a bucket."""

    name: str
    region: Region
    offset: int
    """Bytes from the beginning of the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What ranks are asked to fill."""

    slots: tuple[Slot, ...]
    num_bytes: int
    dtype: torch.dtype


def buckets_of(
    regions: Mapping[str, Region], dtype: torch.dtype, max_bytes: int = MAX_BYTES
) -> list[Bucket]:
    """Cut ``regions``, in their order, into buckets two of which have at most ``max_bytes``.

    What belongs to one block stays together; a block that is larger has a bucket of its own.
    """
    blocks: dict[str, dict[str, Region]] = {}
    for name, region in regions.items():
        found = _OF_BLOCK.match(name)
        blocks.setdefault(found.group(1) if found else name, {})[name] = region
    buckets: list[dict[str, Region]] = []
    room = -1
    for block in blocks.values():
        size = sum(_padded(region, dtype) for region in block.values())
        if size > room or not buckets:
            buckets.append({})
            room = max_bytes // 2
        buckets[-1] |= block
        room -= size
    return [_bucket(bucket, dtype) for bucket in buckets]


def _padded(region: Region, dtype: torch.dtype) -> int:
    return -(-region.count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _bucket(regions: Mapping[str, Region], dtype: torch.dtype) -> Bucket:
    slots, end = [], 0
    for name, region in regions.items():
        slots.append(Slot(name=name, region=region, offset=end))
        end += _padded(region, dtype)
    return Bucket(slots=tuple(slots), num_bytes=max(end, 1), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPart:
    """A rank's part of one weight of a bucket."""

    slot: Slot
    region: Region
    """Of the whole weight."""
    tensor: Tensor
    """[region.sizes] in the rank's own dtype, or already in the bucket's."""


def parts_of(bucket: Bucket, pieces: Sequence[Piece]) -> Iterator[SlotPart]:
    """Yield what a rank with ``pieces`` has to write of ``bucket``, where it lies."""
    held = {piece.name: piece for piece in pieces if piece.is_first}
    for slot in bucket.slots:
        piece = held.get(slot.name)
        both = None if piece is None else piece.region.overlap(slot.region)
        if piece is not None and both is not None:
            tensor = piece.local.detach()[both.within(piece.region)]
            yield SlotPart(slot=slot, region=both, tensor=tensor)


@torch.no_grad()
def write_parts_of(bucket: Bucket, path: str, parts: Iterable[SlotPart]) -> None:
    """Write ``parts`` into the memory at ``path``, in the bucket's dtype. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, bucket.num_bytes)
    finally:
        os.close(descriptor)
    for part in parts:
        target = _view(memory, part.slot, bucket.dtype)[part.region.within(part.slot.region)]
        target.copy_(part.tensor)


def _view(memory: mmap.mmap, slot: Slot, dtype: torch.dtype) -> Tensor:
    count = slot.region.count
    if not count:
        return torch.empty(slot.region.sizes, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=slot.offset)
    return flat.view(slot.region.sizes)


Fill = Callable[[Bucket, str], None]
"""Has the part of every rank in the memory at a path; returns once all of them are."""


class BucketedWeights(Mapping[str, Tensor]):
    """Weights by Hugging Face name, a bucket of them fetched whenever one of it is asked for.

    Asked for in order they are fetched once. Valid until the learner's next step; a tensor that was
    handed out keeps its values. May be read by several threads.
    """

    def __init__(self, buckets: Sequence[Bucket], fill: Fill) -> None:
        self._fill = fill
        self._place = {slot.name: (b, slot) for b in buckets for slot in b.slots}
        self._lock = threading.Lock()
        self._held: tuple[Bucket, mmap.mmap] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight; blocks while its bucket is filled. Raises RunError."""
        bucket, slot = self._place[name]
        with self._lock:
            if self._held is None or self._held[0] is not bucket:
                self._held = None  # given back before the next one is made
                self._held = bucket, self._fetched(bucket)
            return _view(self._held[1], slot, bucket.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def _fetched(self, bucket: Bucket) -> mmap.mmap:
        descriptor = os.memfd_create("headrace-bucket")
        try:
            os.ftruncate(descriptor, bucket.num_bytes)
            memory = mmap.mmap(descriptor, bucket.num_bytes)
            self._fill(bucket, f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return memory


def tensor_slices(
    shapes: Mapping[str, Sequence[int]],
    cut_dimension: Callable[[str], int | None],
    *,
    rank: int,
    count: int,
) -> dict[str, Region]:
    """Return what rank ``rank`` of ``count`` of a tensor-parallel generator holds of each weight.

    ``cut_dimension`` says along which dimension its engine cuts a weight; None: it is whole.
    """
    found: dict[str, Region] = {}
    for name, shape in shapes.items():
        dim, whole = cut_dimension(name), Region.whole(shape)
        found[name] = whole if dim is None else whole.chunk(rank, count, dim)
    return found
