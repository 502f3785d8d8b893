"""Length-prefixed JSON over a pipe: a 4-byte big-endian length, then UTF-8 JSON.

JSON and never pickle, because a frame may come out of a process that ran somebody else's code.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

Message = dict[str, Any]

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class BrokenFrameError(Exception):
    """The other side ended, or sent something that is no frame."""


def encode(message: Mapping[str, object]) -> bytes:
    """Return ``message`` as one frame; a value JSON does not know is sent as its text."""
    body = json.dumps(message, default=str).encode()
    if len(body) > MAX_FRAME_BYTES:
        msg = f"message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent"
        raise BrokenFrameError(msg)
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Message | None:
    """Wait for one frame; None once the other side has closed the pipe."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    return _decode(stream.read(_length(header)))


async def receive(stream: asyncio.StreamReader) -> Message:
    """Wait for one frame. Raises BrokenFrameError when the other side ends first."""
    try:
        header = await stream.readexactly(_LENGTH.size)
        return _decode(await stream.readexactly(_length(header)))
    except asyncio.IncompleteReadError as error:
        msg = "the process ended without an answer"
        raise BrokenFrameError(msg) from error


def _length(header: bytes) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        msg = f"frame of {length} bytes; at most {MAX_FRAME_BYTES} are read"
        raise BrokenFrameError(msg)
    return length


def _decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        msg = "a frame that is no JSON"
        raise BrokenFrameError(msg) from error
    if not isinstance(message, dict):
        msg = "a frame that is no JSON object"
        raise BrokenFrameError(msg)
    return message
