"""Where rows come from: the one place that knows every kind of source.

Rows are streamed; what they must hold is `headrace.data.prompts`' concern.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import assert_never

from headrace.config import (
    HuggingFaceDiskSource,
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    SourceConfig,
)
from headrace.data.jsonl import read_jsonl
from headrace.data.procedural import read_task
from headrace.data.rows import BrokenRow, Row
from headrace.data.tables import read_hf_disk, read_parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSource:
    """A source ready to be read once."""

    rows: Iterator[Row | BrokenRow]
    """Raises DataError or ConfigError while read, when the source as a whole is unusable."""
    origin: str
    """The path or task, for messages."""
    unit: str
    """What `Row.number` counts: ``line`` or ``row``."""
    prompt_column: str
    answer_column: str | None
    id_column: str | None
    is_procedural: bool = False
    """Rows are made, not written: that some come out equal is nobody's mistake."""


def open_source(source: SourceConfig) -> OpenSource:
    """Return the rows of ``source``, at most its ``limit`` of them."""
    match source:
        case JsonlSource():
            return _file_source(source, read_jsonl(source.path), unit="line")
        case ParquetSource():
            return _file_source(source, read_parquet(source.path), unit="row")
        case HuggingFaceDiskSource():
            return _file_source(source, read_hf_disk(source.path), unit="row")
        case ReasoningGymSource():
            return OpenSource(
                rows=read_task(source),
                origin=f"reasoning_gym {source.task}",
                unit="row",
                prompt_column="question",
                answer_column="answer",
                id_column=None,
                is_procedural=True,
            )
        case _:
            assert_never(source)


def _file_source(
    source: JsonlSource | ParquetSource | HuggingFaceDiskSource,
    rows: Iterator[Row | BrokenRow],
    *,
    unit: str,
) -> OpenSource:
    return OpenSource(
        rows=islice(rows, source.limit),
        origin=str(source.path),
        unit=unit,
        prompt_column=source.prompt_column,
        answer_column=source.answer_column,
        id_column=source.id_column,
    )
