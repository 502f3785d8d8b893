import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.monitors import JsonlMonitor, read_run, rewind
from headrace.types import EvaluationRecord, RolloutGroup, RunEvent, SamplingParams, StepRecord


def _step(step: int, **metrics: float) -> StepRecord:
    return StepRecord(step=step, num_steps=9, policy_version=step, metrics=metrics, groups=())


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_every_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    monitor = JsonlMonitor(tmp_path, clock=lambda: 12.5)
    monitor.on_step(_step(1, loss=0.5))
    assert _lines(tmp_path / "metrics.jsonl") == [
        {"kind": "step", "step": 1, "time": 12.5, "policy_version": 1, "metrics": {"loss": 0.5}}
    ]
    monitor.on_event(RunEvent(kind="checkpoint", step=1, message="saved", fields={"k": (1, 2)}))
    assert _lines(tmp_path / "events.jsonl")[0]["fields"] == {"k": [1, 2]}
    monitor.close()


def test_nan_and_infinity_become_null_and_are_named(tmp_path: Path) -> None:
    monitor = JsonlMonitor(tmp_path)
    monitor.on_step(_step(1, loss=math.nan, norm=math.inf, fine=1.0))
    monitor.on_event(RunEvent(kind="stop", step=1, message="", fields={"loss": [math.nan]}))
    monitor.close()
    text = (tmp_path / "metrics.jsonl").read_text() + (tmp_path / "events.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    line = _lines(tmp_path / "metrics.jsonl")[0]
    assert line["metrics"] == {"loss": None, "norm": None, "fine": 1.0}
    assert line["nonfinite"] == ["loss", "norm"]


def test_an_evaluation_records_the_sampling_of_each_mode(
    tmp_path: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    greedy = make_group([1.0], sampling=SamplingParams(temperature=0.0, max_tokens=8))
    sampled = make_group([1.0], sampling=SamplingParams(temperature=0.7, max_tokens=8))
    monitor = JsonlMonitor(tmp_path)
    monitor.on_evaluation(
        EvaluationRecord(step=0, policy_version=0, metrics={}, groups=(greedy, sampled))
    )
    monitor.close()
    sampling = _lines(tmp_path / "metrics.jsonl")[0]["sampling"]
    assert sampling["greedy"]["temperature"] == 0.0
    assert sampling["sampled"]["temperature"] == 0.7
    assert sampling["sampled"]["max_tokens"] == 8


def test_a_line_separator_inside_a_text_does_not_split_a_record(tmp_path: Path) -> None:
    monitor = JsonlMonitor(tmp_path)
    monitor.on_event(RunEvent(kind="note", step=1, message="a\u2028b\x85c\nd"))
    monitor.close()
    (tmp_path / "config.json").write_text("{}")
    assert read_run(tmp_path).events[0].message == "a\u2028b\x85c\nd"


_WRITER = """
import sys
from pathlib import Path
from pathlib import Path
from headrace.monitors import JsonlMonitor
from headrace.types import StepRecord
monitor = JsonlMonitor(Path(sys.argv[1]))
for step in range(1, 1_000_000):
    metrics = {f"metric/number/{k}": float(k) for k in range(200)}
    monitor.on_step(
        StepRecord(step=step, num_steps=9, policy_version=step, metrics=metrics, groups=())
    )
    if step == 20:
        print("go", flush=True)
"""


def test_a_run_killed_in_mid_write_is_read_and_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "go\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    (tmp_path / "config.json").write_text("{}")
    steps = [line.step for line in read_run(tmp_path).steps]
    assert steps[:20] == list(range(1, 21))
    rewind(tmp_path, 15)
    assert [line.step for line in read_run(tmp_path).steps] == list(range(1, 16))


def test_records_go_on_after_a_rewind_at_the_end_of_what_it_left(tmp_path: Path) -> None:
    monitor = JsonlMonitor(tmp_path)
    for step in (1, 2, 3):
        monitor.on_step(_step(step))
        monitor.on_event(RunEvent(kind="noted", step=step, message=""))
    rewind(tmp_path, 1)
    monitor.reopen()
    monitor.on_step(_step(2, again=1.0))
    monitor.on_event(RunEvent(kind="noted", step=2, message=""))
    monitor.close()
    lines = _lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["metrics"]) for line in lines] == [(1, {}), (2, {"again": 1.0})]
    assert [line["step"] for line in _lines(tmp_path / "events.jsonl")] == [1, 2]
