"""Which curves the report draws, and from which metrics.

Owns two rules: a chart without a single value is left out, and a long run is thinned by buckets
whose size is told, never by picking points. It knows nothing of HTML or of the plotting library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.monitors.run_directory import MetricsLine, RunHistory
from headrace.types import Outcome

MAX_POINTS = 600
"""Points of one curve at most; about two for each pixel column of a chart's half."""
MAX_SOURCES = 8
"""Curves by source at most, so that colours stay distinct; the table shows every source."""

Scale: TypeAlias = Literal["unit", "zero", "auto"]
"""``unit``: 0..1; ``zero``: from 0 to the largest value; ``auto``: whatever the values span."""
Value: TypeAlias = float | None
Values: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric over the steps of its chart."""

    label: str
    values: Values
    """One for each of the chart's steps; None where the metric was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure of the report."""

    title: str
    note: str
    """What the reader must know to read it; one sentence."""
    scale: Scale
    stacked: bool
    steps: tuple[int, ...]
    curves: tuple[Curve, ...]
    steps_per_point: int
    """1, or the size of the buckets that a long run was thinned by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A chart before the run's numbers are put in."""

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    """Label and metric of each curve."""
    scale: Scale = "zero"
    stacked: bool = False
    hides_zeros: bool = False
    """Leave out a curve that is 0 throughout: what never happened needs no picture."""


_STEP_PLANS = (
    _Plan(
        title="Entropy",
        note="Mean entropy of the policy's next-token distribution, in nats.",
        metrics=(("entropy", "learner/entropy/mean"),),
    ),
    _Plan(
        title="KL divergence",
        note="From the starting policy, and between generator and learner (k1 and k3), in nats.",
        metrics=(
            ("to the start", "learner/kl/reference"),
            ("mismatch k1", "learner/mismatch/k1"),
            ("mismatch k3", "learner/mismatch/k3"),
        ),
        scale="auto",
    ),
    _Plan(
        title="Completion length",
        note="Tokens of a rollout, the stop token included.",
        metrics=(
            ("mean", "generator/completion_tokens/mean"),
            ("longest", "generator/completion_tokens/max"),
        ),
    ),
    _Plan(
        title="Truncated rollouts",
        note="Share of rollouts that the token limit cut off.",
        metrics=(("truncated", "generator/finish/length_share"),),
    ),
    _Plan(
        title="Failed verifications",
        note="Share of rollouts whose check did not end in pass or wrong.",
        metrics=tuple(
            (outcome.replace("_", " "), f"verifier/outcome/{outcome}_share")
            for outcome in Outcome
            if outcome not in {Outcome.PASS, Outcome.WRONG}
        ),
        hides_zeros=True,
    ),
    _Plan(
        title="Importance ratio",
        note="Learner's over proximal probability of the trained tokens; 1 is on-policy.",
        metrics=(
            ("mean", "learner/importance_ratio/mean"),
            ("largest", "learner/importance_ratio/max"),
        ),
        scale="auto",
    ),
    _Plan(
        title="Importance weight",
        note="Of the trained tokens against what sampled them, as applied; 1 where learner and "
        "generator agree. Effective: sample size as a share of the tokens.",
        metrics=(
            ("mean", "learner/importance_weight/mean"),
            ("largest", "learner/importance_weight/max"),
            ("effective", "learner/importance_weight/ess"),
            ("truncated share", "learner/importance_weight/truncated_share"),
        ),
    ),
    _Plan(
        title="Clipped tokens",
        note="Share of trained tokens whose ratio the loss clipped.",
        metrics=(("clipped", "learner/clip/share"),),
    ),
    _Plan(
        title="Gradient norm",
        note="Global norm before clipping.",
        metrics=(("norm", "learner/gradient/norm"),),
    ),
    _Plan(
        title="Learning rate",
        note="Of the step's last optimizer update.",
        metrics=(("rate", "learner/optimizer/learning_rate"),),
    ),
    _Plan(
        title="Groups",
        note="A group whose rewards are all equal teaches nothing and is not trained on.",
        metrics=(
            ("trained", "learner/groups/num_trained"),
            ("without spread", "learner/groups/num_no_spread"),
            ("dropped", "verifier/groups/num_dropped"),
            ("refilled", "controller/groups/num_refilled"),
        ),
    ),
    _Plan(
        title="Staleness",
        note="Largest number of updates between sampling and training of a token.",
        metrics=(("largest", "learner/staleness/max"),),
        hides_zeros=True,
    ),
    _Plan(
        title="Time of a step",
        note="Seconds spent waiting for rollouts, for verdicts, the update and its publication.",
        metrics=(
            ("generate", "controller/time/generate_seconds"),
            ("score", "controller/time/score_seconds"),
            ("update", "controller/time/update_seconds"),
            ("publish", "controller/time/publish_wait_seconds"),
        ),
        stacked=True,
    ),
    _Plan(
        title="Throughput",
        note="Completion tokens sampled per second of generation.",
        metrics=(("tokens/s", "generator/throughput/tokens_per_second"),),
    ),
)


def charts_of(run: RunHistory) -> tuple[Chart, ...]:
    """Return every chart that has something to show, in reading order."""
    charts = (
        _drawn(_held_out_plan(run), run.evaluations),
        _drawn(_reward_plan(), run.steps),
        _drawn(_source_plan(run), run.steps),
        _drawn(_label_plan(run), run.steps),
        _drawn(_wait_plan(run), run.steps),
        *(_drawn(plan, run.steps) for plan in _STEP_PLANS),
    )
    return tuple(chart for chart in charts if chart is not None)


