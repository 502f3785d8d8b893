import io
import os
from collections.abc import Mapping

import pytest
from rich.console import Console

from headrace.monitors import LiveMonitor, PlainMonitor, console_monitor
from headrace.roles import Monitor
from headrace.types import EvaluationRecord, RunEvent, StepRecord

METRICS = {
    "verifier/reward/raw_mean": 0.512,
    "verifier/source/carry/reward_mean": 0.4,
    "verifier/source/plain/reward_mean": 0.6,
    "learner/entropy/mean": 0.31,
    "generator/throughput/tokens_per_second": 18_200.0,
    "controller/time/generate_seconds": 0.4,
    "controller/time/score_seconds": 0.1,
    "controller/time/update_seconds": 0.5,
    "controller/time/step_seconds": 1.0,
}


def _step(step: int, metrics: Mapping[str, float] = METRICS, num_steps: int = 10) -> StepRecord:
    return StepRecord(
        step=step, num_steps=num_steps, policy_version=step, metrics=metrics, groups=()
    )


def _evaluation(step: int) -> EvaluationRecord:
    metrics = {"eval/greedy/pass_at_1": 0.875, "eval/greedy/source/carry/pass_at_1": 0.5}
    return EvaluationRecord(step=step, policy_version=step, metrics=metrics, groups=())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_away_from_a_terminal_a_step_is_one_plain_line() -> None:
    stream, clock = io.StringIO(), Clock()
    monitor = PlainMonitor(stream, clock=clock)
    monitor.on_evaluation(_evaluation(0))
    for step in (1, 2):
        clock.now += 3.0
        monitor.on_step(_step(step))
    monitor.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "held out after step 0: greedy pass@1 87.5 %"
    assert lines[2] == (
        "step 2/10  reward 0.512 (carry 0.4, plain 0.6)  held out greedy pass@1 87.5 %  "
        "entropy 0.31  tokens/s 18.2k  time generate 40%  score 10%  update 50%  24 s left"
    )


def test_fast_steps_do_not_flood_and_the_last_one_is_always_there() -> None:
    stream, clock = io.StringIO(), Clock()
    monitor = PlainMonitor(stream, clock=clock)
    for step in range(1, 11):
        clock.now += 0.5
        monitor.on_step(_step(step))
    shown = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert shown == ["1/10", "5/10", "9/10", "10/10"]


def test_an_evaluation_of_canaries_alone_says_how_many_passed() -> None:
    stream = io.StringIO()
    metrics = {"eval/canary/num_scored": 8.0, "eval/canary/num_passed": 2.0}
    record = EvaluationRecord(step=4, policy_version=4, metrics=metrics, groups=())
    PlainMonitor(stream).on_evaluation(record)
    assert stream.getvalue() == "held out after step 4: canaries passed 2 of 8\n"


def test_a_step_without_any_metric_is_still_a_line() -> None:
    stream = io.StringIO()
    PlainMonitor(stream).on_step(_step(1, metrics={}))
    assert stream.getvalue().startswith("step 1/10")


def test_no_control_code_is_written_away_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    monitor = console_monitor("run", stream)
    monitor.on_step(_step(1))
    monitor.on_event(RunEvent(kind="note", step=1, message="evil \x1b[2J\x9b31m text"))
    monitor.close()
    assert isinstance(monitor, PlainMonitor)
    assert "\x1b" not in stream.getvalue()
    assert "\x9b" not in stream.getvalue()
    assert r"evil \x1b[2J\x9b31m text" in stream.getvalue()


def test_on_a_terminal_the_panel_shows_every_figure() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    monitor = LiveMonitor("quickstart", console, clock=clock)
    monitor.on_evaluation(_evaluation(0))
    for step in (1, 2):
        clock.now += 60.0
        monitor.on_step(_step(step))
    monitor.on_event(RunEvent(kind="checkpoint", step=2, message="saved \x1b[2J [bold]as is[/]"))
    monitor.close()
    monitor.close()
    text = stream.getvalue()
    last = text[text.rindex("quickstart") :]
    for expected in ("step 2/10", "8 min 00 s left", "carry 0.4", "87.5 %", "18.2k", "update 50%"):
        assert expected in last
    assert r"checkpoint: saved \x1b[2J [bold]as is[/]" in text


def test_markup_in_a_source_name_is_shown_and_not_obeyed() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    monitor = LiveMonitor("run", console)
    metrics = {f"verifier/source/{name}/reward_mean": 0.5 for name in ("[/]", "[red]")}
    monitor.on_step(_step(1, metrics=metrics))
    monitor.close()
    assert "([/] 0.5, [red] 0.5)" in stream.getvalue()


@pytest.mark.parametrize(("term", "kind"), [("xterm", LiveMonitor), ("dumb", PlainMonitor)])
def test_a_real_terminal_gets_the_panel_unless_it_is_a_dumb_one(
    monkeypatch: pytest.MonkeyPatch, term: str, kind: type[Monitor]
) -> None:
    monkeypatch.setenv("TERM", term)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    controller, terminal = os.openpty()
    with os.fdopen(controller, "rb", buffering=0), os.fdopen(terminal, "w") as stream:
        monitor = console_monitor("run", stream)
        monitor.on_event(RunEvent(kind="start", step=0, message="hello"))
        monitor.close()
    assert isinstance(monitor, kind)
