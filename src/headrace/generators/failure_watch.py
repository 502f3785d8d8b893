"""When rollouts whose logits are not finite are so many that the run must stop.

A single one is taken out and counted: a rare overflow costs one rollout. Many are no accident, and
going on would train on what is left of the batch without anybody noticing.
"""

from __future__ import annotations

from collections import deque

from headrace.errors import GeneratorFailure

MIN_FAILED = 8
"""Fewer failures never stop a run, whatever their share."""
MAX_FAILED_SHARE = 0.1
"""Of the recent rollouts; from this share on the run stops."""
RECENT = 256
"""Rollouts that count as recent, the last to end."""


class FailureWatch:
    """Remembers how the last rollouts ended."""

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=RECENT)

    def note(self, *, num_failed: int, num_ended: int, num_running: int, version: int) -> None:
        """Note that ``num_failed`` of ``num_ended`` rollouts, which ended together, failed.

        ``num_running`` is how many ran then, these included. Raises GeneratorFailure, and forgets
        what it remembers, when too many failed recently or all that ran failed at once.
        """
        self._recent.extend([False] * (num_ended - num_failed) + [True] * num_failed)
        total = sum(self._recent)
        too_many = total >= MIN_FAILED and total >= MAX_FAILED_SHARE * len(self._recent)
        all_at_once = num_failed == num_running and num_failed >= MIN_FAILED
        if not num_failed or not (too_many or all_at_once):
            return
        shown = (
            f"{total} of the last {len(self._recent)} rollouts"
            if too_many
            else f"all {num_failed} running rollouts at once"
        )
        self._recent.clear()
        msg = (
            f"the logits of policy version {version} were not finite, for {shown}: its weights "
            "hold NaN or infinities, or activations overflow the generator's dtype. Look at the "
            "last updates (learner/gradient/norm), lower learner.optimizer.learning_rate, or set "
            "generator.dtype to float32 or bfloat16"
        )
        raise GeneratorFailure(msg)