def _held_out_plan(run: RunHistory) -> _Plan:
    names = sorted({name for line in run.evaluations for name in line.metrics}, key=_natural)
    scores = [(name, name.split("/")) for name in names]
    return _Plan(
        title="Held-out accuracy",
        note="Share of held-out prompts solved; pass@k: by at least one of k sampled rollouts.",
        metrics=tuple(
            (f"{parts[1]} {parts[2].replace('pass_at_', 'pass@')}", name)
            for name, parts in scores
            if len(parts) == 3 and parts[2].startswith("pass_at_")  # noqa: PLR2004 - eval/MODE/STAT
        ),
        scale="unit",
    )


def _natural(name: str) -> tuple[str, int]:
    """Sort pass_at_4 before pass_at_16."""
    stem, _, last = name.rpartition("_")
    return (stem, int(last)) if last.isdigit() else (name, 0)


def _reward_plan() -> _Plan:
    return _Plan(
        title="Training reward",
        note="Raw: every scored rollout. Trained: only groups whose rewards differ.",
        metrics=(
            ("raw", "verifier/reward/raw_mean"),
            ("trained", "learner/reward/trained_mean"),
        ),
    )


def _source_plan(run: RunHistory) -> _Plan:
    names = source_names(run)
    shown = names[:MAX_SOURCES] if len(names) > 1 else ()
    more = f" The first {MAX_SOURCES} of {len(names)}." if len(names) > MAX_SOURCES else ""
    return _Plan(
        title="Training reward by source",
        note=f"Raw mean of each prompt source.{more}",
        metrics=tuple((name, f"verifier/source/{name}/reward_mean") for name in shown),
    )


def _label_plan(run: RunHistory) -> _Plan:
    return _Plan(
        title="Suspicious completions",
        note="Rollouts of a step that carry a label: what their text looks like it tries.",
        metrics=_named(run, "verifier/label/", "/num_rollouts"),
    )


def _wait_plan(run: RunHistory) -> _Plan:
    return _Plan(
        title="Time of a verification",
        note="Seconds to the answer that 99 % stay below, the wait for a place included.",
        metrics=_named(run, "verifier/kind/", "/latency/p99_seconds"),
        hides_zeros=True,
    )


def _named(run: RunHistory, before: str, after: str) -> tuple[tuple[str, str], ...]:
    """Return name and metric of everything that was recorded between ``before`` and ``after``."""
    found = {
        name
        for line in run.steps
        for name in line.metrics
        if name.startswith(before) and name.endswith(after)
    }
    return tuple(
        (name.removeprefix(before).removesuffix(after).replace("_", " "), name)
        for name in sorted(found)
    )


def source_names(run: RunHistory) -> tuple[str, ...]:
    """Return every prompt source that a training reward or a held-out score was recorded for."""
    found = set()
    for line in (*run.steps, *run.evaluations):
        for name in line.metrics:
            before, _, rest = name.partition("/source/")
            source, _, stat = rest.rpartition("/")
            if (before == "verifier" and stat == "reward_mean") or (
                before.startswith("eval/") and stat == "pass_at_1"
            ):
                found.add(source)
    return tuple(sorted(found))


def _drawn(plan: _Plan, lines: Sequence[MetricsLine]) -> Chart | None:
    curves = [
        (label, name)
        for label, name in plan.metrics
        if _present(lines, name, needs_nonzero=plan.hides_zeros)
    ]
    if not curves:
        return None
    size = -(-len(lines) // MAX_POINTS)
    scale = _widened(plan.scale, lines, [name for _, name in curves])
    return Chart(
        title=plan.title,
        note=plan.note,
        scale=scale,
        stacked=plan.stacked,
        steps=tuple(bucket[-1].step for bucket in _buckets(lines, size)),
        curves=tuple(
            Curve(label=label, values=_thinned(lines, name, size)) for label, name in curves
        ),
        steps_per_point=size,
    )


def _present(lines: Sequence[MetricsLine], name: str, *, needs_nonzero: bool) -> bool:
    values = [line.metrics[name] for line in lines if name in line.metrics]
    return any(values) if needs_nonzero else bool(values)


def _widened(scale: Scale, lines: Sequence[MetricsLine], names: Sequence[str]) -> Scale:
    """A scale from 0 cannot show a value below it."""
    values = (line.metrics.get(name, 0.0) for line in lines for name in names)
    return "auto" if scale == "zero" and any(value < 0 for value in values) else scale


def _thinned(lines: Sequence[MetricsLine], name: str, size: int) -> Values:
    """Return the mean of each bucket of ``size`` lines; the largest value for a ``max``."""
    reduce = max if name.endswith("/max") else _mean
    return tuple(_reduced(bucket, name, reduce) for bucket in _buckets(lines, size))


def _buckets(lines: Sequence[MetricsLine], size: int) -> Iterator[Sequence[MetricsLine]]:
    for start in range(0, len(lines), size):
        yield lines[start : start + size]


def _reduced(
    bucket: Sequence[MetricsLine], name: str, reduce: Callable[[Sequence[float]], float]
) -> Value:
    values = [line.metrics[name] for line in bucket if name in line.metrics]
    return reduce(values) if values else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
