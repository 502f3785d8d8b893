import json
from pathlib import Path
from typing import Never

import pytest

from headrace.errors import RunDirectoryError
from headrace.monitors import JsonlMonitor, read_run, rewind
from headrace.monitors.run_directory import rollout_files
from headrace.types import RunEvent, StepRecord


def test_a_directory_that_is_no_run_is_named_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"holds no run, config\.json is missing"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is missing"):
        read_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="missing"):
        read_run(tmp_path / "nowhere")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunDirectoryError, match=r"config\.json: "):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RunDirectoryError, match="holds list, not a JSON object"):
        read_run(tmp_path)


def test_a_rewind_forgets_every_line_and_file_after_the_step(run_directory: Path) -> None:
    rewind(run_directory, 10)
    run = read_run(run_directory)
    assert [line.step for line in run.steps] == list(range(1, 11))
    assert [line.step for line in run.evaluations] == [0, 10]
    assert [event.kind for event in run.events] == ["start"]
    recorded = [(kind, step) for _, kind, step in rollout_files(run_directory)]
    assert recorded == [("eval", 0), ("step", 1), ("eval", 10), ("step", 10)]


def test_a_rewind_takes_back_what_was_made_and_not_what_happened_to_processes(
    run_directory: Path,
) -> None:
    monitor = JsonlMonitor(run_directory)
    for kind in ("learner_restart", "generator_lost", "waiting"):
        monitor.on_event(RunEvent(kind=kind, step=15, message=kind))
    monitor.close()
    for step in (10, -1):
        rewind(run_directory, step)
        kinds = [event.kind for event in read_run(run_directory).events]
        assert kinds == ["start", "learner_restart", "generator_lost"][step < 0 :]


def test_a_rewind_keeps_the_lines_it_keeps_as_they_were(run_directory: Path) -> None:
    before = (run_directory / "metrics.jsonl").read_bytes()
    rewind(run_directory, 10_000)
    assert (run_directory / "metrics.jsonl").read_bytes() == before


def test_a_rewind_drops_a_torn_last_line_so_that_the_next_record_stands_alone(
    run_directory: Path,
) -> None:
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 3, "met')
    assert len(read_run(run_directory).steps) == 20
    rewind(run_directory, 20)
    monitor = JsonlMonitor(run_directory)
    monitor.on_step(
        StepRecord(step=21, num_steps=21, policy_version=21, metrics={"x": 1.0}, groups=())
    )
    monitor.close()
    assert read_run(run_directory).steps[-1].metrics == {"x": 1.0}


def test_a_rewind_before_anything_was_written_is_no_error(tmp_path: Path) -> None:
    rewind(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_line_in_the_middle_is_named_by_its_number(run_directory: Path) -> None:
    path = run_directory / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[6] = b'{"step": '
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl line 7: not a record"):
        read_run(run_directory)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl line 7: not a record"):
        rewind(run_directory, 20)


def test_a_rewind_that_cannot_write_leaves_the_old_file(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (run_directory / "metrics.jsonl").read_bytes()

    def disk_full(_descriptor: int) -> Never:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        rewind(run_directory, 5)
    assert (run_directory / "metrics.jsonl").read_bytes() == before


def test_a_separator_that_json_allows_inside_a_text_is_no_end_of_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    line = {"kind": "note", "step": 1, "time": 1, "message": "a\u2028b\x85c"}
    text = json.dumps(line, ensure_ascii=False) + "\r\n"
    (tmp_path / "events.jsonl").write_text(text, encoding="utf-8", newline="")
    assert [event.message for event in read_run(tmp_path).events] == ["a\u2028b\x85c"]


def test_a_step_that_was_done_twice_counts_as_it_was_last_done(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    lines = [
        {"kind": "step", "step": 1, "time": 1, "policy_version": 1, "metrics": {"x": value}}
        for value in (1.0, 2.0)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line.metrics["x"] for line in read_run(tmp_path).steps] == [2.0]
