"""Weights in shared memory: one segment for each published version, written once, read by workers.

A segment is an anonymous memory file (``memfd_create``), which has no name in ``/dev/shm``: it is
gone with the last process that holds it, however that process ends, and no limit on ``/dev/shm``
applies. Workers open it through ``/proc`` of the process that wrote it, so they run on the same
machine under the same user. Does not decide when weights are loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.types import WeightUpdate

ALIGNMENT = 64
"""Bytes; a tensor begins at a whole cache line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """What a reader must know; every field travels between processes as JSON would."""

    path: str
    """Where a process of the same user opens it."""
    num_bytes: int
    policy_version: int
    checksum: int
    """``models.weights.checksum`` as it was published."""
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    """Bytes from the beginning of the segment to each tensor."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Segment:
    """One version of the weights, held by this process until `close`."""

    def __init__(self, update: WeightUpdate) -> None:
        """Copy the tensors of ``update``, which need not stay valid afterwards."""
        tensors = update.tensors
        offsets, end = [], 0
        for tensor in tensors.values():
            offsets.append(end)
            size = tensor.numel() * tensor.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._descriptor: int | None = os.memfd_create(f"headrace-weights-{update.policy_version}")
        self.info = SegmentInfo(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            num_bytes=max(end, 1),
            policy_version=update.policy_version,
            checksum=update.checksum,
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            offsets=offsets,
        )
        try:
            os.ftruncate(self._descriptor, self.info.num_bytes)
            memory = mmap.mmap(self._descriptor, self.info.num_bytes)
            for (_, target), tensor in zip(
                _views(memory, self.info), tensors.values(), strict=True
            ):
                target.copy_(tensor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back; readers that have it mapped keep it until they are done."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def written(update: WeightUpdate) -> Segment:
    """Write ``update`` in a thread. Cancelled, returns once the thread reads it no longer."""
    writing = asyncio.ensure_future(asyncio.to_thread(Segment, update))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({writing})
        if writing.exception() is None:
            writing.result().close()
        raise


def read_segment(info: SegmentInfo) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor, without copying; writing to one changes a private page.

    Raises OSError when the segment is gone or may not be opened.
    """
    descriptor = os.open(info.path, os.O_RDONLY)
    try:
        memory = mmap.mmap(
            descriptor,
            info.num_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    finally:
        os.close(descriptor)
    return _views(memory, info)


def _views(memory: mmap.mmap, info: SegmentInfo) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that lie in ``memory``, which is unmapped once all of them are gone."""
    for name, dtype, shape, offset in zip(
        info.names, info.dtypes, info.shapes, info.offsets, strict=True
    ):
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        if count == 0:
            yield name, torch.empty(shape, dtype=kind)
        else:
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=offset)
            yield name, flat.view(shape)
