"""A folder goes with its process, or with the next one that makes its like."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace import scratch
from headrace.scratch import ScratchFolder

HOLDER = """
import sys, time
from headrace.scratch import ScratchFolder

folder = ScratchFolder("test")
(folder.path / "file").write_text("kept while the process lives")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_removed_with_what_is_in_it(own_place: Path) -> None:
    with ScratchFolder("test") as folder:
        (folder.path / "below").mkdir()
        (folder.path / "below" / "file").write_text("x")
        assert folder.path.name.startswith("headrace-test-")
    assert not list(own_place.iterdir())
    folder.remove()


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_in_use_is_not(
    own_place: Path,
) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    held = Path(holder.stdout.readline().strip())
    with ScratchFolder("test") as other:
        assert (held / "file").exists()
        assert other.path != held
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert held.exists(), "nobody could remove it yet"
    with ScratchFolder("test"), ScratchFolder("test"):
        assert not held.exists()
        assert len(list(own_place.iterdir())) == 2
    assert not list(own_place.iterdir())


def test_other_kinds_and_files_of_such_a_name_are_left_alone(own_place: Path) -> None:
    (own_place / "headrace-other-1").mkdir()
    (own_place / "headrace-test-file").write_text("a file")
    with ScratchFolder("test"):
        assert (own_place / "headrace-other-1").is_dir()
        assert (own_place / "headrace-test-file").is_file()


def test_a_folder_that_was_taken_for_a_leftover_before_it_was_locked_is_made_again(
    own_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = scratch._locked, list[Path]()

    def sweep_first(folder: Path) -> int | None:
        made.append(folder)
        if len(made) == 1:
            folder.rmdir()
        return real(folder)

    monkeypatch.setattr(scratch, "_locked", sweep_first)
    with ScratchFolder("test") as folder:
        assert len(made) == 2
        assert folder.path == made[1]
        assert list(own_place.iterdir()) == [folder.path]
