"""Machines of one run may show different times: no wait and no order rests on a calendar's clock.

Deadlines and heartbeats are measured by whoever waits, on its own monotonic clock; what came first
is told by policy version, incarnation and the number of a publication.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "headrace"
CALENDAR = {
    "time": {"time", "time_ns", "localtime", "gmtime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "path": {"getmtime", "getctime"},
}
"""Functions by the module or type that has them."""
ALLOWED = {
    "cli/train.py": "names the run that was written last, of one machine's directory",
    "monitors/jsonl.py": "tells when a line was written, for people and charts",
    "monitors/report/page.py": "tells it",
    "verifiers/judge/endpoint.py": "Retry-After may be a date; the wait has a bound of its own",
}


def calendar_reads(source: str) -> list[int]:
    """Return the lines that ask a calendar's clock."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and (node.attr == "st_mtime" or node.attr in CALENDAR.get(_name(node.value), ()))
    ]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize(
    "line", ["time.time()", "datetime.now(UTC)", "path.stat().st_mtime", "os.path.getmtime(path)"]
)
def test_asking_the_calendar_is_seen(line: str) -> None:
    assert calendar_reads(f"x = 1\ny = {line}\n") == [2]
    assert not calendar_reads("x = time.monotonic() + time.perf_counter()\n")


def test_no_module_but_those_that_tell_the_time_asks_a_calendar() -> None:
    asking = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "bench" not in path.parts and calendar_reads(path.read_text(encoding="utf-8"))
    }
    assert asking <= set(ALLOWED), sorted(asking - set(ALLOWED))
