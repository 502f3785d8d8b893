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
_UNREADABLE = (pa.ArrowException, ValueError, OSError)
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
    for number, values in enumerate(batch.to_pylist(), start=after + 1):
        yield Row(number=number, values=values)


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
