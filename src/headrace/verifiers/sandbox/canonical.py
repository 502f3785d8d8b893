"""Python values as bytes: what goes into an isolated program and what it may send back.

Owns: only values of exactly the built-in types pass, so nothing that comes back carries code, an
``__eq__`` of its own or a type that pretends; every value has one encoding, and nothing but it
decodes; decoding costs a time that grows with the bytes alone, colliding keys included. The
encoding side runs inside the cell, by the standard library alone. It compares nothing.

    value       = tag content             lengths and counts: 4 bytes, big-endian
    N T F       None, True, False
    i f c       length and two's complement; IEEE double; two doubles. NaN has one spelling
    s b a       length and UTF-8 (lone surrogates too), bytes, bytearray
    l t S Z     count and elements: list, tuple, set, frozenset (sets sorted by encoding)
    d           count, then key and value in the order of the dict
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

Value = Any
"""None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict."""

MAX_BYTES = 1 << 20
MAX_DEPTH = 100
"""Containers inside one another."""

_MAX_COLLISIONS = 64
"""Keys of one dict or set with equal hashes; ``hash`` of numbers and tuples has no secret, so more
of them are made on purpose: each insertion would walk past all those before."""

_LENGTH = struct.Struct(">I")
_DOUBLE = struct.Struct(">d")
_NAN = struct.pack(">d", math.nan)
_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_CONTAINERS: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z"}
_CONTAINER_OF = {tag: kind for kind, tag in _CONTAINERS.items()}


class EncodeError(ValueError):
    """The value is of another type, too deep or too large; the text says which."""


class DecodeError(ValueError):
    """The bytes are not the encoding of a value within the caps."""


def encode(value: Value, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> bytes:
    """Return the encoding of ``value``. Raises EncodeError; calls no method of the value's own."""
    encoder = _Encoder(max_bytes)
    encoder.put(value, max_depth)
    return b"".join(encoder.parts)


