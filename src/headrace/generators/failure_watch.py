"""When rollouts whose logits are not finite are so many that the run must stop.

A single one is taken out and counted: a rare overflow costs one rollout. Many are no accident, and
going on would train on what is left of the batch without anybody noticing.
"""

from __future__ import annotations

from collections import Counter, deque

from headrace.errors import GeneratorFailure

MIN_FAILED = 8
"""Fewer failures never stop a run, whatever their share."""
MAX_FAILED_SHARE = 0.1
"""Of the recent rollouts; from this share on the run stops."""
RECENT = 256
"""Rollouts that count as recent, the last to end."""


class FailureWatch:
    """Remembers how the last rollouts ended, and under which weights."""

    def __init__(self) -> None:
        self._recent: deque[int | None] = deque(maxlen=RECENT)
        """The policy version whose logits were not finite; None of a rollout that ended well."""

    def note(self, *, num_failed: int, num_ended: int, num_running: int, version: int) -> None:
        """Note that ``num_failed`` of ``num_ended`` rollouts, which ended together, failed.

        ``num_running`` is how many ran then, these included. Raises GeneratorFailure, and forgets
        what it remembers, when too many failed recently or all that ran failed at once. Failures
        under earlier versions count among the recent ones, and are named as theirs.
        """
        self._recent.extend([None] * (num_ended - num_failed) + [version] * num_failed)
        blamed = Counter(failed for failed in self._recent if failed is not None)
        total = blamed.total()
        too_many = total >= MIN_FAILED and total >= MAX_FAILED_SHARE * len(self._recent)
        all_at_once = num_failed == num_running and num_failed >= MIN_FAILED
        if not num_failed or not (too_many or all_at_once):
            return
        if too_many:
            whose, shown = _named(blamed), f"{total} of the last {len(self._recent)} rollouts"
        else:
            whose, shown = f"version {version}", f"all {num_failed} running rollouts at once"
        self._recent.clear()
        msg = (
            f"the logits of policy {whose} were not finite, for {shown}: weights "
            "hold NaN or infinities, or activations overflow the generator's dtype. Look at the "
            "last updates (learner/gradient/norm), lower learner.optimizer.learning_rate, or set "
            "generator.dtype to float32 or bfloat16"
        )
        raise GeneratorFailure(msg)


def _named(blamed: Counter[int]) -> str:
    """Name the versions; of several also how many rollouts failed under the last one."""
    first, last = min(blamed), max(blamed)
    if first == last:
        return f"version {last}"
    return f"versions {first} to {last} ({blamed[last]} under {last})"
