from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.jsonl import read_jsonl
from headrace.data.rows import BrokenRow, Row
from headrace.errors import DataError

SEPARATORS = "\u2028 \u2029 \u0085 \x0b \x0c \x1c \x1d \x1e"


def read(tmp_path: Path, content: bytes) -> list[Row | BrokenRow]:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return list(read_jsonl(path))


def fault_of(row: Row | BrokenRow) -> str:
    assert isinstance(row, BrokenRow)
    return f"{row.number}: {row.fault.reason} ({row.fault.note})"


def test_characters_that_splitlines_would_split_at_stay_inside_their_row(tmp_path: Path) -> None:
    rows = [{"prompt": f"a{SEPARATORS}b"}, {"prompt": "😀 \r é"}]
    content = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    # The fault this guards against: text that is split into lines before it is parsed.
    assert len(content.decode().splitlines()) > len(rows)
    read_rows = read(tmp_path, content)
    assert [row.values for row in read_rows if isinstance(row, Row)] == rows


def test_windows_line_ends_a_byte_order_mark_and_blank_lines_are_fine(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n   \n\n'
    rows = read(tmp_path, content)
    assert [(row.number, row.values) for row in rows if isinstance(row, Row)] == [
        (1, {"a": 1}),
        (3, {"a": 2}),
    ]


def test_broken_line_7_is_reported_as_line_7_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = [b'{"a": "x\xe2\x80\xa8y"}'] * 10
    lines[6] = b'{"a": '
    rows = read(tmp_path, b"\n".join(lines))
    assert [row.number for row in rows if isinstance(row, Row)] == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert fault_of(rows[6]) == "7: not JSON (Expecting value at column 7)"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"[1, 2]", 'not a JSON object; write each row as {"column": value, ...} (found list)'),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "an object has the same key twice ('c')"),
        (b'{"a": "\xff"}', "not UTF-8; save the file as UTF-8 (byte 0xff at position 8)"),
        (
            b'{"a": "\\ud83d"}',
            "text has half of a surrogate pair, which is no character (\\ud83d)",
        ),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply to be read ()"),
        (b'{"a": 1} {"a": 2}', "not JSON (Extra data at column 10)"),
    ],
)
def test_a_line_that_is_no_row_says_why(tmp_path: Path, line: bytes, fault: str) -> None:
    rows = read(tmp_path, b'{"ok": 1}\n' + line + b'\n{"ok": 3}\n')
    assert len(rows) == 3
    assert fault_of(rows[1]) == f"2: {fault}"


def test_an_endless_integer_is_a_fault_of_its_line(tmp_path: Path) -> None:
    rows = read(tmp_path, b'{"a": ' + b"9" * 5000 + b"}")
    assert fault_of(rows[0]).startswith("1: a number is too long")


def test_a_whole_escaped_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    (row,) = read(tmp_path, b'{"a": "\\ud83d\\ude00"}')
    assert isinstance(row, Row)
    assert row.values == {"a": "😀"}


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: No such file or directory; path must"):
        list(read_jsonl(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="Is a directory"):
        list(read_jsonl(tmp_path))


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(st.text(max_size=3), st.text() | st.integers() | st.none(), max_size=3),
        min_size=1,
        max_size=5,
    ),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
    ascii_only=st.booleans(),
)
def test_what_was_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, object]],
    line_end: bytes,
    ascii_only: bool,
) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only).encode() for row in rows]
    read_rows = read(tmp_path_factory.getbasetemp(), line_end.join(lines))
    assert [row.values for row in read_rows if isinstance(row, Row)] == rows
