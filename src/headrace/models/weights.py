"""Checksums of weights: the proof that what a generator holds is what the learner published."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.calls import Call
from headrace.kernels.checksums import LINE, STRIDE, checksum_kernel
from headrace.kernels.narrowing import narrowing_kernel
from headrace.kernels.sequences import run_together
from headrace.types import WeightUpdate

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_MODULUS = (1 << 61) - 1
"""A prime: a power of two would lose the highest bit, which is a sign."""
EVEN = 0x1E3779B97F4A7C16
"""Times the row's number, plus 1: the factor of a row. Large, so that rows do not cancel."""

MAX_NAMED = 3
"""Weights that an error names; a half-sent model would fill the screen."""


def misfits(expected: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> str:
    """Say in what way two sets of weights differ in names, shapes and dtypes; empty if they fit."""
    lines = list(_misfits(expected, published))
    more = len(lines) - MAX_NAMED
    return "; ".join(lines[:MAX_NAMED]) + f" (and {more} more)" * (more > 0)


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return a 61-bit number that depends on every name, shape, dtype and bit in ``tensors``.

    Their order does not matter, and one is needed at a time. It guards against mistakes (a tensor
    left out, an old one kept, two exchanged, one transposed, rows in another order), not against an
    adversary: the words of one row are summed.
    """
    return checksum_of((name, tensor, content(tensor)) for name, tensor in tensors)


def checksum_of(tensors: Iterable[tuple[str, Tensor, int]]) -> int:
    """Return the `checksum` of tensors whose `content` is known: name, tensor and that of each."""
    total = 0
    for name, tensor, found in tensors:
        head = f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        # An odd factor for each name, so that two exchanged tensors do not cancel.
        total += (2 * zlib.crc32(head) + 1) * (found + 1)
    return total % _MODULUS


def weight_update(policy_version: int, tensors: Mapping[str, Tensor]) -> WeightUpdate:
    """Return ``tensors``, by reference, as they are published: with version and checksum."""
    return WeightUpdate(
        policy_version=policy_version, tensors=tensors, checksum=checksum(tensors.items())
    )


@torch.no_grad()
def copied_update(
    policy_version: int, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> WeightUpdate:
    """Return ``targets`` as they are published, once they hold ``tensors`` in their own dtypes.

    Each is summed on its way.
    """
    found, rounded = {}, {}
    for name, tensor in tensors.items():
        if _can_round(tensor, targets[name]):
            rounded[name] = tensor
        else:
            found[name] = content(targets[name].copy_(tensor))
    found |= _rounded(rounded, targets)
    terms = ((name, targets[name], one) for name, one in found.items())
    return WeightUpdate(policy_version=policy_version, tensors=targets, checksum=checksum_of(terms))


def _can_round(tensor: Tensor, target: Tensor) -> bool:
    """Return whether the kernel makes ``target`` of ``tensor``."""
    is_narrowed = (tensor.dtype, target.dtype) == (torch.float32, torch.bfloat16)
    lie_alike = tensor.is_contiguous() and tensor.shape == target.shape and tensor.numel() > 0
    on_processor = tensor.device.type == target.device.type == "cpu"
    is_in_lines = target.data_ptr() % LINE == 0
    return is_narrowed and lie_alike and on_processor and is_in_lines and _is_in_strides(target)


def _rounded(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, int]:
    """Have ``targets`` hold ``tensors``; return the `content` of each."""
    totals, calls = np.zeros(len(tensors), dtype=np.int64), []
    for number, (name, tensor) in enumerate(tensors.items()):
        target = targets[name]
        calls.append(call := Call(narrowing_kernel(EVEN), 6))
        call[1], call[2] = len(target), target.nbytes // len(target) // 8
        call[3], call[4] = tensor.data_ptr(), target.data_ptr()
        call[5] = totals[number:].ctypes.data
    if calls:
        num_vectors = sum(targets[name].nbytes for name in tensors) // 8
        run_together(calls, torch.get_num_threads(), num_vectors)
    return dict(zip(tensors, totals.tolist(), strict=True))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether both hold the same bits: as `torch.equal`, but a NaN is itself.

    Of one dtype and, where they live on different devices, after moving ``second``.
    """
    whole = _INTEGERS[first.element_size()]
    second = second.detach().to(first.device)
    return torch.equal(first.detach().contiguous().view(whole), second.contiguous().view(whole))


def content(tensor: Tensor) -> int:
    """Sum the words of each row, and the rows by odd factors that tell them apart."""
    if tensor.numel() == 0:
        return 0
    if tensor.device.type == "cpu" and _is_in_strides(tensor):
        return _content_by_kernel(tensor)
    words = _words(tensor)
    sums = words.sum(1, dtype=torch.int64)
    if words.dtype == torch.int64:
        # The upper halves once more: in a sum that wraps, two changed signs would cancel.
        sums += (words >> 32).sum(1).mul_(EVEN + 1)
    factors = torch.arange(len(sums), device=sums.device).mul_(EVEN).add_(1)
    return int((sums * factors).sum())  # int64 wraps around, everywhere alike


def _is_in_strides(tensor: Tensor) -> bool:
    """Return whether the kernel takes ``tensor``: rows of whole strides of words, as they lie."""
    row_bytes = tensor.element_size() * tensor[0].numel() if tensor.dim() > 1 else 0
    is_whole = row_bytes > 0 and row_bytes % (8 * STRIDE) == 0
    return is_whole and tensor.is_contiguous() and tensor.data_ptr() % 8 == 0


def _content_by_kernel(tensor: Tensor) -> int:
    """Return `content`, in one pass over memory instead of three."""
    total = np.zeros(1, dtype=np.int64)
    call = Call(checksum_kernel(EVEN), 5)
    call[1], call[2] = len(tensor), tensor.nbytes // len(tensor) // 8
    call[3], call[4] = tensor.data_ptr(), total.ctypes.data
    call.run(torch.get_num_threads(), tensor.nbytes // 8)
    return int(total[0])


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of ``tensor`` as integers [rows, words]; its shape alone decides the width.

    Eight bytes at a time where rows allow it: summing narrow integers is ten times slower.
    """
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() > 1 else tensor.numel(), -1)
    if rows.shape[1] * rows.element_size() % 8:
        return rows.contiguous().view(_INTEGERS[rows.element_size()])
    is_aligned = rows.is_contiguous() and rows.storage_offset() * rows.element_size() % 8 == 0
    return (rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)).view(
        torch.int64
    )


def _misfits(held: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> Iterator[str]:
    """Say in what way the two sets of weights differ in kind."""
    for name in sorted(held.keys() | published.keys()):
        if name not in published:
            yield f"{name} was not published"
        elif name not in held:
            yield f"{name} was published, and this model has no such weight"
        elif _kind(held[name]) != _kind(published[name]):
            yield f"{name} is {_kind(published[name])}, the generator holds {_kind(held[name])}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
