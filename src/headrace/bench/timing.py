"""Times that several benchmarks take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def least_seconds(work: Callable[[], object], repetitions: int = 5) -> float:
    """Return the least seconds of ``work`` after one call that does not count."""
    work()
    taken = []
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def memcpy_seconds(tensors: Sequence[Tensor]) -> float:
    """Return the least time of copying all ``tensors`` into memory that is there already."""
    targets = [tensor.clone() for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return least_seconds(copy)
