"""Numbers of rows that one product may have, and how any number is made of them.

How a matrix product rounds is the library's choice, made anew for every shape. So only a few shapes
are used, and only those that agree: the same row gets the same bits in all of them, wherever it
stands and whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""What is tried: close enough for little padding, few enough for few kernels."""
MOST = SIZES[-1]
BASE = 16
"""The size that the others are compared with."""

Compute = Callable[[Tensor], Tensor]
"""Numbers [n] of rows, each below `MOST` -> what comes of them in one product of n rows."""


def reference_of(compute: Compute) -> Tensor:
    """Return what comes of every row, [MOST, ...], in products of `BASE` rows."""
    return torch.cat([compute(rows) for rows in torch.arange(MOST).view(-1, BASE)])


def agreeing_sizes(compute: Compute, reference: Tensor) -> frozenset[int]:
    """Return the `SIZES` in which every row tried comes out as in ``reference``, bit for bit."""
    return frozenset(size for size in SIZES if _agrees(compute, size, reference))


def _agrees(compute: Compute, size: int, reference: Tensor) -> bool:
    """Try rows in other places, among others, than they had in the reference."""
    rows = torch.arange(MOST).roll(size // 2 + 1)[:size]
    return torch.equal(compute(rows), reference[rows])


def cut(count: int, sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Cut ``count`` rows into pieces; yield each with the one of ``sizes`` it is filled up to.

    ``sizes`` ascend.
    """
    start = 0
    while start < count:
        left = count - start
        size = next((size for size in sizes if size >= left), sizes[-1])
        yield slice(start, min(start + size, count)), size
        start += size
