"""Sets of token ids in few bytes: what filters left to draw one token from.

A set is its least id and how to go on from there, whichever is shorter: the gaps between
neighbours, or a bit for every id up to the greatest. Every set has exactly one encoding, and the
empty set is the empty string. Knows nothing of what the sets mean.

Numbers are LEB128: seven bits a byte, lowest first, the highest bit set in all bytes but the last.
The first number is twice the least id, plus 1 where bits follow. A gap is written less 1. Bits
begin at the id after the least one, lowest bit of a byte first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

MAX_ID = 2**31 - 1
"""Ids are not greater than this."""
_MORE = 128
"""The bit of a byte that says that its number goes on."""
_MAX_BYTES = 5
"""Of a number: the first one is at most 2 * MAX_ID + 1."""


def encode(ids: Sequence[int] | Ids) -> bytes:
    """Return the encoding of ``ids``: strictly increasing, in [0, `MAX_ID`]. Else ValueError."""
    found = np.asarray(ids, dtype=np.int64)
    if not len(found):
        return b""
    gaps = np.diff(found)
    if found[0] < 0 or found[-1] > MAX_ID or np.any(gaps < 1):
        msg = f"token ids must increase strictly from 0 or more to {MAX_ID} or less"
        raise ValueError(msg)
    by_gaps = _numbers(np.concatenate((found[:1] * 2, gaps - 1)))
    head = _numbers(found[:1] * 2 + 1)
    num_bits = int(found[-1] - found[0])
    if len(by_gaps) <= len(head) + (num_bits + 7) // 8:
        return by_gaps
    bits = np.zeros(num_bits, dtype=np.bool_)
    bits[found[1:] - found[0] - 1] = True
    return head + np.packbits(bits, bitorder="little").tobytes()


def decode(encoded: bytes) -> Ids:
    """Return [n] ids in increasing order. Raises ValueError for what `encode` never wrote."""
    data = np.frombuffer(encoded, dtype=np.uint8)
    if not len(data):
        return np.zeros(0, dtype=np.int64)
    head = int(np.argmax(data < _MORE)) + 1
    first = int(_values(data[:head])[0])
    if first % 2:
        later = np.flatnonzero(np.unpackbits(data[head:], bitorder="little"))
    else:
        later = np.cumsum(_values(data[head:]) + 1) - 1
    found = np.concatenate(([0], later + 1)) + first // 2
    if found[-1] > MAX_ID or encode(found) != encoded:
        msg = f"{len(encoded)} bytes are no encoded set of token ids"
        raise ValueError(msg)
    return found


def _numbers(values: Ids) -> bytes:
    sizes = np.ones(len(values), dtype=np.int64)
    for place in range(1, _MAX_BYTES):
        sizes += values >> 7 * place > 0
    ends = np.cumsum(sizes)
    out = np.empty(ends[-1], dtype=np.uint8)
    for place in range(int(sizes.max())):
        written = sizes > place
        more = sizes[written] > place + 1
        out[(ends - sizes)[written] + place] = (values[written] >> 7 * place & 127) | more * _MORE
    return out.tobytes()


def _values(data: NDArray[np.uint8]) -> Ids:
    """Return the numbers in ``data``; what is cut off in the middle counts as whole."""
    if not len(data):
        return np.zeros(0, dtype=np.int64)
    is_last = data < _MORE
    number: Ids = np.cumsum(is_last) - is_last  # of each byte
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    places = np.arange(len(data)) - starts[number]
    if places.max() >= _MAX_BYTES:
        msg = f"a number in {len(data)} bytes of token ids is too long"
        raise ValueError(msg)
    return np.add.reduceat((data & 127).astype(np.int64) << 7 * places, starts)
