"""Policy: which waiting rollouts are admitted next. Holds no tensor and counts no memory.

First come, first served. A group is admitted whole where it can be: its prompt is prefilled once,
and its rollouts branch from that. It is torn apart, at the price of another prefill, only when a
part of the engine that matters would otherwise stand idle until the longest rollouts end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from headrace.generators.torch_engine.rollout_state import GroupCollector, Ticket
from headrace.types import GenerationRequest, Prompt

TEAR_SHARE = 8
"""A group waits to be admitted whole while fewer than one in so many slots stand idle for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Rollouts that start together from one prefilled prompt."""

    prompt: Prompt
    tickets: tuple[Ticket, ...]


class Scheduler:
    """The queue of rollouts that wait for a slot."""

    def __init__(self, *, max_running: int, max_prefill_tokens: int) -> None:
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[Branch] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GroupCollector]:
        """Queue every rollout of ``requests``, in order; return where each is collected."""
        collectors = [GroupCollector(request=request) for request in requests]
        for collector in collectors:
            tickets = tuple(
                Ticket(request=collector.request, rollout_index=index, collector=collector)
                for index in range(collector.request.group_size)
            )
            self._waiting.append(Branch(prompt=collector.request.prompt, tickets=tickets))
        return collectors

    def admit(self, num_running: int) -> list[Branch]:
        """Take as many rollouts from the front as have slots and fit one prefill."""
        admitted: list[Branch] = []
        free, tokens = self._max_running - num_running, self._max_prefill_tokens
        while self._waiting and self._may_start(self._waiting[0], free):
            length = len(self._waiting[0].prompt.token_ids)
            if admitted and length > tokens:
                break
            branch = self._take(free)
            admitted.append(branch)
            free -= len(branch.tickets)
            tokens -= length
        return admitted

    def _may_start(self, branch: Branch, free: int) -> bool:
        return len(branch.tickets) <= free or free * TEAR_SHARE >= max(
            self._max_running, TEAR_SHARE
        )

    def _take(self, free: int) -> Branch:
        """Take the first branch, or its first ``free`` rollouts; the others go on waiting."""
        branch = self._waiting.popleft()
        taken, left = branch.tickets[:free], branch.tickets[free:]
        if left:
            self._waiting.appendleft(Branch(prompt=branch.prompt, tickets=left))
        return Branch(prompt=branch.prompt, tickets=taken)

    def drop(self, collectors: AbstractSet[GroupCollector]) -> None:
        """Forget the rollouts of ``collectors``. A branch is of one group."""
        self._waiting = deque(
            branch for branch in self._waiting if branch.tickets[0].collector not in collectors
        )

    def clear(self) -> None:
        """Forget everything that waits."""
        self._waiting.clear()
