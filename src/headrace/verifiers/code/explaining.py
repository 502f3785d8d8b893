"""How a score of `code` came about, for a person who asks."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.verifiers.code.component import CodeReport

_COLUMNS = ("test", "shown", "outcome", "cpu ms", "what happened")


def explain(report: CodeReport) -> tuple[str, ...]:
    """Return the program that was run and a table of its tests, one line each."""
    lines = [f"reward {report.score.reward}: {report.score.detail}"]
    if report.source is None:
        return tuple(lines)
    numbered = enumerate(report.source.splitlines(), start=1)
    lines += ["", "what was run:", *(f"{number:4}  {line}" for number, line in numbered), ""]
    lines += _table(report)
    not_run = report.num_tests - len(report.results)
    if not_run:
        lines.append(f"{not_run} more were not run: the reward was settled")
    return tuple(lines)


def _table(report: CodeReport) -> list[str]:
    rows: list[Sequence[str]] = [_COLUMNS]
    for result in report.results:
        shown = "yes" if result.test.visible else "no"
        cpu = f"{1000 * result.cpu_seconds:.1f}"
        rows.append((result.test.test_id, shown, result.outcome.value, cpu, result.detail))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    return ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
