"""Rectangular parts of tensors: where a shard lies in its whole, and what two of them share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Offsets and sizes along each dimension of the whole; of a scalar there are none."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return all of a tensor of ``shape``."""
        return cls(offsets=(0,) * len(shape), sizes=tuple(shape))

    @property
    def count(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)

    def chunk(self, index: int, count: int, dim: int = 0) -> Region:
        """Return the part ``index`` of ``count`` along ``dim``, as `torch.chunk` cuts.

        Later parts may be smaller, or empty.
        """
        size = self.sizes[dim]
        width = -(-size // count)
        start, end = min(index * width, size), min((index + 1) * width, size)
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = end - start
        return Region(offsets=tuple(offsets), sizes=tuple(sizes))

    def overlap(self, other: Region) -> Region | None:
        """Return what both hold of the same whole; None where that is nothing."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        if any(size <= 0 for size in sizes):
            return None
        return Region(offsets=tuple(starts), sizes=sizes)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices that cut this out of a tensor that holds ``outer``."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )
