"""Groups that are generated and not trained on: which ones, why, and how many are too many.

Owns: a group is judged by its verdicts alone, never by how long others took, so a synchronous run
drops the same ones every time; every reason is kept until a step settles it; what is drawn in place
of dropped groups is bounded. Draws nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import NoSignalError
from headrace.objectives.advantages import has_spread
from headrace.types import Outcome, RolloutGroup

MAX_FAILED_BATCHES = 20
"""A step for which so many times the groups under way went without verdicts will not come
together."""
_MAX_REASONS = 5
"""That an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What was dropped before one step."""

    reasons: Mapping[str, str]
    """By group id."""
    num_failed: int
    """Without verdicts."""
    num_no_spread: int
    num_late: int


class DroppedGroups:
    """The groups that no step has settled yet."""

    def __init__(self, *, num_slots: int, max_refills: int | None) -> None:
        """``num_slots`` are the groups under way at most.

        ``max_refills``: how many times as many groups without a spread of rewards may be dropped
        for one step; None trains on such groups.
        """
        self._num_slots = num_slots
        self._max_refills = max_refills
        self._reasons: dict[str, str] = {}
        """Group id -> reason."""
        self._num_no_spread = 0
        self._num_late = 0

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def failure(self, group: RolloutGroup) -> str | None:
        """Return why ``group`` has too few verdicts; None where it has enough.

        Two scored rollouts are the least that can be compared with each other.
        """
        num_scored = sum(reward is not None for reward in group.rewards)
        return None if num_scored >= min(2, group.group_size) else _failure_reason(group)

    def lack_of_spread(self, group: RolloutGroup) -> str | None:
        """Return why ``group`` is to be refilled although it has verdicts; None keeps it.

        DAPO's dynamic sampling (arXiv:2503.14476, equation 11). By the rewards as they were
        verified, of rollouts that have something to train on.
        """
        if self._max_refills is None:
            return None
        rewards = [
            reward
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
            if reward is not None and any(rollout.loss_mask)
        ]
        if has_spread(rewards):
            return None
        return f"no spread: every reward is {rewards[0]:g}" if rewards else "nothing to train on"

    def note_failure(self, group_id: str, reason: str) -> None:
        """Remember a group without verdicts."""
        self._reasons[group_id] = reason

    def note_no_spread(self, group_id: str, reason: str) -> None:
        """Remember a group whose rewards do not differ."""
        self._reasons[group_id] = reason
        self._num_no_spread += 1

    def note_late(self, group_id: str, reason: str) -> None:
        """Remember a group that a batch was made without; how many, the buffer bounds."""
        self._reasons[group_id] = reason
        self._num_late += 1

    def judge(self, step: int) -> None:
        """Raise NoSignalError, with the reasons, where ``step`` will not come together."""
        limit = self._max_refills
        if limit is not None and self._num_no_spread > limit * self._num_slots:
            msg = (
                f"step {step} never came together within dynamic_sampling.max_refills = {limit} "
                f"times {self._num_slots} groups: {self.table()}. If they are as good as can be, "
                "the policy has learned what these prompts teach; otherwise choose easier or "
                "harder prompts, a larger group_size, a higher sampling.temperature or more refills"
            )
            raise NoSignalError(msg)
        if self._num_failed > MAX_FAILED_BATCHES * self._num_slots:
            msg = f"step {step} never came together: {self.table()}"
            raise NoSignalError(msg)

    @property
    def _num_failed(self) -> int:
        return len(self._reasons) - self._num_no_spread - self._num_late

    def take(self) -> Settled:
        """Return what was dropped since the last call; begin anew."""
        settled = Settled(
            reasons=self._reasons,
            num_failed=self._num_failed,
            num_no_spread=self._num_no_spread,
            num_late=self._num_late,
        )
        self._reasons, self._num_no_spread, self._num_late = {}, 0, 0
        return settled

    def table(self) -> str:
        """Say how many groups were dropped since the last step, the commonest reasons first."""
        reasons = Counter(self._reasons.values()).most_common(_MAX_REASONS)
        listed = "; ".join(f"{count} for: {reason}" for reason, count in reasons)
        return f"{len(self._reasons)} groups were dropped, {listed}"


def _failure_reason(group: RolloutGroup) -> str:
    """Name why a group has too few verdicts: the most telling detail among them."""
    assert group.verdicts is not None
    details = [v.detail for v in group.verdicts if v.reward is None and v.detail]
    infra = sum(v.outcome is Outcome.INFRA for v in group.verdicts)
    detail = details[0] if details else "no reason given"
    return f"too few verdicts ({infra} of {group.group_size} were failures of ours): {detail}"
