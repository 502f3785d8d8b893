from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.bench.command import run_headrace, run_module
from headrace.errors import ConfigError, RunError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module named `program` that child processes find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "program.py"


def test_lines_are_passed_on_and_the_seconds_returned(program: Path) -> None:
    program.write_text("import sys, os\nprint('one', sys.argv[1])\nprint(os.environ['COLOUR'])")
    lines: list[str] = []
    seconds = run_module("program", ["x"], progress=lines.append, environment={"COLOUR": "red"})
    assert lines == ["one x", "red"]
    assert seconds > 0


def test_a_failure_carries_the_last_lines_of_the_process(program: Path) -> None:
    program.write_text("for i in range(100): print('line', i)\nraise SystemExit(1)")
    with pytest.raises(RunError) as caught:
        run_module("program", [], progress=lambda _: None)
    assert "`program` ended with status 1" in str(caught.value)
    assert "line 99" in str(caught.value)
    assert "line 50" not in str(caught.value)


def test_what_the_user_can_fix_stays_what_the_user_can_fix() -> None:
    with pytest.raises(ConfigError, match="recipe nowhere: neither a file nor"):
        run_headrace(["check", "nowhere"], progress=lambda _: None)


def test_a_process_that_hangs_is_killed(program: Path) -> None:
    program.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    with pytest.raises(RunError, match=r"was killed after 0 s; its last lines"):
        run_module("program", [], progress=lambda _: None, limit_seconds=0.2)


def test_a_process_ends_when_its_reader_fails(program: Path) -> None:
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    seen: list[int] = []

    def fail(line: str) -> None:
        seen.append(int(line))
        raise ValueError(line)

    with pytest.raises(ValueError, match=r"\d+"):
        run_module("program", [], progress=fail)
    assert not Path(f"/proc/{seen[0]}").exists()
    assert "bench-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_running_process_is_looked_at_many_times(program: Path) -> None:
    seen = program.with_name("seen")
    program.write_text(
        "import os, pathlib, time\nprint(os.getpid(), flush=True)\n"
        f"while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)"
    )
    lines: list[str] = []
    process_ids: list[int] = []

    def look(process_id: int) -> None:
        process_ids.append(process_id)
        if len(process_ids) > 3:
            seen.touch()

    run_module("program", [], progress=lines.append, on_tick=look)
    assert set(process_ids) == {int(lines[0])}


def test_the_clock_of_a_process_is_not_its_progress(program: Path) -> None:
    program.write_text("print('x')")
    began = time.monotonic()
    seconds = run_module("program", [], progress=lambda _: None)
    assert seconds <= time.monotonic() - began
