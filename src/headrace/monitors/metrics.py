"""Aggregation of metrics by sums and counts, and the metrics of a batch of scored groups.

Owns the rule that a mean is divided exactly once, at the very end: any split of the same numbers
into micro-batches, ranks or calls gives the same metric. A mean over nothing is absent, never NaN.
Rewards are those the verifier gave, before any group is filtered. Torch-free; times are the
controller's own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.types import Outcome, RolloutGroup, Verdict

EvaluationMode: TypeAlias = Literal["greedy", "sampled"]
"""``greedy``: one rollout a prompt at temperature 0; ``sampled``: several, as recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A weighted sum on its way to becoming a mean."""

    total: float
    """Sum of value times weight."""
    weight: float
    """Sum of the weights; tokens, rollouts or prompts."""

    def merged(self, other: Mean) -> Mean:
        """Return the mean over both parts."""
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    @property
    def value(self) -> float | None:
        """The mean; None when nothing was weighed."""
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A plain sum or count."""

    value: float

    def merged(self, other: Total) -> Total:
        """Return the sum over both parts."""
        return Total(value=self.value + other.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maximum:
    """The largest value seen."""

    value: float

    def merged(self, other: Maximum) -> Maximum:
        """Return the larger of both."""
        return Maximum(value=max(self.value, other.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The smallest value seen."""

    value: float

    def merged(self, other: Minimum) -> Minimum:
        """Return the smaller of both."""
        return Minimum(value=min(self.value, other.value))


Aggregate: TypeAlias = Mean | Total | Maximum | Minimum


class Metrics:
    """Collects metrics by name; parts from anywhere may be merged in any order."""

    def __init__(self) -> None:
        self._aggregates: dict[str, Aggregate] = {}

    def add_mean(self, name: str, total: float, weight: float) -> None:
        """Add ``weight`` items whose values sum to ``total`` (a sum, not a mean)."""
        self._add(name, Mean(total=total, weight=weight))

    def add_sum(self, name: str, value: float) -> None:
        """Add ``value`` to a sum or count."""
        self._add(name, Total(value=value))

    def add_max(self, name: str, value: float) -> None:
        """Keep the larger of ``value`` and what was there."""
        self._add(name, Maximum(value=value))

    def add_min(self, name: str, value: float) -> None:
        """Keep the smaller of ``value`` and what was there."""
        self._add(name, Minimum(value=value))

    def merge(self, other: Metrics) -> None:
        """Add everything ``other`` collected."""
        for name, aggregate in other._aggregates.items():
            self._add(name, aggregate)

    def compute(self) -> dict[str, float]:
        """Return every metric that has a value, sorted by name; the only division is here."""
        values = ((name, self._aggregates[name].value) for name in sorted(self._aggregates))
        return {name: value for name, value in values if value is not None}

    def _add(self, name: str, new: Aggregate) -> None:
        old = self._aggregates.get(name)
        self._aggregates[name] = new if old is None else _merged(name, old, new)


def _merged(name: str, old: Aggregate, new: Aggregate) -> Aggregate:
    match old, new:
        case Mean(), Mean():
            return old.merged(new)
        case Total(), Total():
            return old.merged(new)
        case Maximum(), Maximum():
            return old.merged(new)
        case Minimum(), Minimum():
            return old.merged(new)
        case _:
            msg = f"metric {name}: was a {type(old).__name__} and is now a {type(new).__name__}"
            raise ValueError(msg)


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the ``generator/*`` and ``verifier/*`` metrics of one batch of scored groups.

    Lengths are in tokens, shares in 0..1. ``verifier/rollouts/num_failed`` counts every rollout
    without a reward, ``verifier/groups/num_dropped`` every group in which none has one. Outcomes,
    labels and components come over all rollouts and again below ``verifier/source/SOURCE``.
    """
    # Sums first, one add a metric: a step may hold thousands of rollouts and wait for this.
    metrics = Metrics()
    _add_generated(metrics, groups)
    _add_rewards(metrics, groups)
    _add_verdicts(metrics, "verifier", _verdicts(groups))
    for source, of_source in _by_source(groups).items():
        _add_verdicts(metrics, f"verifier/source/{source}", _verdicts(of_source))
    return metrics.compute()


def _by_source(groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
    found: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        found[group.prompt.source].append(group)
    return found


def _add_generated(metrics: Metrics, groups: Sequence[RolloutGroup]) -> None:
    num_prompt_tokens = sum(len(group.prompt.token_ids) for group in groups)
    metrics.add_mean("generator/prompt_tokens/mean", num_prompt_tokens, len(groups))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    metrics.add_sum("generator/tokens/num_completion_tokens", sum(lengths))
    metrics.add_mean("generator/completion_tokens/mean", sum(lengths), len(lengths))
    if lengths:
        metrics.add_min("generator/completion_tokens/min", min(lengths))
        metrics.add_max("generator/completion_tokens/max", max(lengths))
    reasons = Counter(rollout.finish_reason for rollout in rollouts)
    metrics.add_mean("generator/finish/stop_share", reasons["stop"], len(rollouts))
    metrics.add_mean("generator/finish/length_share", reasons["length"], len(rollouts))


def _add_rewards(metrics: Metrics, groups: Sequence[RolloutGroup]) -> None:
    rewards: list[float] = []
    num_dropped = 0
    for source, of_source in _by_source(groups).items():
        scored = [_scored(group) for group in of_source]
        num_dropped += scored.count([])
        found = list(itertools.chain.from_iterable(scored))
        metrics.add_mean(f"verifier/source/{source}/reward_mean", math.fsum(found), len(found))
        rewards += found
    metrics.add_mean("verifier/reward/raw_mean", math.fsum(rewards), len(rewards))
    num_rollouts = sum(group.group_size for group in groups)
    metrics.add_sum("verifier/rollouts/num_scored", len(rewards))
    metrics.add_sum("verifier/rollouts/num_failed", num_rollouts - len(rewards))
    metrics.add_sum("verifier/groups/num_dropped", num_dropped)


def _verdicts(groups: Sequence[RolloutGroup]) -> list[Verdict]:
    return [verdict for group in groups for verdict in group.verdicts or ()]


def _add_verdicts(metrics: Metrics, role: str, verdicts: Sequence[Verdict]) -> None:
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    for outcome in Outcome:
        metrics.add_mean(f"{role}/outcome/{outcome}_share", outcomes[outcome], len(verdicts))
    for label, count in Counter(label for v in verdicts for label in v.labels).items():
        metrics.add_sum(f"{role}/label/{label}/num_rollouts", count)
    _add_components(metrics, role, verdicts)


def _add_components(metrics: Metrics, role: str, verdicts: Sequence[Verdict]) -> None:
    components: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, reward in verdict.components.items():
            if reward is not None:
                components[name].append(reward)
    for name, rewards in components.items():
        metrics.add_mean(f"{role}/component/{name}/mean", math.fsum(rewards), len(rewards))


def _scored(group: RolloutGroup) -> list[float]:
    """Return the rewards of the rollouts that have one."""
    assert group.verdicts is not None, f"group {group.group_id} was not scored"
    return [verdict.reward for verdict in group.verdicts if verdict.reward is not None]


def evaluation_mode(group: RolloutGroup) -> EvaluationMode:
    """Return which part of a held-out evaluation ``group`` belongs to."""
    return "greedy" if group.sampling.temperature == 0.0 else "sampled"


def unbiased_pass_at_k(num_rollouts: int, num_passed: int, k: int) -> float:
    """Return the chance that at least one of ``k`` of the rollouts passed: 1 - C(n-c,k) / C(n,k).

    Needs ``1 <= k <= num_rollouts``. Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_rollouts - num_passed, k) / math.comb(num_rollouts, k)


def evaluation_metrics(
    groups: Sequence[RolloutGroup],
    mode: EvaluationMode,
    pass_at_k: Sequence[int],
) -> dict[str, float]:
    """Return the ``eval/MODE/*`` metrics of one held-out evaluation.

    A rollout passed if its verdict says so: only the verifier knows the rounding of its threshold.
    pass@k is averaged over prompts. A rollout that was not scored counts as not sampled; a prompt
    with fewer than k scored rollouts is left out of pass@k and counted in ``num_left_out_at_K``.
    """
    metrics = Metrics()
    metrics.add_sum(f"eval/{mode}/num_prompts", len(groups))
    _add_held_out_rollouts(metrics, f"eval/{mode}", groups)
    for group in groups:
        rewards = _scored(group)
        num_passed = sum(v.outcome is Outcome.PASS for v in group.verdicts or ())
        for k in pass_at_k:
            _add_pass_at_k(metrics, f"eval/{mode}", len(rewards), num_passed, k)
        if rewards:
            chance = unbiased_pass_at_k(len(rewards), num_passed, 1)
            metrics.add_mean(f"eval/{mode}/source/{group.prompt.source}/pass_at_1", chance, 1)
    return metrics.compute()


def _add_held_out_rollouts(metrics: Metrics, role: str, groups: Sequence[RolloutGroup]) -> None:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in _scored(group)]
    num_tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
    num_cut_off = sum(rollout.finish_reason == "length" for rollout in rollouts)
    metrics.add_mean(f"{role}/completion_tokens_mean", num_tokens, len(rollouts))
    metrics.add_mean(f"{role}/length_share", num_cut_off, len(rollouts))
    metrics.add_mean(f"{role}/reward_mean", math.fsum(rewards), len(rewards))
    metrics.add_sum(f"{role}/num_failed", len(rollouts) - len(rewards))
    _add_components(metrics, role, _verdicts(groups))


def _add_pass_at_k(metrics: Metrics, role: str, num_scored: int, num_passed: int, k: int) -> None:
    enough = num_scored >= k
    metrics.add_sum(f"{role}/num_left_out_at_{k}", not enough)
    if enough:
        chance = unbiased_pass_at_k(num_scored, num_passed, k)
        metrics.add_mean(f"{role}/pass_at_{k}", chance, 1)
