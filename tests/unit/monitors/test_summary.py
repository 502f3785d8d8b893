import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import RunDirectoryError
from headrace.monitors import summarise
from headrace.monitors.run_directory import Line


def _run(directory: Path, lines: Sequence[Line]) -> Path:
    (directory / "config.json").write_text("{}")
    text = "".join(json.dumps({"time": 0, "policy_version": 0, **line}) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    return directory


def _evaluation(step: int, **metrics: float) -> Line:
    return {"kind": "evaluation", "step": step, "metrics": metrics}


def test_first_last_and_best_of_every_held_out_metric(tmp_path: Path) -> None:
    lines = [
        _evaluation(step, **{"eval/greedy/pass_at_1": score, "eval/greedy/length_share": length})
        for step, score, length in ((0, 0.4, 0.3), (10, 0.95, 0.1), (20, 0.9, 0.2))
    ]
    assert summarise(_run(tmp_path, lines))["held_out"] == {
        "eval/greedy/pass_at_1": {"first": 0.4, "last": 0.9, "best": 0.95},
        "eval/greedy/length_share": {"first": 0.3, "last": 0.2, "best": 0.1},
    }


def test_counts_and_times_are_no_held_out_metrics(tmp_path: Path) -> None:
    metrics = {"eval/greedy/num_prompts": 5, "controller/time/eval_seconds": 2.0}
    assert summarise(_run(tmp_path, [_evaluation(0, **metrics)]))["held_out"] == {}


def test_rl_seconds_leave_evaluation_out_and_a_step_done_twice_counts_once(tmp_path: Path) -> None:
    def step(number: int, seconds: float) -> Line:
        metrics = {
            "controller/time/step_seconds": seconds,
            "verifier/rollouts/num_scored": 9,
            "verifier/rollouts/num_failed": 1,
        }
        return {"kind": "step", "step": number, "metrics": metrics}

    evaluation = _evaluation(2, **{"controller/time/eval_seconds": 100.0})
    lines = [step(1, 2.0), step(2, 7.0), step(2, 3.0), evaluation]
    summary = summarise(_run(tmp_path, lines))
    assert summary["rl_seconds"] == 5.0
    assert summary["num_steps"] == 2
    assert summary["rollouts_per_second"] == pytest.approx(20 / 5)


def test_a_run_of_no_steps_has_a_summary_of_zeros(tmp_path: Path) -> None:
    assert summarise(_run(tmp_path, [])) == {
        "held_out": {},
        "rl_seconds": 0.0,
        "num_steps": 0,
        "rollouts_per_second": 0.0,
        "alarms": [],
    }


def test_the_summary_is_plain_json(run_directory: Path) -> None:
    assert json.loads(json.dumps(summarise(run_directory)))["num_steps"] == 20


def test_a_directory_that_is_no_run_has_no_summary(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        summarise(tmp_path)
