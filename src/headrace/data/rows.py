"""One row of a prompt source, before anything is known about its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.data.faults import RowError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that could be read."""

    number: int
    """1 for the first row; in a JSONL file the number of its line."""
    values: Mapping[str, object]
    """Column name -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRow:
    """A row that could not be read. The rows after it can."""

    number: int
    """As in `Row`."""
    fault: RowError
    """Why not."""
