"""The figures of a run in a few numbers: what ``headrace report --json`` prints.

``rl_seconds`` is the sum of ``controller/time/step_seconds``: generate, score, update and publish,
held-out evaluation excluded. A resumed run counts each step once, as it was last done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.monitors.run_directory import ALARM, EventLine, MetricsLine, RunHistory, read_run

# Fewer is better: truncation and length cost time and pay nothing.
_LOWER_IS_BETTER = ("length_share", "completion_tokens_mean")


def summarise(run_directory: Path) -> dict[str, Any]:
    """Return ``held_out``, ``rl_seconds``, ``num_steps``, ``rollouts_per_second`` and ``alarms``.

    ``held_out`` maps a metric to its first, last and best. ``rollouts_per_second`` is every
    rollout over ``rl_seconds``, 0.0 before the first step. Raises RunDirectoryError when the
    directory holds no run.
    """
    return summary_of(read_run(run_directory))


def summary_of(run: RunHistory) -> dict[str, Any]:
    """Return the same for a history that was read already."""
    rl_seconds = _total(run.steps, "controller/time/step_seconds")
    num_rollouts = _total(run.steps, "verifier/rollouts/num_scored")
    num_rollouts += _total(run.steps, "verifier/rollouts/num_failed")
    return {
        "held_out": held_out(run.evaluations),
        "rl_seconds": rl_seconds,
        "num_steps": len(run.steps),
        "rollouts_per_second": num_rollouts / rl_seconds if rl_seconds > 0 else 0.0,
        "alarms": [
            {"step": event.step, "message": event.message, **event.fields}
            for event in alarms_of(run)
        ],
    }


def alarms_of(run: RunHistory) -> tuple[EventLine, ...]:
    """Return the alarms that sounded, in order of time."""
    return tuple(event for event in run.events if event.kind == ALARM)


def held_out(evaluations: Sequence[MetricsLine]) -> dict[str, dict[str, float]]:
    """Return first, last and best of every held-out metric that is not a count.

    The best is the highest, or the lowest for lengths and truncation.
    """
    names = sorted({name for line in evaluations for name in line.metrics if _is_score(name)})
    figures = {}
    for name in names:
        values = [line.metrics[name] for line in evaluations if name in line.metrics]
        best = min(values) if name.endswith(_LOWER_IS_BETTER) else max(values)
        figures[name] = {"first": values[0], "last": values[-1], "best": best}
    return figures


def _is_score(name: str) -> bool:
    return name.startswith("eval/") and not name.rsplit("/", 1)[-1].startswith("num_")


def _total(lines: Sequence[MetricsLine], name: str) -> float:
    return sum((line.metrics.get(name, 0.0) for line in lines), 0.0)
