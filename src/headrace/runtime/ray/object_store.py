"""Published weights in Ray's object store: put once, pulled once by each machine that reads them.

A machine pulls from any that has them already, so that the learner's own line is not the limit, and
its generators read them where they lie. Owns: what a notice names is held until it is dropped; who
reads a version that is gone hears so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, RayError
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.types import WeightNotice, WeightPart
from headrace.weight_sync.blocks import (
    Block,
    BlockHeader,
    block_bytes,
    data_start,
    read_block,
    write_header,
)

Ref = ray.ObjectRef[npt.NDArray[np.uint8]]


@dataclass(slots=True, kw_only=True, eq=False)
class ObjectStoreCarrier:
    """Puts blocks into the store. Not for several threads at once."""

    _held: dict[str, Ref] = field(default_factory=dict)
    """By place: what was put and not dropped. The store keeps what somebody holds."""
    _memory: bytearray = field(default_factory=bytearray)
    """Where a block is made before it is put: fresh pages cost more than writing them again."""

    @torch.no_grad()
    def put(self, header: BlockHeader, tensors: Mapping[str, Tensor]) -> WeightPart:
        """See `Carrier`."""
        if len(self._memory) != block_bytes(header.layout):
            self._memory = bytearray(block_bytes(header.layout))
        views = header.layout.views(self._memory, data_start(header.layout))
        for name, target in views.items():
            target.copy_(tensors[name])
        write_header(self._memory, header)
        try:
            ref = ray.put(np.frombuffer(self._memory, dtype=np.uint8))
        except ObjectStoreFullError as error:
            msg = (
                f"Ray's object store on this machine is full: a published version takes "
                f"{len(self._memory)} bytes; start Ray there with a larger --object-store-memory"
            )
            raise WeightSyncError(msg) from error
        part = header.part(f"ray:{ref.hex()}")
        self._held[part.place] = ref
        return part

    def drop(self, part: WeightPart) -> None:
        """See `Carrier`."""
        self._held.pop(part.place, None)

    def close(self) -> None:
        """See `Carrier`."""
        self._held.clear()

    def refs(self, notice: WeightNotice) -> dict[str, Ref]:
        """Return what must travel with ``notice``: its places are names alone."""
        return {
            part.place: self._held[part.place] for part in notice.parts if part.place in self._held
        }


@dataclass(slots=True, kw_only=True, eq=False)
class ObjectStoreFetcher:
    """Reads blocks that came with a notice."""

    deadline_seconds: float
    """Longest pull of one block from another machine."""
    _known: dict[str, Ref] = field(default_factory=dict)

    def learn(self, refs: Mapping[str, Ref]) -> None:
        """Take note of what came with a notice; what came with earlier ones is let go."""
        self._known = dict(refs)

    @contextmanager
    def fetch(self, part: WeightPart) -> Iterator[Block]:
        """See `Fetcher`: the tensors lie in the store, where nobody may write."""
        ref = self._known.get(part.place)
        if ref is None:
            msg = f"version {part.policy_version} is gone: it was given up before it was read"
            raise WeightSyncError(msg)
        try:
            found = ray.get(ref, timeout=self.deadline_seconds)
        except (RayError, GetTimeoutError) as error:
            msg = (
                f"version {part.policy_version} did not come from Ray's object store within "
                f"{self.deadline_seconds:g} s: {type(error).__name__}: {error}"
            )
            raise WeightSyncError(msg) from error
        with warnings.catch_warnings():
            # torch cannot know that nobody writes to them.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            block = read_block(found.data, part)
        yield block

    def close(self) -> None:
        """See `Fetcher`."""
        self._known = {}
