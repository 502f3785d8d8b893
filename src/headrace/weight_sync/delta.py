"""What changed between two versions of the weights, bit for bit, in few bytes.

A small learning rate moves few weights of a narrow dtype from one number to the next, mostly by one
unit in the last place. So numbers are read as whole numbers of their bits, which lose nothing (NaN
payloads and the sign of zero among them), and of each that changed there are two bytes: the gap to
the one before it, and the step from its old bits to its new ones. What does not fit a byte goes on
in the next ones. A tensor of which more than an eighth changed has a bit for each number instead
of gaps, and one that would not become smaller is sent whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import WeightSyncError

Bits = NDArray[np.signedinteger]

_WIDTHS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_FULL = 255
"""Of a gap, and more in the next byte."""
_LARGE = -128
"""Instead of a step that lies among the large ones."""
GAPS, MASK, STEPS, LARGE, WHOLE = "gaps", "mask", "steps", "large", "whole"
"""What the encoded parts of a tensor are called, behind its name and `_SEPARATOR`."""
_SEPARATOR = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of one tensor."""

    name: str
    parts: Mapping[str, Tensor]
    """By `GAPS` and so on; flat, and empty where nothing changed."""


def encode(base: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what makes ``tensors`` out of ``base``, of equal names, shapes and dtypes."""
    return {
        f"{name}{_SEPARATOR}{kind}": part
        for name, tensor in tensors.items()
        for kind, part in _encode(base[name], tensor).items()
    }


def apply(changes: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Make the new version out of the old one in ``tensors``, which are contiguous, in place.

    Raises WeightSyncError where a change does not fit; then some may have been made.
    """
    for change in _changes(changes):
        if change.name not in tensors:
            msg = f"a change of {change.name}, which is no weight of the version it rests on"
            raise WeightSyncError(msg)
        try:
            _apply(change.parts, tensors[change.name])
        except (ValueError, IndexError, RuntimeError, KeyError) as error:
            msg = f"the change of {change.name} does not fit the version that it rests on: {error}"
            raise WeightSyncError(msg) from None


def _changes(changes: Mapping[str, Tensor]) -> Iterator[Change]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, part in changes.items():
        name, _, kind = key.rpartition(_SEPARATOR)
        found.setdefault(name, {})[kind] = part
    for name, parts in found.items():
        yield Change(name=name, parts=parts)


def _bits(tensor: Tensor) -> Bits:
    """Return the bits of ``tensor`` as whole numbers, flat; in its own memory if contiguous."""
    kind = _WIDTHS[tensor.element_size()]
    if not tensor.numel():
        return np.empty(0, kind)
    flat = tensor.detach().cpu().contiguous().view(-1)
    bits: Bits = flat.view(torch.uint8).numpy().view(kind)
    return bits


def _encode(base: Tensor, tensor: Tensor) -> dict[str, Tensor]:
    old, new = _bits(base), _bits(tensor)
    is_changed = old != new
    (positions,) = is_changed.nonzero()
    if not len(positions):
        return {}
    # Differences wrap around, as sums do when they are taken back.
    differences = new[positions] - old[positions]
    is_large = (differences <= _LARGE) | (differences > -1 - _LARGE)
    steps = np.where(is_large, _LARGE, differences).astype(np.int8)
    large = differences[is_large]
    gaps = _gaps(positions)
    mask_bytes = -(-len(new) // 8)
    found = {STEPS: steps} | ({LARGE: large} if len(large) else {})
    found |= {GAPS: gaps} if len(gaps) <= mask_bytes else {MASK: np.packbits(is_changed)}
    if sum(part.nbytes for part in found.values()) >= new.nbytes:
        found = {WHOLE: new}
    return {kind: torch.from_numpy(np.ascontiguousarray(part)) for kind, part in found.items()}


def _gaps(positions: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the distance of each position from the one before it, the first one's from -1.

    Each is a run of bytes that sum up to it, of which all but the last are full.
    """
    distances = np.diff(positions, prepend=-1)
    full, rest = np.divmod(distances, _FULL)
    ends = np.cumsum(full + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, _FULL, dtype=np.uint8)
    gaps[ends] = rest
    return gaps


def _apply(parts: Mapping[str, Tensor], tensor: Tensor) -> None:
    bits = _bits(tensor)
    arrays = {kind: part.numpy() for kind, part in parts.items()}
    if WHOLE in arrays:
        bits[:] = arrays[WHOLE]
        return
    positions = _positions(arrays, len(bits))
    steps = arrays[STEPS].astype(bits.dtype)
    is_large = arrays[STEPS] == _LARGE
    if is_large.any():
        steps[is_large] = arrays[LARGE]
    bits[positions] += steps


def _positions(arrays: Mapping[str, NDArray[np.generic]], count: int) -> NDArray[np.int64]:
    if MASK in arrays:
        (found,) = np.unpackbits(arrays[MASK].astype(np.uint8), count=count).nonzero()
        return found
    gaps = arrays[GAPS]
    ends: NDArray[np.int64] = np.cumsum(gaps, dtype=np.int64)[gaps != _FULL]
    return ends - 1
