import dataclasses
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RunDirectoryError
from headrace.monitors import (
    JsonlMonitor,
    RunHistory,
    read_rollouts,
    read_run,
    summarise,
    write_report,
    write_rollouts,
)
from headrace.monitors.report.charts import MAX_POINTS, charts_of
from headrace.monitors.report.samples import comparisons_of
from headrace.monitors.run_directory import MetricsLine
from headrace.types import RunEvent

HOSTILE = (
    "</script x><script>document.documentElement.dataset.owned=1</script>"
    '<img src=x onerror="document.documentElement.dataset.owned=1"></pre>{{ 7*7 }}<!--\u2028\ud800'
)


class Elements(HTMLParser):
    """Every start tag of the page and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.scripts, self._script = [], [], False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._script = self._script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._script:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def _chart_data(page: str) -> list[dict[str, Any]]:
    texts = [text for attrs, text in Elements(page).scripts if attrs.get("id") == "chart-data"]
    return json.loads(texts[0])


def _curves(page: str) -> dict[tuple[str, str], list[float | None]]:
    return {
        (chart["title"], curve["label"]): curve["values"]
        for chart in _chart_data(page)
        for curve in chart["curves"]
    }


def test_the_report_draws_what_was_recorded(run_directory: Path) -> None:
    path = write_report(run_directory)
    assert path == run_directory / "report.html"
    page = path.read_text()
    run = read_run(run_directory)
    curves = _curves(page)
    assert curves["Training reward", "raw"] == [
        line.metrics["verifier/reward/raw_mean"] for line in run.steps
    ]
    assert curves["Held-out accuracy", "sampled pass@4"] == [
        line.metrics["eval/sampled/pass_at_4"] for line in run.evaluations
    ]
    titles = {title for title, _ in curves}
    assert titles >= {
        "Entropy",
        "KL divergence",
        "Completion length",
        "Truncated rollouts",
        "Gradient norm",
        "Learning rate",
        "Groups",
        "Time of a step",
        "Throughput",
        "Training reward by source",
    }


def test_the_report_shows_name_versions_sources_and_config(run_directory: Path) -> None:
    page = html.unescape(write_report(run_directory).read_text())
    for expected in (
        "<h1>quickstart</h1>",
        "headrace 0.1.0, torch 2.13.0",
        "20 of 20",
        "The same held-out prompts, before and after",
        "Training rollouts of the first and the last step",
        '<th scope="row">carry</th>',
        '"path": "nano"',
        "got 10, expected 10",
    ):
        assert expected in page


def test_alarms_stand_before_the_curves_and_in_the_summary(run_directory: Path) -> None:
    assert 'id="alarms"' not in write_report(run_directory).read_text()
    assert summarise(run_directory)["alarms"] == []
    monitor = JsonlMonitor(run_directory)
    fields = {"alarm": "canary", "prompt_id": "p9", "completion": "<script>x</script>"}
    message = "3 rollouts passed <b>a task</b> that cannot be solved"
    monitor.on_event(RunEvent(kind="alarm", step=20, message=message, fields=fields))
    monitor.close()
    page = write_report(run_directory).read_text()
    assert page.index('id="alarms"') < page.index('id="curves"')
    assert html.escape(message) in page
    assert message not in page
    (alarm,) = summarise(run_directory)["alarms"]
    assert (alarm["step"], alarm["alarm"], alarm["prompt_id"]) == (20, "canary", "p9")


def test_labels_and_waits_are_drawn_where_there_are_any(run_directory: Path) -> None:
    curves = _curves(write_report(run_directory).read_text())
    assert "Suspicious completions" not in {title for title, _ in curves}
    lines = (run_directory / "metrics.jsonl").read_text().splitlines()
    last = json.loads(
        next(line for line in lines if '"step": 20' in line and '"kind": "step"' in line)
    )
    last["metrics"] |= {
        "verifier/label/exits_early/num_rollouts": 7,
        "verifier/kind/judge/latency/p99_seconds": 1.5,
    }
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last) + "\n")
    curves = _curves(write_report(run_directory).read_text())
    assert curves["Suspicious completions", "exits early"][-1] == 7
    assert curves["Time of a verification", "judge"][-1] == 1.5


def test_the_page_needs_nothing_from_outside(run_directory: Path) -> None:
    page = write_report(run_directory).read_text()
    for tag, attributes in Elements(page).tags:
        assert tag not in {"link", "iframe", "img", "object", "base"}
        assert not attributes.keys() & {"src", "href", "srcset", "action"}
    assert "@import" not in page
    assert "url(" not in page


def _hostile_run(build_run: Callable[..., Path]) -> Path:
    config = {"name": HOSTILE, "model": {"path": HOSTILE}, "note": HOSTILE}
    directory = build_run(num_steps=2, evaluate_every=1, text=HOSTILE, config=config)
    line = {
        "kind": "step",
        "step": 3,
        "time": 0,
        "policy_version": 3,
        "metrics": {
            f"verifier/source/{HOSTILE}/reward_mean": 0.5,
            "verifier/source/b/reward_mean": 1,
        },
    }
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return directory


def test_hostile_text_cannot_break_out_of_the_page(build_run: Callable[..., Path]) -> None:
    page = write_report(_hostile_run(build_run)).read_text()
    elements = Elements(page)
    assert len(elements.scripts) == 3
    assert all("owned" not in text for attrs, text in elements.scripts if not attrs)
    assert "img" not in {tag for tag, _ in elements.tags}
    assert not any("onerror" in attributes for _, attributes in elements.tags)
    # Not left to the parser: a browser ends a script element in more ways than it knows.
    assert "<" not in page.split('id="chart-data">')[1].split("</script>")[0]
    assert HOSTILE.replace("\ud800", "?") in {label for _, label in _curves(page)}
    assert html.escape(HOSTILE[:60], quote=True).replace("&quot;", "&#34;") in page
    assert "{{ 7*7 }}" in page


def test_the_policy_of_the_page_names_its_own_scripts_and_no_others(run_directory: Path) -> None:
    page = write_report(run_directory).read_text()
    policy = next(
        attributes["content"]
        for tag, attributes in Elements(page).tags
        if "http-equiv" in attributes
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 3


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("evaluate_every", [None, 1])
def test_a_run_of_no_or_one_step_has_a_page(
    build_run: Callable[..., Path], num_steps: int, evaluate_every: int | None
) -> None:
    directory = build_run(num_steps=num_steps, evaluate_every=evaluate_every)
    page = write_report(directory).read_text()
    assert "nan" not in json.dumps(_chart_data(page)).lower()
    if num_steps == 0 and evaluate_every is None:
        assert "No step has been recorded yet." in page


def test_a_run_without_rollout_files_has_a_page(run_directory: Path) -> None:
    shutil.rmtree(run_directory / "rollouts")
    assert '<h2 id="rollouts">' not in write_report(run_directory).read_text()


def test_a_metric_that_was_not_finite_is_a_gap(run_directory: Path) -> None:
    path = run_directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == 5:
            line["metrics"]["learner/entropy/mean"] = None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = _curves(write_report(run_directory).read_text())["Entropy", "entropy"]
    assert values[4] is None
    assert None not in values[5:]


def _long(run: RunHistory, num_steps: int) -> RunHistory:
    def line(step: int) -> MetricsLine:
        metrics = {
            "learner/entropy/mean": float(step),
            "generator/completion_tokens/max": 100.0 if step == 777 else 1.0,
        }
        return MetricsLine(step=step, time=0.0, policy_version=0, metrics=metrics, sampling={})

    return dataclasses.replace(run, steps=tuple(line(k) for k in range(1, num_steps + 1)))


def test_five_thousand_steps_are_thinned_by_means_and_the_largest_value_survives(
    run_directory: Path,
) -> None:
    charts = {chart.title: chart for chart in charts_of(_long(read_run(run_directory), 5000))}
    entropy, length = charts["Entropy"], charts["Completion length"]
    assert len(entropy.steps) <= MAX_POINTS
    assert entropy.steps[-1] == 5000
    assert entropy.steps_per_point == 9
    assert entropy.curves[0].values[0] == pytest.approx(5.0)
    assert max(value for value in length.curves[0].values if value is not None) == 100.0


def test_a_chart_of_what_never_happened_is_left_out(run_directory: Path) -> None:
    titles = [chart.title for chart in charts_of(read_run(run_directory))]
    assert "Staleness" not in titles
    assert "Failed verifications" not in titles


def test_the_same_held_out_prompt_is_shown_before_and_after(run_directory: Path) -> None:
    held_out = next(iter(comparisons_of(run_directory)))
    assert held_out.before == "after step 0"
    assert held_out.after == "after step 20"
    assert len(held_out.pairs) == 6
    assert all(left.prompt_id == right.prompt_id for left, right in held_out.pairs)
    assert (held_out.pairs[0][0].passed, held_out.pairs[0][1].passed) == (False, True)


def test_the_held_out_comparison_shows_the_greedy_rollout(run_directory: Path) -> None:
    held_out = next(iter(comparisons_of(run_directory)))
    groups = read_rollouts(run_directory / "rollouts" / "eval-000000.parquet")
    greedy = {
        group.prompt.prompt_id: group.rewards[0] == 1.0
        for group in groups
        if group.sampling.temperature == 0.0
    }
    assert [left.passed for left, _ in held_out.pairs] == [
        greedy[left.prompt_id] for left, _ in held_out.pairs
    ]


def test_what_a_rollout_looks_like_it_tries_stands_beside_it(run_directory: Path) -> None:
    path = next(iter((run_directory / "rollouts").glob("eval-*.parquet")))
    assert 'badge-fail">exits_early' not in write_report(run_directory).read_text()
    noted = [
        group.scored(
            [dataclasses.replace(v, labels=("exits_early",)) for v in group.verdicts or ()]
        )
        for group in read_rollouts(path)
    ]
    write_rollouts(path, noted)
    assert 'badge-fail">exits_early' in write_report(run_directory).read_text()


def test_a_very_long_completion_is_clipped(build_run: Callable[..., Path]) -> None:
    directory = build_run(num_steps=1, evaluate_every=None, text="x" * 200_000)
    page = write_report(directory).read_text()
    assert "[196,000 more characters]" in page


def test_a_report_that_cannot_be_written_is_an_error_that_names_the_file(
    run_directory: Path,
) -> None:
    (run_directory / "report.html").mkdir()
    with pytest.raises(RunDirectoryError, match=r"report\.html cannot be written: .*directory"):
        write_report(run_directory)


def test_a_directory_that_is_no_run_gets_no_report(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on PATH")
def test_a_real_browser_draws_every_chart_and_runs_nothing_else(
    build_run: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_report(_hostile_run(build_run))
    num_charts = len(_chart_data(path.read_text()))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert f'data-charts="{num_charts}"' in done.stdout
    assert len(re.findall("<canvas", done.stdout)) == num_charts
    assert "data-owned" not in done.stdout
    assert "CONSOLE" not in done.stderr
