"""Messages between a process and its children over pipes: a length, then a pickle.

Pickle, because both ends are this program's own processes, in which nobody else's code runs; what
they say (rollouts, results, errors) are its own records.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">Q")

READY = 0
"""Number of the answer that a child gives unasked, once it can be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Something for a child to do."""

    number: int
    """Of the answer. Where there are several, the arguments or the method say their numbers."""
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it."""

    number: int
    value: Any = None
    error: Exception | None = None


def encode(message: Request | Answer) -> bytes:
    """Return ``message`` as it is sent."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def read_request(stream: BinaryIO) -> Request | None:
    """Wait for the next one; None once the other side has closed the pipe."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(head)[0])
    request = pickle.loads(body)  # noqa: S301 - from the process that started this one
    assert isinstance(request, Request)
    return request


async def read_answer(stream: asyncio.StreamReader) -> Answer:
    """Wait for the next one. Raises IncompleteReadError when the other side ends."""
    head = await stream.readexactly(_LENGTH.size)
    body = await stream.readexactly(_LENGTH.unpack(head)[0])
    answer = pickle.loads(body)  # noqa: S301 - from a process that runs this program alone
    assert isinstance(answer, Answer)
    return answer
