r"""JSONL files: one JSON object a line, and only ``\n`` ends a line.

Invariant: what was written is what is read. U+2028, U+0085 and the other characters at which
``str.splitlines`` would split are legal inside JSON text; a line that is broken is reported with
its own number and the lines after it are still read. Blank lines are no rows. Which columns a
row needs is not known here.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.data.faults import RowError
from headrace.data.rows import BrokenRow, Row
from headrace.errors import DataError


def read_jsonl(path: Path) -> Iterator[Row | BrokenRow]:
    """Yield the rows of ``path``, one line in memory at a time.

    Raises DataError when the file itself cannot be read.
    """
    try:
        # Binary, because iterating text would end lines at a lone \r too.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if content.strip():
                    yield _read_line(number, content.rstrip(b"\r\n"))
    except OSError as error:
        msg = f"{path}: {error.strerror}; path must name a JSONL file"
        raise DataError(msg) from error


def _read_line(number: int, line: bytes) -> Row | BrokenRow:
    try:
        return Row(number=number, values=_parse(line))
    except RowError as fault:
        return BrokenRow(number=number, fault=fault)


def _parse(line: bytes) -> dict[str, object]:
    value = _decode(line)
    if not isinstance(value, dict):
        reason = 'not a JSON object; write each row as {"column": value, ...}'
        raise RowError(reason, f"found {type(value).__name__}")
    if b"\\ud" in line or b"\\uD" in line:
        _refuse_half_characters(value)
    return value


def _decode(line: bytes) -> object:
    try:
        return json.loads(line.decode(), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        reason = "not UTF-8; save the file as UTF-8"
        note = f"byte {line[error.start]:#04x} at position {error.start + 1}"
    except json.JSONDecodeError as error:
        reason, note = "not JSON", f"{error.msg} at column {error.pos + 1}"
    except RecursionError:
        reason, note = "nested too deeply to be read", ""
    except ValueError as error:  # an integer with more digits than Python converts
        reason, note = "a number is too long", str(error)
    raise RowError(reason, note)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build one object. Keys are shared between rows: a million rows hold each name once."""
    values = {sys.intern(key): value for key, value in pairs}
    if len(values) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        reason = "an object has the same key twice"
        raise RowError(reason, repr(twice))
    return values


def _refuse_half_characters(value: object) -> None:
    """Refuse half a surrogate pair: JSON can escape it, but no tokenizer or file can hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        reason = "text has half of a surrogate pair, which is no character"
        raise RowError(reason, escape) from error
