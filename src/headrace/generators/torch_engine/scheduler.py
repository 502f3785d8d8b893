"""Policy: which waiting rollouts are admitted next. Holds no tensor and counts no memory.

First come, first served, and a group is never torn apart while it fits: its prompt is prefilled
once, and its rollouts branch from that. Only a group larger than the whole engine is split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.generators.torch_engine.rollout_state import GroupCollector, Ticket
from headrace.types import GenerationRequest, Prompt


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

    def __len__(self) -> int:
        return sum(len(branch.tickets) for branch in self._waiting)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue every rollout of ``requests``, in order."""
        for request in requests:
            collector = GroupCollector(request=request)
            tickets = [
                Ticket(request=request, rollout_index=index, collector=collector)
                for index in range(request.group_size)
            ]
            for start in range(0, len(tickets), self._max_running):
                part = tuple(tickets[start : start + self._max_running])
                self._waiting.append(Branch(prompt=request.prompt, tickets=part))

    def admit(self, num_running: int) -> list[Branch]:
        """Take as many branches from the front as have slots and fit one prefill."""
        admitted: list[Branch] = []
        free, tokens = self._max_running - num_running, self._max_prefill_tokens
        while self._waiting and len(self._waiting[0].tickets) <= free:
            length = len(self._waiting[0].prompt.token_ids)
            if admitted and length > tokens:
                break
            branch = self._waiting.popleft()
            admitted.append(branch)
            free -= len(branch.tickets)
            tokens -= length
        return admitted

    def clear(self) -> None:
        """Forget everything that waits."""
        self._waiting.clear()
