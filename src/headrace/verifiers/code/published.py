"""Tests as data sets publish them, compressed ones included.

Owns: nothing is unpickled. LiveCodeBench's private tests are base64 of zlib of a pickle of one
text; the pickle is read opcode by opcode, and anything but that one text is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib

from headrace.verifiers.code.task import Value

MAX_TEST_BYTES = 1 << 29
"""Of one row's tests when decompressed: half a gibibyte."""

_TEXT_OPCODES = frozenset(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"))
_FRAME_OPCODES = frozenset(("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"))


class UnreadableRowError(Exception):
    """A row's tests are not of the shape its format has; the text says what is wrong."""


def parse_json(text: str, what: str) -> Value:
    """Return the JSON value that ``text`` holds. Raises UnreadableRowError naming ``what``."""
    try:
        return json.loads(text)
    except RecursionError as error:
        msg = f"{what} is nested too deeply"
        raise UnreadableRowError(msg) from error
    except ValueError as error:
        msg = f"{what} is no JSON: {error}"
        raise UnreadableRowError(msg) from error


def parse_private_tests(text: str) -> Value:
    """Return the tests of LiveCodeBench's ``private_test_cases``, plain or compressed."""
    what = "private_test_cases"
    if text.lstrip().startswith(("[", "{")):
        return parse_json(text, what)
    return parse_json(_pickled_text(_inflated(text)), what)


def _inflated(text: str) -> bytes:
    try:
        packed = base64.b64decode(text, validate=True)
        inflater = zlib.decompressobj()
        data = inflater.decompress(packed, MAX_TEST_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        msg = f"private_test_cases is neither JSON nor base64 of zlib: {error}"
        raise UnreadableRowError(msg) from error
    if not inflater.eof:
        msg = f"private_test_cases has more than {MAX_TEST_BYTES} bytes, or is cut off"
        raise UnreadableRowError(msg)
    return data


def _pickled_text(data: bytes) -> str:
    """Return the text that ``data`` pickles, without unpickling it."""
    found: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _TEXT_OPCODES:
                found.append(str(argument))
            elif opcode.name not in _FRAME_OPCODES:
                msg = f"private_test_cases holds a pickle that does more than text: {opcode.name}"
                raise UnreadableRowError(msg)
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        msg = f"private_test_cases holds no pickle: {error}"
        raise UnreadableRowError(msg) from error
    if len(found) != 1:
        msg = f"private_test_cases holds a pickle of {len(found)} texts; it must be one"
        raise UnreadableRowError(msg)
    return found[0]
