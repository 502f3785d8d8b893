"""``report.html``: a whole run on one page that needs no network and no server.

Owns the page's safety: everything a model or a data set wrote is hostile. The template engine
escapes it in HTML, the inlined JSON has no ``<`` in it, and the content security policy lets
nothing run but the two scripts of this package, named by their hashes. Charts are chosen in
`charts`, rollouts in `samples`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from headrace import __version__
from headrace.errors import RunDirectoryError
from headrace.monitors.formatting import duration, encodable, number, percent
from headrace.monitors.report.charts import Chart, charts_of, source_names
from headrace.monitors.report.samples import comparisons_of
from headrace.monitors.run_directory import (
    REPORT_FILE,
    EventLine,
    MetricsLine,
    RunHistory,
    read_run,
    replace_file,
)
from headrace.monitors.summary import alarms_of, summary_of

MAX_EVENTS = 500
"""Lines of the event table at most: the first and the last, with a note between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One headline figure."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One prompt source of the table; texts are ready to show, empty where nothing was measured."""

    name: str
    reward_first: str
    reward_last: str
    held_out_first: str
    held_out_last: str
    held_out_best: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One line of the event table."""

    elapsed: str
    step: int
    kind: str
    message: str


def write_report(run_directory: Path) -> Path:
    """Write ``report.html`` into ``run_directory`` and return its path.

    Raises RunDirectoryError when the directory holds no run, a file of it is damaged, or the page
    cannot be written.
    """
    run = read_run(run_directory)
    path = run_directory / REPORT_FILE
    page = encodable(render_page(run)).encode("utf-8")
    try:
        replace_file(path, page)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        msg = f"{path} cannot be written: {reason}; free space, or make the directory writable"
        raise RunDirectoryError(msg) from error
    return path


def render_page(run: RunHistory) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader("headrace.monitors.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = charts_of(run)
    alarms = alarms_of(run)
    scripts = (_vendored("uPlot.iife.min.js"), _template("report.js"))
    style = _vendored("uPlot.min.css") + "\n" + _template("report.css")
    return environment.get_template("report.html").render(
        name=run.config.get("name", run.directory.name),
        facts=_facts(run),
        tiles=_tiles(run),
        charts=charts,
        chart_data=_inline_json([dataclasses.asdict(chart) for chart in charts]),
        summaries=[_spoken(chart) for chart in charts],
        sources=_source_rows(run),
        comparisons=tuple(comparisons_of(run.directory)),
        alarms=_event_rows(run, alarms),
        num_alarms=len(alarms),
        events=_event_rows(run, run.events),
        num_events=len(run.events),
        sampling=run.evaluations[-1].sampling if run.evaluations else {},
        config=json.dumps(run.config, indent=2, ensure_ascii=False),
        version=__version__,
        style=style,
        scripts=scripts,
        policy=_policy(scripts, style),
    )


def _facts(run: RunHistory) -> dict[str, str]:
    """Return label -> text of the lines under the title."""
    model = run.config.get("model", {})
    facts = {"Model": str(model.get("path", "")) if isinstance(model, dict) else str(model)}
    if run.times:
        start = datetime.fromtimestamp(min(run.times), tz=UTC)
        facts["Started"] = f"{start:%Y-%m-%d %H:%M} UTC"
        facts["Elapsed"] = duration(max(run.times) - min(run.times))
    planned = run.config.get("num_steps")
    facts["Steps"] = f"{len(run.steps)} of {planned}" if planned else str(len(run.steps))
    facts["Seed"] = str(run.config.get("seed", ""))
    versions = [event.fields["versions"] for event in run.events if "versions" in event.fields]
    if versions and isinstance(versions[-1], dict):
        facts["Versions"] = ", ".join(f"{name} {text}" for name, text in versions[-1].items())
    return {label: text for label, text in facts.items() if text}


def _tiles(run: RunHistory) -> list[Tile]:
    summary = summary_of(run)
    tiles = [_held_out_tile(name, run) for name in _headlines(summary["held_out"])]
    rewards = _values(run.steps, "verifier/reward/raw_mean")
    if rewards:
        text = " → ".join(number(reward) for reward in (*rewards[:1], *rewards[1:][-1:]))
        tiles.append(
            Tile(
                label="Training reward", value=text, detail="mean of the first and of the last step"
            )
        )
    if run.steps:
        spent = duration(summary["rl_seconds"])
        tiles.append(Tile(label="RL time", value=spent, detail="held-out evaluation excluded"))
        pace = number(summary["rollouts_per_second"])
        tiles.append(Tile(label="Rollouts per second", value=pace, detail="over the whole RL time"))
    return tiles


def _headlines(held_out: dict[str, Any]) -> list[str]:
    """Return the greedy and the two outermost sampled scores, as far as they were measured."""
    greedy = [name for name in held_out if name == "eval/greedy/pass_at_1"]
    prefix = "eval/sampled/pass_at_"
    ks = sorted(int(name.removeprefix(prefix)) for name in held_out if name.startswith(prefix))
    return greedy + [f"{prefix}{k}" for k in dict.fromkeys((*ks[:1], *ks[-1:]))]


def _held_out_tile(name: str, run: RunHistory) -> Tile:
    lines = [line for line in run.evaluations if name in line.metrics]
    best = max(lines, key=lambda line: line.metrics[name])
    mode, stat = name.split("/")[1:]
    return Tile(
        label=f"{mode.capitalize()} {stat.replace('pass_at_', 'pass@')}",
        value=f"{100 * lines[0].metrics[name]:.1f} → {percent(lines[-1].metrics[name])}",
        detail=f"held out; best {percent(best.metrics[name])} after step {best.step}",
    )


def _source_rows(run: RunHistory) -> list[SourceRow]:
    rows = []
    for source in source_names(run):
        rewards = _values(run.steps, f"verifier/source/{source}/reward_mean")
        scores = _values(run.evaluations, f"eval/greedy/source/{source}/pass_at_1")
        scores = scores or _values(run.evaluations, f"eval/sampled/source/{source}/pass_at_1")
        rows.append(
            SourceRow(
                name=source,
                reward_first=number(rewards[0]) if rewards else "",
                reward_last=number(rewards[-1]) if rewards else "",
                held_out_first=percent(scores[0]) if scores else "",
                held_out_last=percent(scores[-1]) if scores else "",
                held_out_best=percent(max(scores)) if scores else "",
            )
        )
    return rows


def _event_rows(run: RunHistory, events: Sequence[EventLine]) -> list[EventRow]:
    start = min(run.times, default=0.0)
    half = MAX_EVENTS // 2
    shown = list(events)
    if len(shown) > MAX_EVENTS:
        shown = shown[:half] + shown[-half:]
    return [
        EventRow(
            elapsed=duration(max(0.0, event.time - start)),
            step=event.step,
            kind=event.kind,
            message=event.message,
        )
        for event in shown
    ]


def _spoken(chart: Chart) -> str:
    """Return a chart in words, for those who do not see it."""
    parts = [f"{chart.title}, steps {chart.steps[0]} to {chart.steps[-1]}."]
    for curve in chart.curves:
        values = [value for value in curve.values if value is not None]
        parts.append(
            f"{curve.label}: first {number(values[0])}, last {number(values[-1])}, "
            f"lowest {number(min(values))}, highest {number(max(values))}."
        )
    return " ".join(parts)


def _values(lines: Sequence[MetricsLine], name: str) -> list[float]:
    return [line.metrics[name] for line in lines if name in line.metrics]


def _inline_json(value: object) -> str:
    """Return JSON that stays inside a script element: it has no ``<``, ``>`` or ``&``."""
    # Not ASCII only: an escaped lone surrogate would live on in the browser and can crash it.
    text = encodable(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str], style: str) -> str:
    """Return the content security policy under which only this package's own code runs."""
    allowed = " ".join(_source_hash(script) for script in scripts)
    return f"default-src 'none'; script-src {allowed}; style-src {_source_hash(style)}"


def _source_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _vendored(name: str) -> str:
    return _package_file("vendor", name)


def _template(name: str) -> str:
    return _package_file("templates", name)


def _package_file(folder: str, name: str) -> str:
    path = resources.files("headrace.monitors.report") / folder / name
    return path.read_text(encoding="utf-8")
