from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.data.tables import read_hf_disk, read_parquet
from headrace.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": f"question {index}\u2028", "answer": index, "tags": ["x"] * (index % 3)}
    for index in range(3000)
]


@pytest.fixture(autouse=True)
def quiet_datasets() -> None:
    datasets.disable_progress_bars()


def save(directory: Path, rows: list[dict[str, Any]], num_shards: int = 1) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(directory, num_shards=num_shards)


def test_parquet_rows_come_back_in_order_across_batches(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=700)
    rows = list(read_parquet(path))
    assert [row.values for row in rows] == ROWS
    assert [row.number for row in rows] == list(range(1, 3001))


def test_a_saved_hugging_face_dataset_is_read_shard_after_shard(tmp_path: Path) -> None:
    save(tmp_path / "saved", ROWS, num_shards=3)
    rows = list(read_hf_disk(tmp_path / "saved"))
    assert [row.values for row in rows] == ROWS
    assert [row.number for row in rows] == list(range(1, 3001))


def test_a_shuffled_dataset_is_read_in_its_shuffled_order(tmp_path: Path) -> None:
    shuffled = datasets.Dataset.from_list(ROWS).shuffle(seed=1)
    shuffled.save_to_disk(tmp_path / "saved")
    assert [row.values for row in read_hf_disk(tmp_path / "saved")] == list(shuffled)


def test_a_dataset_dict_is_refused_and_its_splits_are_named(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list(ROWS[:4])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"the splits test, train; set path .*both/test"):
        list(read_hf_disk(tmp_path / "both"))


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text('{"prompt": "this is JSON"}\n')
    with pytest.raises(DataError, match=r"rows\.parquet: not a readable Parquet file"):
        list(read_parquet(path))
    with pytest.raises(DataError, match=r"absent\.parquet: not a readable Parquet file"):
        list(read_parquet(tmp_path / "absent.parquet"))


def test_a_directory_that_save_to_disk_did_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no state\.json"):
        list(read_hf_disk(tmp_path))
    with pytest.raises(DataError, match="no such directory"):
        list(read_hf_disk(tmp_path / "absent"))


def test_a_damaged_dataset_names_the_damaged_file(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, ROWS, num_shards=2)
    (shard,) = saved.glob("data-00001-*")
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: not a readable Arrow"):
        list(read_hf_disk(saved))
    (saved / "state.json").write_text('{"_data_files": 3}')
    with pytest.raises(DataError, match=r"state\.json: not the state of a saved dataset"):
        list(read_hf_disk(saved))


def test_a_dataset_saved_as_a_selection_by_index_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, ROWS[:4])
    state = json.loads((saved / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="flatten_indices"):
        list(read_hf_disk(saved))
    shutil.rmtree(saved)


def test_times_that_python_cannot_hold_come_as_text_and_hide_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = {
        "prompt": pa.array(["a", "b"]),
        "fine": pa.array([1_001, None], pa.timestamp("ns")),
        "daily": pa.array([7, None], pa.time64("ns")),
        "mars": pa.array([1_000_000, None], pa.timestamp("us", tz="Mars/Base")),
        "late": pa.array([2**60, None], pa.timestamp("ms")),
        "took": pa.array([5, None], pa.duration("ns")),
        "when": pa.array([0, None], pa.timestamp("us", tz="UTC")),
    }
    pq.write_table(pa.table(columns), path)
    first, second = (row.values for row in read_parquet(path))
    assert first["prompt"] == "a"
    assert first["fine"] == "1970-01-01 00:00:00.000001001"
    assert first["daily"] == "00:00:00.000000007"
    assert first["mars"] == "1970-01-01 00:00:01.000000"
    assert isinstance(first["late"], str)
    assert first["took"] == "5"
    assert first["when"] == dt.datetime.fromtimestamp(0, dt.UTC)
    assert second == {"prompt": "b"} | dict.fromkeys(list(columns)[1:])
