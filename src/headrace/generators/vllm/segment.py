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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headrace.models.weight_layout import WeightLayout
from headrace.types import WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """What a reader must know; every field travels between processes as JSON would."""

    path: str
    """Where a process of the same user opens it."""
    policy_version: int
    checksum: int
    """``models.weights.checksum`` as it was published."""
    layout: WeightLayout

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "path": self.path,
            "policy_version": self.policy_version,
            "checksum": self.checksum,
            "layout": self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SegmentInfo:
        """Return what `to_json` wrote."""
        return cls(**{**value, "layout": WeightLayout.from_json(value["layout"])})


class Segment:
    """One version of the weights, held by this process until `close`."""

    def __init__(self, update: WeightUpdate) -> None:
        """Copy the tensors of ``update``, which need not stay valid afterwards."""
        self._descriptor: int | None = os.memfd_create(f"headrace-weights-{update.policy_version}")
        self.info = SegmentInfo(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            policy_version=update.policy_version,
            checksum=update.checksum,
            layout=WeightLayout.of_tensors(update.tensors),
        )
        try:
            size = self.info.layout.num_bytes
            os.ftruncate(self._descriptor, size)
            views = self.info.layout.views(mmap.mmap(self._descriptor, size))
            for name, tensor in update.tensors.items():
                views[name].copy_(tensor)
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


def read_segment(info: SegmentInfo) -> dict[str, Tensor]:
    """Return tensors by name, without copying; writing to one changes a private page.

    Raises OSError when the segment is gone or may not be opened.
    """
    descriptor = os.open(info.path, os.O_RDONLY)
    try:
        memory = mmap.mmap(
            descriptor,
            info.layout.num_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    finally:
        os.close(descriptor)
    return info.layout.views(memory)
