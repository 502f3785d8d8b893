"""Arrow tables: Parquet files, and the directories that ``Dataset.save_to_disk`` writes.

Read batch by batch with pyarrow alone; the ``datasets`` package is not needed. Which columns a
row needs is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.data.rows import Row
from headrace.errors import DataError

# Arrow's own errors, what it raises for a value Python cannot hold, and the file system's.
_UNREADABLE = (pa.ArrowException, ValueError, LookupError, OverflowError, OSError)
_BATCH_ROWS = 1024


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of one Parquet file. Raises DataError when it cannot be read."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from _numbered(batch, after=number)
                number += batch.num_rows
    except _UNREADABLE as error:
        msg = f"{path}: not a readable Parquet file after row {number} ({error})"
        raise DataError(msg) from error


def read_hf_disk(directory: Path) -> Iterator[Row]:
    """Yield the rows of a dataset that ``save_to_disk`` wrote, in its order.

    Raises DataError for anything else, a ``DatasetDict`` included: its splits are named.
    """
    number = 0
    for path in _data_files(directory):
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
                for batch in stream:
                    yield from _numbered(batch, after=number)
                    number += batch.num_rows
        except _UNREADABLE as error:
            msg = f"{path}: not a readable Arrow stream after row {number} ({error})"
            raise DataError(msg) from error


def _numbered(batch: pa.RecordBatch, *, after: int) -> Iterator[Row]:
    names = batch.schema.names
    columns = [_values(column) for column in batch.columns]
    # Without a column there is no value to line up, but still a row.
    rows = zip(*columns, strict=True) if columns else ((),) * batch.num_rows
    for number, values in enumerate(rows, start=after + 1):
        yield Row(number=number, values=dict(zip(names, values, strict=True)))


def _values(column: pa.Array) -> list[object]:
    """Return the values of ``column``; times that Python cannot hold are text.

    By the type alone where that decides, so that a column is not text in some batches only. A
    time zone that this machine does not know is left out.
    """
    kind = column.type
    if _is_time(kind) and kind.unit == "ns":
        return _texts(column)
    try:
        values: list[object] = column.to_pylist()
    except (ValueError, LookupError, OverflowError, pa.ArrowException):
        if not _is_time(kind):
            raise
        return _texts(column)
    return values


def _is_time(kind: pa.DataType) -> bool:
    types = pa.types
    return any(check(kind) for check in (types.is_timestamp, types.is_time, types.is_duration))


def _texts(column: pa.Array) -> list[object]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp(column.type.unit))
    texts: list[object] = column.cast(pa.string()).to_pylist()
    return texts


def _data_files(directory: Path) -> list[Path]:
    state_path = directory / "state.json"
    try:
        state = json.loads(state_path.read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
    except OSError as error:
        raise DataError(_not_a_dataset(directory)) from error
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{state_path}: not the state of a saved dataset ({error!r}); save it again"
        raise DataError(msg) from error
    if state.get("_indices_data_files"):
        msg = f"{directory}: holds a selection by index; save dataset.flatten_indices() instead"
        raise DataError(msg)
    return [directory / name for name in names]


def _not_a_dataset(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such directory; path must name one that save_to_disk wrote"
    splits = sorted(path.parent.name for path in directory.glob("*/state.json"))
    if splits:
        return (
            f"{directory}: holds a DatasetDict with the splits {', '.join(splits)}; "
            f"set path to one of them, such as {directory / splits[0]}"
        )
    return f"{directory}: has no state.json; path must name a directory that save_to_disk wrote"
