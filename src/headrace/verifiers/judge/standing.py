"""Whether a judge answers in the agreed form at all: whose fault an answer without meaning is.

Of a judge that is understood in general, the completion at hand is the cause, and being left out
must not be a policy's choice. Of one that is not, the judge is.
"""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Answers that are remembered."""
ENOUGH = 8
"""Answers that say something about a judge."""


class Standing:
    """What the last answers of one judge were. Used from one event loop."""

    def __init__(self) -> None:
        self._answers: deque[bool] = deque(maxlen=WINDOW)

    def note(self, *, readable: bool) -> None:
        """Remember whether an answer could be read."""
        self._answers.append(readable)

    @property
    def is_understood(self) -> bool:
        """Whether more than half of its answers could be read, of enough."""
        return len(self._answers) >= ENOUGH and 2 * sum(self._answers) > len(self._answers)

    @property
    def is_lost(self) -> bool:
        """Whether it has answered often and mostly without meaning."""
        return len(self._answers) == WINDOW and not self.is_understood