def decode(data: bytes, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Value:
    """Return the value that ``data`` encodes. Raises DecodeError for anything else."""
    if len(data) > max_bytes:
        msg = f"{len(data)} bytes; at most {max_bytes} are decoded"
        raise DecodeError(msg)
    decoder = _Decoder(data)
    value = decoder.take_value(max_depth)
    if decoder.position != len(data):
        msg = f"{len(data) - decoder.position} bytes follow the value"
        raise DecodeError(msg)
    return value


class _Encoder:
    """Collects parts, and stops as soon as they are too many: a value may share its parts."""

    def __init__(self, room: int) -> None:
        self.parts: list[bytes] = []
        self._room = room

    def put(self, value: Value, depth: int) -> None:
        """Add ``value``, in which ``depth`` containers may be nested."""
        kind = type(value)
        if kind in _CONTAINERS or kind is dict:
            if depth == 0:
                msg = "the value is nested too deeply, or contains itself"
                raise EncodeError(msg)
            self._put_container(value, depth - 1)
        else:
            self._add(_scalar(value))

    def _put_container(self, value: Value, depth: int) -> None:
        kind = type(value)
        self._add((b"d" if kind is dict else _CONTAINERS[kind]) + _LENGTH.pack(len(value)))
        if kind is dict:
            for key, held in value.items():
                self.put(key, depth)
                self.put(held, depth)
        elif kind is set or kind is frozenset:
            self.parts += sorted([self._apart(element, depth) for element in value])
        else:
            for element in value:
                self.put(element, depth)

    def _apart(self, element: Value, depth: int) -> bytes:
        encoder = _Encoder(self._room)
        encoder.put(element, depth)
        self._room = encoder._room
        return b"".join(encoder.parts)

    def _add(self, part: bytes) -> None:
        self._room -= len(part)
        if self._room < 0:
            msg = "the value is too large"
            raise EncodeError(msg)
        self.parts.append(part)


def _scalar(value: Value) -> bytes:
    write = _SCALARS.get(type(value))
    if write is not None:
        return write(value)
    # The name of a class is the program's own text: only a part of it, and only printable.
    name = ascii(type.__dict__["__name__"].__get__(type(value)))[1:81]
    msg = f"the value is, or contains, a {name}, which is not exactly one of the built-in types"
    raise EncodeError(msg)


def _int_length(value: int) -> int:
    """Return the fewest bytes that hold ``value`` and its sign."""
    return (value if value >= 0 else ~value).bit_length() // 8 + 1


def _double(value: float) -> bytes:
    return _NAN if math.isnan(value) else _DOUBLE.pack(value)


def _sized(tag: bytes, content: bytes) -> bytes:
    try:
        return tag + _LENGTH.pack(len(content)) + content
    except struct.error as error:
        msg = "the value is too large"
        raise EncodeError(msg) from error


_SCALARS: dict[type, Callable[[Value], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: lambda value: _sized(b"i", value.to_bytes(_int_length(value), "big", signed=True)),
    float: lambda value: b"f" + _double(value),
    complex: lambda value: b"c" + _double(value.real) + _double(value.imag),
    str: lambda value: _sized(b"s", value.encode("utf-8", "surrogatepass")),
    bytes: lambda value: _sized(b"b", value),
    bytearray: lambda value: _sized(b"a", bytes(value)),
}


class _Decoder:
    """Reads from the front. Trusts no length, and refuses every second spelling."""

    def __init__(self, data: bytes) -> None:
        self.position = 0
        self._data = data

    def take_value(self, depth: int) -> Value:
        """Return the next value, in which ``depth`` containers may be nested."""
        tag = self._take(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _CONTAINER_OF or tag == b"d":
            if depth == 0:
                msg = "nested too deeply"
                raise DecodeError(msg)
            return self._take_container(tag, depth - 1)
        return self._take_scalar(tag)

    def _take_scalar(self, tag: bytes) -> Value:
        match tag:
            case b"f":
                return self._take_double()
            case b"c":
                return complex(self._take_double(), self._take_double())
            case b"i":
                return self._take_int()
            case b"s":
                return self._take_text()
            case b"b":
                return self._take(self._take_length())
            case b"a":
                return bytearray(self._take(self._take_length()))
            case _:
                msg = f"byte {self.position - 1} is no tag: {tag!r}"
                raise DecodeError(msg)

    def _take_container(self, tag: bytes, depth: int) -> Value:
        count = self._take_length()
        # An element is at least one byte, so this bounds the work before any of it is done.
        if count > len(self._data) - self.position:
            msg = f"{count} elements in {len(self._data) - self.position} bytes"
            raise DecodeError(msg)
        if tag == b"d":
            pairs = [(self.take_value(depth), self.take_value(depth)) for _ in range(count)]
            return dict(zip(_keys([key for key, _ in pairs]), [v for _, v in pairs], strict=True))
        kind = _CONTAINER_OF[tag]
        if kind is set or kind is frozenset:
            return kind(_keys(self._take_sorted(count, depth)))
        return kind([self.take_value(depth) for _ in range(count)])

    def _take_sorted(self, count: int, depth: int) -> list[Value]:
        found: list[Value] = []
        last = b""
        for _ in range(count):
            begin = self.position
            found.append(self.take_value(depth))
            part = self._data[begin : self.position]
            # Equal ones are left to `_keys`: two NaN are two elements.
            if part < last:
                msg = "the elements of a set are not in order"
                raise DecodeError(msg)
            last = part
        return found

    def _take_int(self) -> int:
        content = self._take(self._take_length())
        value = int.from_bytes(content, "big", signed=True)
        if len(content) != _int_length(value):
            msg = "an integer with more bytes than it needs"
            raise DecodeError(msg)
        return value

    def _take_double(self) -> float:
        content = self._take(8)
        value: float = _DOUBLE.unpack(content)[0]
        if math.isnan(value) and content != _NAN:
            msg = "a NaN with a message in it"
            raise DecodeError(msg)
        return value

    def _take_text(self) -> str:
        try:
            return self._take(self._take_length()).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            msg = "text that is not UTF-8"
            raise DecodeError(msg) from error

    def _take_length(self) -> int:
        length: int = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        return length

    def _take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self._data):
            msg = f"ends {end - len(self._data)} bytes too early"
            raise DecodeError(msg)
        content = self._data[self.position : end]
        self.position = end
        return content


def _keys(found: list[Value]) -> list[Value]:
    """Return ``found`` if its elements can be keys side by side. Raises DecodeError."""
    try:
        hashes = Counter(map(hash, found))
    except TypeError as error:
        msg = "a key that has no hash"
        raise DecodeError(msg) from error
    if max(hashes.values(), default=0) > _MAX_COLLISIONS:
        msg = "too many keys with equal hashes"
        raise DecodeError(msg)
    # NaN equals nothing, itself included, so two of them are two keys, as in the value encoded.
    if len(set(found)) != len(found):
        msg = "a key that comes twice"
        raise DecodeError(msg)
    return found
