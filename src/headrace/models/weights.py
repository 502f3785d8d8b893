"""Checksums of weights: the proof that what a generator holds is what the learner published."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a 63-bit number that depends on every name, shape, dtype and bit in ``tensors``.

    The order of the mapping does not matter. It guards against mistakes (a tensor left out, an old
    one kept, two exchanged), not against an adversary: bits within one tensor are summed.
    """
    total = 0
    for name, tensor in tensors.items():
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        head = f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        # An odd factor for each name, so that two exchanged tensors do not cancel.
        total += (2 * zlib.crc32(head) + 1) * (int(bits.sum(dtype=torch.int64)) + 1)
    return total % (1 << 63)
