"""A run directory is one run's, whoever else begins there at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import RunDirectoryError
from headrace.runtime import run_files
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun


def test_a_run_that_finds_its_directory_locked_writes_nothing_in_it(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    """Two that begin together both find an empty directory; the lock says whose it is."""
    output = tmp_path / "run"
    run_files.make(output)
    with run_files.locked(output):
        with pytest.raises(RunDirectoryError, match="another process is training there"):
            asyncio.run(LocalRun(prepared=prepare(), output=output).train())
        assert [path.name for path in output.iterdir()] == [run_files.LOCK_FILE]


def test_a_run_that_another_one_was_faster_than_is_refused_and_leaves_its_settings(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    for _ in range(2):
        run_files.make(output)
    with run_files.locked(output):
        run_files.create(output, prepare("seed=1").config)
    written = (output / run_files.CONFIG_FILE).read_bytes()
    with (
        run_files.locked(output),
        pytest.raises(RunDirectoryError, match="already holds a run"),
    ):
        run_files.create(output, prepare("seed=2").config)
    assert (output / run_files.CONFIG_FILE).read_bytes() == written


def test_what_is_killed_before_it_has_begun_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    output = tmp_path / "run"
    run_files.make(output)
    (output / run_files.LOCK_FILE).touch()
    (output / f".{run_files.CONFIG_FILE}.partial").write_text('{"seed"', encoding="utf-8")
    run_files.make(output)
    (output / "notes.txt").touch()
    with pytest.raises(RunDirectoryError, match="already holds other files"):
        run_files.make(output)


def test_a_run_whose_ledger_was_lost_is_not_resumed_as_if_nothing_were_settled(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    settings = ("data.eval=null", "checkpoint.every=1")
    asyncio.run(LocalRun(prepared=prepare(*settings, "num_steps=1"), output=output).train())
    (output / run_files.LEDGER_FILE).unlink()
    metrics = (output / "metrics.jsonl").read_bytes()
    longer = LocalRun(prepared=prepare(*settings, "num_steps=2"), output=output, resume=True)
    with pytest.raises(RunDirectoryError, match="nothing of step 1 is in it, which is empty"):
        asyncio.run(longer.train())
    assert (output / "metrics.jsonl").read_bytes() == metrics
