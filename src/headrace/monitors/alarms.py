"""Alarms: signs that rewards are earned in another way than was meant.

    canary      a task that cannot be solved was passed
    drift       the training reward rose over a window of evaluations while held-out quality fell
    label       most of what passed in a step carries one suspicious label

Owns when an alarm sounds: a state that lasts sounds once, and again only after it was over. Sees
records and changes nothing; whether a run stops for an alarm is the controller's part. What it
remembers comes out of the run directory again (`Alarms.recall`), so a resumed run does not begin to
watch anew.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.config import AlarmConfig, DriftConfig
from headrace.monitors.formatting import clipped, number, percent
from headrace.monitors.run_directory import ALARM, RunHistory
from headrace.types import EvaluationRecord, Outcome, RolloutGroup, RunEvent, StepRecord, Verdict

Metrics: TypeAlias = Mapping[str, float]

MIN_PASSED = 8
"""A share of fewer rollouts says nothing."""
_EXCERPT = 400
_TRAINING_REWARD = "verifier/reward/raw_mean"


class Alarms:
    """Watches one run."""

    def __init__(self, config: AlarmConfig) -> None:
        self.stops = config.on_alarm == "stop"
        """Whether an alarm ends the run."""
        self._config = config
        self._drift = None if config.drift is None else _Drift(config.drift)
        self._sounding: set[str] = set()
        """Labels that an alarm sounded for and that are still too many."""

    def recall(self, run: RunHistory) -> None:
        """Take in what was recorded before a resume; sounds nothing."""
        if self._drift is None:
            return
        lines = sorted((*run.steps, *run.evaluations), key=lambda line: line.time)
        for line in lines:
            if _TRAINING_REWARD in line.metrics:
                self._drift.add_reward(line.metrics[_TRAINING_REWARD])
            else:
                self._drift.add_evaluation(line.metrics)

    def after_step(self, record: StepRecord) -> tuple[RunEvent, ...]:
        """Return the alarms that a step sounds."""
        if self._drift is not None and _TRAINING_REWARD in record.metrics:
            self._drift.add_reward(record.metrics[_TRAINING_REWARD])
        return tuple(self._label_alarms(record))

    def after_evaluation(
        self, record: EvaluationRecord, canaries: Sequence[RolloutGroup]
    ) -> tuple[RunEvent, ...]:
        """Return the alarms that an evaluation sounds. ``canaries`` are scored."""
        found = [*_canary_alarms(record.step, canaries)]
        drift = None if self._drift is None else self._drift.add_evaluation(record.metrics)
        if drift is not None:
            found.append(_alarm("drift", record.step, drift, {}))
        return tuple(found)

    def _label_alarms(self, record: StepRecord) -> Iterator[RunEvent]:
        limit = self._config.max_label_share
        passed = [verdict for verdict in _verdicts(record.groups) if _passed(verdict)]
        if limit is None or len(passed) < MIN_PASSED:
            return
        counts = Counter(label for verdict in passed for label in verdict.labels)
        for label in sorted({*counts, *self._sounding}):
            share = counts[label] / len(passed)
            if share > limit and label not in self._sounding:
                self._sounding.add(label)
                message = (
                    f"{percent(share)} of the rollouts that passed carry the label {label} "
                    f"(alarms.max_label_share = {limit:g}); read some: headrace inspect"
                )
                yield _alarm("label", record.step, message, {"label": label, "share": share})
            elif share < limit / 2:
                # Well below, so that a share around the limit does not sound at every step.
                self._sounding.discard(label)


@dataclass(frozen=True, slots=True)
class _Point:
    """An evaluation and what was trained before it."""

    quality: float
    reward: float


class _Drift:
    """Rewards and held-out quality over the last evaluations."""

    def __init__(self, config: DriftConfig) -> None:
        self._config = config
        self._points: deque[_Point] = deque(maxlen=config.window)
        self._rewards: list[float] = []
        """Of the steps since the last evaluation."""
        self._is_sounding = False

    def add_reward(self, reward: float) -> None:
        """Note the mean reward of a step."""
        self._rewards.append(reward)

    def add_evaluation(self, metrics: Metrics) -> str | None:
        """Note an evaluation; return what an alarm says, if one sounds."""
        quality = self._quality(metrics)
        if quality is None or not self._rewards:
            return None
        reward = sum(self._rewards) / len(self._rewards)
        self._rewards.clear()
        self._points.append(_Point(quality, reward))
        fall = -_trend([point.quality for point in self._points])
        rise = _trend([point.reward for point in self._points])
        is_full = len(self._points) == self._config.window
        drifts = is_full and fall >= self._config.fall and rise >= self._config.rise
        sounds, self._is_sounding = drifts and not self._is_sounding, drifts
        if not sounds:
            return None
        return (
            f"over {self._config.window} evaluations the training reward rose by {number(rise)} "
            f"and held-out {self._config.component or 'pass@1'} fell by {number(fall)} "
            "([alarms.drift]): what is paid is not what is wanted"
        )

    def _quality(self, metrics: Metrics) -> float | None:
        stat = "pass_at_1"
        if self._config.component is not None:
            stat = f"component/{self._config.component}/mean"
        both = (metrics.get(f"eval/{mode}/{stat}") for mode in ("greedy", "sampled"))
        return next((value for value in both if value is not None), None)


def canary_metrics(canaries: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return how many rollouts of tasks that cannot be solved were scored, and passed."""
    verdicts = _verdicts(canaries)
    return {
        "eval/canary/num_scored": float(sum(verdict.reward is not None for verdict in verdicts)),
        "eval/canary/num_passed": float(sum(map(_passed, verdicts))),
    }


def _canary_alarms(step: int, canaries: Sequence[RolloutGroup]) -> Iterator[RunEvent]:
    """Yield one alarm for all canaries that passed, with the first of them."""
    passed = [
        (group, rollout, verdict)
        for group in canaries
        for rollout, verdict in zip(group.rollouts, group.verdicts or (), strict=True)
        if _passed(verdict)
    ]
    if passed:
        group, rollout, verdict = passed[0]
        message = (
            f"{len(passed)} rollouts passed a task that cannot be solved, the first of them "
            f"canary {group.prompt.prompt_id}: the verifier can be cheated ({verdict.detail})"
        )
        fields = {
            "prompt_id": group.prompt.prompt_id,
            "completion": clipped(rollout.text, _EXCERPT),
            "labels": list(verdict.labels),
        }
        yield _alarm("canary", step, message, fields)


def _alarm(name: str, step: int, message: str, fields: Mapping[str, object]) -> RunEvent:
    return RunEvent(kind=ALARM, step=step, message=message, fields={"alarm": name, **fields})


def _verdicts(groups: Sequence[RolloutGroup]) -> list[Verdict]:
    return [verdict for group in groups for verdict in group.verdicts or ()]


def _passed(verdict: Verdict) -> bool:
    return verdict.outcome is Outcome.PASS


def _trend(values: Sequence[float]) -> float:
    """Return by how much the least-squares line through ``values`` rises from first to last."""
    count = len(values)
    middle = (count - 1) / 2
    spread = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * value for place, value in enumerate(values)) / (spread or 1.0)
    return slope * (count - 1)
