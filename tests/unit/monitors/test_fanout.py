import logging
from pathlib import Path
from typing import Never

import pytest

from headrace.monitors import FanoutMonitor, JsonlMonitor
from headrace.types import EvaluationRecord, RunEvent, StepRecord

STEP = StepRecord(step=3, num_steps=9, policy_version=3, metrics={}, groups=())
EVALUATION = EvaluationRecord(step=3, policy_version=3, metrics={}, groups=())
EVENT = RunEvent(kind="note", step=3, message="hello")


class Recorder:
    def __init__(self) -> None:
        self.seen = []

    def on_step(self, record: StepRecord | EvaluationRecord) -> None:
        self.seen.append(record)

    def on_evaluation(self, record: StepRecord | EvaluationRecord) -> None:
        self.seen.append(record)

    def on_event(self, event: RunEvent) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.seen.append("closed")


class Broken(Recorder):
    def on_step(self, record: StepRecord | EvaluationRecord) -> Never:
        super().on_step(record)
        message = "disk full"
        raise OSError(message)

    def close(self) -> Never:
        message = "cannot close"
        raise RuntimeError(message)


class BrokenOnEvents(Recorder):
    def on_event(self, event: RunEvent) -> Never:
        super().on_event(event)
        raise KeyError(event.kind)


def test_every_record_reaches_every_monitor_in_order() -> None:
    first, second = Recorder(), Recorder()
    fanout = FanoutMonitor([first, second])
    fanout.on_step(STEP)
    fanout.on_evaluation(EVALUATION)
    fanout.on_event(EVENT)
    fanout.close()
    assert first.seen == second.seen == [STEP, EVALUATION, EVENT, "closed"]


def test_an_event_of_somebody_who_knows_no_steps_is_of_the_last_one_heard_of() -> None:
    recorder = Recorder()
    fanout = FanoutMonitor([recorder])
    fanout.tell("lost", "before the first", {})
    fanout.on_step(STEP)
    fanout.tell("lost", "after it", {"member": 1})
    fanout.on_event(RunEvent(kind="learner_restart", step=2, message="from step 2"))
    fanout.tell("lost", "after that", {})

    told = [event for event in recorder.seen if getattr(event, "kind", "") == "lost"]
    assert [event.step for event in told] == [0, 3, 2]
    assert told[1] == RunEvent(kind="lost", step=3, message="after it", fields={"member": 1})


def test_a_monitor_that_raises_is_reported_once_and_hears_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, healthy = Broken(), Recorder()
    fanout = FanoutMonitor([broken, healthy])
    with caplog.at_level(logging.ERROR):
        fanout.on_step(STEP)
        fanout.on_step(STEP)
        fanout.on_event(EVENT)
    assert broken.seen == [STEP]
    reports = [event for event in healthy.seen if getattr(event, "kind", "") == "monitor_failed"]
    assert [report.fields for report in reports] == [{"monitor": "Broken"}]
    assert "disk full" in reports[0].message
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "switched off" in caplog.text


def test_a_monitor_that_fails_on_the_report_of_a_failure_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    healthy = Recorder()
    fanout = FanoutMonitor([Broken(), BrokenOnEvents(), BrokenOnEvents(), healthy])
    with caplog.at_level(logging.ERROR):
        fanout.on_step(STEP)
    failed = [event.fields["monitor"] for event in healthy.seen if isinstance(event, RunEvent)]
    assert sorted(failed) == ["Broken", "BrokenOnEvents", "BrokenOnEvents"]


def test_closing_twice_and_a_failing_close_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    before, behind = Recorder(), Recorder()
    fanout = FanoutMonitor([before, Broken(), behind])
    with caplog.at_level(logging.ERROR):
        fanout.close()
        fanout.close()
    assert before.seen == ["closed"]
    failed, closed = behind.seen
    assert (failed.kind, failed.fields, closed) == (
        "monitor_failed",
        {"monitor": "Broken"},
        "closed",
    ), "what is still open hears of it"


def test_a_monitor_that_cannot_start_does_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JsonlMonitor(tmp_path / "missing")


def test_ctrl_c_is_not_swallowed() -> None:
    class Interrupted(Recorder):
        def on_step(self, record: StepRecord | EvaluationRecord) -> Never:
            raise KeyboardInterrupt(record)

    with pytest.raises(KeyboardInterrupt):
        FanoutMonitor([Interrupted()]).on_step(STEP)
