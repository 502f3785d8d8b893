"""The bytes of a published version: a header that says what they are, and tensors behind it.

A block is the same in shared memory, in a file and on a wire. Owns: a block whose writing did not
come to its end, or that is shorter than its header says, is refused and never read as weights.
Where blocks lie and how long is the carriers' business.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.models.weight_layout import WeightLayout
from headrace.types import WeightPart

MAGIC = b"headrace"
PAGE = 4096
"""Bytes; tensors begin at a whole page."""
_PRELUDE = struct.Struct("<8sQQ")
"""`MAGIC`, bytes of the header, and where tensors begin. Written last."""
_LARGEST = 1 << 63

Memory: TypeAlias = mmap.mmap | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """What a block holds."""

    policy_version: int
    checksum: int
    """Of all weights of that version, also where the block holds only what changed."""
    base: tuple[int, int] | None = None
    """Version and checksum of the weights that the block is to be added to; None: it is whole."""
    layout: WeightLayout
    """Of the weights, or of what changed as `weight_sync.delta` encodes it."""

    def part(self, place: str) -> WeightPart:
        """Return what is told of the block at ``place``."""
        return WeightPart(
            policy_version=self.policy_version,
            checksum=self.checksum,
            place=place,
            num_bytes=block_bytes(self.layout),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What a reader sees."""

    header: BlockHeader
    tensors: Mapping[str, Tensor]


class Carrier(Protocol):
    """The writing end of one way to bring blocks from process to process."""

    def put(self, header: BlockHeader, tensors: Mapping[str, Tensor]) -> WeightPart:
        """Write a block of ``tensors``, which lie as ``header.layout`` says. Blocks.

        Raises WeightSyncError where there is no room.
        """
        ...

    def drop(self, part: WeightPart) -> None:
        """Give back what ``part`` takes as soon as its last reader is gone."""
        ...

    def close(self) -> None:
        """Give back everything. Idempotent."""
        ...


class Room(Protocol):
    """Memory for a block whose tensors are computed straight into it.

    It is committed or given back, once.
    """

    @property
    def layout(self) -> WeightLayout:
        """How its tensors lie."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """They have no content yet."""
        ...

    def commit(self, header: BlockHeader) -> WeightPart:
        """Let readers at what was written."""
        ...

    def give_back(self) -> None:
        """Have nobody read it."""
        ...


class RoomCarrier(Carrier, Protocol):
    """A carrier that gives out memory of the blocks to come."""

    def room(self, layout: WeightLayout) -> Room:
        """Return memory for a block. Blocks; raises WeightSyncError where there is none."""
        ...


class Fetcher(Protocol):
    """The reading end of it."""

    def fetch(self, part: WeightPart) -> AbstractContextManager[Block]:
        """Return what lies there, valid until the context ends.

        Raises WeightSyncError where it is gone, not whole, or of another version.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


@torch.no_grad()
def put_into(room: Room, header: BlockHeader, tensors: Mapping[str, Tensor]) -> WeightPart:
    """Write a block of ``tensors`` into ``room``, which is given back where that fails."""
    try:
        for name, target in room.tensors.items():
            target.copy_(tensors[name])
    except BaseException:
        room.give_back()
        raise
    return room.commit(header)


def block_bytes(layout: WeightLayout) -> int:
    """Return the size of a block."""
    return data_start(layout) + layout.num_bytes


def data_start(layout: WeightLayout) -> int:
    """Return where tensors begin: behind the longest header that there can be for ``layout``."""
    longest = BlockHeader(
        policy_version=_LARGEST, checksum=_LARGEST, base=(_LARGEST, _LARGEST), layout=layout
    )
    return -(-(_PRELUDE.size + len(_encode(longest))) // PAGE) * PAGE


def write_header(memory: Memory, header: BlockHeader) -> None:
    """Make a block of what lies in ``memory``, whose tensors have been written."""
    text = _encode(header)
    memory[_PRELUDE.size : _PRELUDE.size + len(text)] = text
    memory[: _PRELUDE.size] = _PRELUDE.pack(MAGIC, len(text), data_start(header.layout))


def erase_header(memory: Memory) -> None:
    """Make it no block any more, before its tensors are written over."""
    memory[: len(MAGIC)] = bytes(len(MAGIC))


def read_block(memory: Memory, part: WeightPart) -> Block:
    """Return the block in ``memory``, whose tensors lie there.

    Raises WeightSyncError unless it is whole and the one that ``part`` tells of.
    """
    header, start = _header(memory, part)
    if start + header.layout.num_bytes > len(memory):
        msg = (
            f"{part.place} has {len(memory)} of the {start + header.layout.num_bytes} bytes of "
            f"version {part.policy_version}; publish it again"
        )
        raise WeightSyncError(msg)
    return Block(header=header, tensors=header.layout.views(memory, start))


def _header(memory: Memory, part: WeightPart) -> tuple[BlockHeader, int]:
    if len(memory) < _PRELUDE.size or memory[: len(MAGIC)] != MAGIC:
        msg = f"{part.place} holds no whole weights, where version {part.policy_version} was to be"
        raise WeightSyncError(msg)
    _, length, start = _PRELUDE.unpack(memory[: _PRELUDE.size])
    try:
        header = _decode(bytes(memory[_PRELUDE.size : _PRELUDE.size + length]))
    except (ValueError, KeyError, TypeError):
        msg = f"{part.place} has a damaged header, where version {part.policy_version} was to be"
        raise WeightSyncError(msg) from None
    if (header.policy_version, header.checksum) != (part.policy_version, part.checksum):
        msg = (
            f"{part.place} holds version {header.policy_version} with checksum "
            f"{header.checksum:x} where version {part.policy_version} with {part.checksum:x} was "
            "told of: it was published too long ago, or by a run that has ended"
        )
        raise WeightSyncError(msg)
    return header, start


def _encode(header: BlockHeader) -> bytes:
    value = {
        "policy_version": header.policy_version,
        "checksum": header.checksum,
        "base": header.base,
        "layout": header.layout.to_json(),
    }
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(text: bytes) -> BlockHeader:
    value = json.loads(text)
    base = value["base"]
    return BlockHeader(
        policy_version=int(value["policy_version"]),
        checksum=int(value["checksum"]),
        base=None if base is None else (int(base[0]), int(base[1])),
        layout=WeightLayout.from_json(value["layout"]),
    )
