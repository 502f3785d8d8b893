"""Progress on standard error: a live panel on a terminal, plain lines anywhere else.

Owns what a person sees while a run goes on, and only that: nothing here is recorded. Text from
models and data is stripped of control characters first. Away from a terminal no control code is
ever written, whatever the environment says about colours.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.monitors.formatting import duration, number, percent, printable
from headrace.roles import Monitor
from headrace.types import EvaluationRecord, RunEvent, StepRecord

_PLAIN_INTERVAL_SECONDS = 2.0
_RATE_WINDOW = 20
_SOURCE_PREFIX = "verifier/source/"
_SOURCE_SUFFIX = "/reward_mean"
_PHASES = ("generate", "score", "update")


def console_monitor(name: str, stream: TextIO | None = None) -> Monitor:
    """Return the monitor that fits ``stream`` (standard error): live on a terminal, else plain."""
    stream = stream or sys.stderr
    console = Console(file=stream)
    if stream.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return LiveMonitor(name, console)
    return PlainMonitor(stream)


@dataclass(slots=True)
class _Progress:
    """What the monitors remember between records. Bounded: times of the last few steps."""

    clock: Callable[[], float]
    record: StepRecord | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    finished: deque[float] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW + 1))

    def step(self, record: StepRecord) -> None:
        self.record = record
        self.finished.append(self.clock())

    def evaluation(self, record: EvaluationRecord) -> dict[str, float]:
        self.held_out = headline_scores(record.metrics)
        return self.held_out

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the last steps, their evaluations included; None before two steps."""
        if self.record is None or len(self.finished) < 2:  # noqa: PLR2004 - a pace needs two ends
            return None
        pace = (self.finished[-1] - self.finished[0]) / (len(self.finished) - 1)
        return pace * (self.record.num_steps - self.record.step)


def headline_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the held-out pass@k over all sources, as ``greedy pass@1`` -> share."""
    scores = {}
    for name, value in metrics.items():
        match name.split("/"):
            case ["eval", mode, stat] if stat.startswith("pass_at_"):
                scores[f"{mode} {stat.replace('pass_at_', 'pass@')}"] = value
            case _:
                continue
    return scores


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return phase -> share of the step that generate, score and update took."""
    seconds = {name: metrics.get(f"controller/time/{name}_seconds", 0.0) for name in _PHASES}
    whole = metrics.get("controller/time/step_seconds", 0.0) or sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()} if whole > 0 else {}


class PlainMonitor:
    """One line for a step, at most one in two seconds; evaluations and events always."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._progress = _Progress(clock=clock)
        self._printed = float("-inf")

    def on_step(self, record: StepRecord) -> None:
        """Print the step, unless the last line is too fresh; the last step is always printed."""
        self._progress.step(record)
        now = self._progress.finished[-1]
        last = record.step >= record.num_steps
        if last or now - self._printed >= _PLAIN_INTERVAL_SECONDS:
            self._printed = now
            self._line(_step_line(self._progress, record))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Print the held-out scores."""
        self._line(_evaluation_line(record, self._progress.evaluation(record)))

    def on_event(self, event: RunEvent) -> None:
        """Print the event."""
        self._line(_event_line(event))

    def close(self) -> None:
        """Leave the stream open: it belongs to the process."""

    def _line(self, text: str) -> None:
        self._stream.write(printable(text) + "\n")
        self._stream.flush()


class LiveMonitor:
    """A panel that stays at the bottom of a terminal; evaluations and events scroll above it."""

    def __init__(
        self, name: str, console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._progress = _Progress(clock=clock)
        self._started = clock()
        self._console = console
        # Standard output belongs to the command's own result (--json), so it is not redirected.
        self._live = Live(
            console=console,
            get_renderable=self._panel,
            refresh_per_second=2,
            redirect_stdout=False,
        )
        self._live.start()

    def on_step(self, record: StepRecord) -> None:
        """Show the step."""
        self._progress.step(record)
        self._live.refresh()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Print the held-out scores above the panel."""
        self._print(_evaluation_line(record, self._progress.evaluation(record)))

    def on_event(self, event: RunEvent) -> None:
        """Print the event above the panel."""
        self._print(_event_line(event))

    def close(self) -> None:
        """Leave the last panel standing and give the terminal back. Idempotent."""
        self._live.stop()

    def _print(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def _panel(self) -> RenderableType:
        """Drawn from the refresh thread too: reads one record, which never changes."""
        elapsed = duration(self._progress.clock() - self._started)
        record = self._progress.record
        if record is None:
            body: RenderableType = Text("waiting for the first step", style="dim")
        else:
            body = Group(
                _bar(record, self._progress.seconds_left), _figures(self._progress, record)
            )
        return Panel(body, title=self._name, subtitle=elapsed, title_align="left", padding=(0, 1))


def _bar(record: StepRecord, seconds_left: float | None) -> RenderableType:
    left = "" if seconds_left is None else f"{duration(seconds_left)} left"
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=record.num_steps, completed=record.step)
    grid.add_row(f"step [bold]{record.step}[/]/{record.num_steps}", bar, left)
    return grid


def _figures(progress: _Progress, record: StepRecord) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _facts(progress, record).items():
        grid.add_row(label, Text(printable(text)))
    return grid


def _facts(progress: _Progress, record: StepRecord) -> dict[str, str]:
    """Return label -> text of everything there is to say about the last step."""
    facts = {
        "reward": _reward_text(record.metrics),
        "held out": "  ".join(f"{name} {percent(x)}" for name, x in progress.held_out.items()),
        "entropy": _optional(record.metrics, "learner/entropy/mean"),
        "tokens/s": _optional(record.metrics, "generator/throughput/tokens_per_second"),
        "time": "  ".join(f"{k} {x:.0%}" for k, x in time_shares(record.metrics).items()),
    }
    return {label: text for label, text in facts.items() if text}


def _reward_text(metrics: Mapping[str, float]) -> str:
    mean = _optional(metrics, "verifier/reward/raw_mean")
    sources = [
        f"{name.removeprefix(_SOURCE_PREFIX).removesuffix(_SOURCE_SUFFIX)} {number(value)}"
        for name, value in metrics.items()
        if name.startswith(_SOURCE_PREFIX) and name.endswith(_SOURCE_SUFFIX)
    ]
    return f"{mean} ({', '.join(sources)})" if len(sources) > 1 else mean


def _optional(metrics: Mapping[str, float], name: str) -> str:
    return number(metrics[name]) if name in metrics else ""


def _step_line(progress: _Progress, record: StepRecord) -> str:
    facts = "  ".join(f"{label} {text}" for label, text in _facts(progress, record).items())
    left = progress.seconds_left
    ending = "" if left is None else f"  {duration(left)} left"
    return f"step {record.step}/{record.num_steps}  {facts}{ending}"


def _evaluation_line(record: EvaluationRecord, scores: Mapping[str, float]) -> str:
    parts = [f"{name} {percent(value)}" for name, value in scores.items()]
    if (num_scored := record.metrics.get("eval/canary/num_scored")) is not None:
        num_passed = record.metrics.get("eval/canary/num_passed", 0.0)
        parts.append(f"canaries passed {num_passed:.0f} of {num_scored:.0f}")
    return f"held out after step {record.step}: {'  '.join(parts) or 'no prompt was scored'}"


def _event_line(event: RunEvent) -> str:
    return f"{event.kind}: {event.message}"
