"""When a run must stop because its steps teach nothing, or because their gradients break.

Owns the second half of invariant 10: what comes several times in a row is an error that says why.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import LearnerConfig
from headrace.errors import DivergedError, NoSignalError
from headrace.learners.optimizer import UpdateOutcome
from headrace.learners.selection import ScoredGroup
from headrace.learners.state import LearnerCounters
from headrace.types import RolloutGroup


def judge_signal(
    counters: LearnerCounters,
    config: LearnerConfig,
    groups: Sequence[RolloutGroup],
    scored: Sequence[ScoredGroup],
) -> None:
    """Count steps whose rewards teach nothing, and stop when they keep coming.

    A KL term moves the weights without any reward, so an update is no proof of a signal, and
    neither is an advantage that comes of the KL in the reward: ``scored`` is without it. Judged
    before anything moves, so that the run stops with the weights of its last step.
    """
    has_signal = any(group.has_signal for group in scored)
    counters.num_no_signal = 0 if has_signal else counters.num_no_signal + 1
    if counters.num_no_signal >= config.max_no_signal_steps:
        msg = (
            f"{counters.num_no_signal} steps in a row had no group with a spread of rewards: "
            f"{_reasons(groups)}. Nothing can be learned from them. If they are as good as can "
            "be, the policy has learned what these prompts teach; otherwise choose easier or "
            "harder prompts, a larger group_size or a higher sampling.temperature"
        )
        raise NoSignalError(msg)


def judge_outcomes(
    counters: LearnerCounters, config: LearnerConfig, outcomes: Sequence[UpdateOutcome]
) -> None:
    """Count steps whose every gradient was not finite, and stop when they keep coming."""
    if outcomes:
        all_failed = not any(outcome.applied for outcome in outcomes)
        counters.num_nonfinite = counters.num_nonfinite + 1 if all_failed else 0
    if counters.num_nonfinite >= config.max_nonfinite_steps:
        msg = (
            f"the gradient was not finite {counters.num_nonfinite} steps in a row "
            f"(last norm {outcomes[-1].gradient_norm}); the weights are those of version "
            f"{counters.policy_version}. Lower learner.optimizer.learning_rate, or look at the "
            "rollouts of the last steps with `headrace inspect`"
        )
        raise DivergedError(msg)


def _reasons(groups: Sequence[RolloutGroup]) -> str:
    """Say of the last batch why its groups have no spread."""
    table: dict[str, int] = {}
    for group in groups:
        scored = [reward for reward in group.rewards if reward is not None]
        reason = f"all equal {scored[0]:g}" if scored else "none scored"
        table[reason] = table.get(reason, 0) + 1
    return ", ".join(f"{count} groups {reason}" for reason, count in sorted(table.items()))
