"""Policy: which waiting rollouts are admitted next, and which go back when the cache is full.

Holds no tensor. First come, first served. A group is admitted whole where it can be: its prompt is
prefilled once, and its rollouts branch from that. It is torn apart, at the price of another
prefill, only when a part of the engine that matters would otherwise stand idle until the longest
rollouts end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import groupby

from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.rollout_state import Begun, GroupCollector, Ticket
from headrace.types import GenerationRequest

TEAR_SHARE = 8
"""A group waits to be admitted whole while fewer than one in so many slots stand idle for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """Rollouts that start together from the same tokens, and how far those are prefilled."""

    token_ids: tuple[int, ...]
    """The prompt, and the completion tokens that all its rollouts go on from."""
    tickets: tuple[Ticket, ...]
    blocks: list[int]
    """Of ``token_ids``, once admitted."""
    num_cached: int = 0
    """Leading tokens whose keys and values are in ``blocks``."""
    num_found: int = 0
    """Those of them that were there before."""

    @property
    def num_left(self) -> int:
        """Tokens still to be prefilled."""
        return len(self.token_ids) - self.num_cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive tokens of one branch for one prefill pass."""

    branch: Branch
    num_tokens: int


def branch_of(tickets: Sequence[Ticket]) -> Branch:
    """Return the branch of ``tickets``, which all go on from the same tokens: mostly none."""
    return Branch(token_ids=tickets[0].token_ids, tickets=tuple(tickets), blocks=[])


def _branches(tickets: Sequence[Ticket]) -> Iterator[Branch]:
    """Yield the branches of ``tickets``: neighbours of one group with the same tokens as one."""
    for _, members in groupby(tickets, key=lambda t: (id(t.collector), t.begun)):
        yield branch_of(list(members))


class Scheduler:
    """The queue of rollouts that wait for a slot, and those that are being prefilled."""

    def __init__(self, blocks: BlockManager, *, max_running: int, max_prefill_tokens: int) -> None:
        self._blocks = blocks
        self.max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[Branch] = deque()
        self._prefilling: deque[Branch] = deque()
        self._unproven: list[int] = []
        """Blocks given back in the middle of a prefill: no logits have shown them to be finite."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits and nothing is being prefilled."""
        return not self._waiting and not self._prefilling

    @property
    def first_waiting(self) -> str:
        """The id of the group that is admitted next, of those that wait."""
        return self._waiting[0].tickets[0].request.group_id

    @property
    def num_rollouts(self) -> int:
        """Rollouts that wait or are being prefilled."""
        return sum(len(branch.tickets) for branch in (*self._waiting, *self._prefilling))

    @property
    def tickets(self) -> list[Ticket]:
        """Of those rollouts."""
        return [ticket for b in (*self._waiting, *self._prefilling) for ticket in b.tickets]

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GroupCollector]:
        """Queue what ``requests`` leave to be sampled, in order; return where each is collected."""
        collectors = [GroupCollector(request=request) for request in requests]
        for collector in collectors:
            self._waiting.extend(_branches(collector.tickets()))
        return collectors

    def next_parts(self, num_running: int) -> list[Part]:
        """Admit what has room, and return the tokens to prefill now, oldest branches first.

        A long prompt is prefilled in parts of at most ``max_prefill_tokens``, between which the
        running rollouts go on.
        """
        self._admit(num_running)
        parts: list[Part] = []
        room = self._max_prefill_tokens
        for branch in self._prefilling:
            if room == 0:
                break
            parts.append(Part(branch=branch, num_tokens=min(room, branch.num_left)))
            room -= parts[-1].num_tokens
        return parts

    def finished(self, parts: Sequence[Part]) -> list[Branch]:
        """Note that ``parts`` are computed; return the branches that are complete now."""
        for part in parts:
            part.branch.num_cached += part.num_tokens
        done = [part.branch for part in parts if part.branch.num_left == 0]
        for branch in done:
            self._prefilling.remove(branch)
            self._blocks.name(branch.token_ids, branch.blocks)
        return done

    def take_back(self, tickets: Sequence[Ticket]) -> None:
        """Queue ``tickets`` before all others; each goes on from what it has sampled."""
        self._waiting.extendleft(reversed(list(_branches(tickets))))

    def preempt_prefill(self) -> bool:
        """Send the youngest branch in prefill back to wait; return whether there was one."""
        if not self._prefilling:
            return False
        branch = self._prefilling.pop()
        self._give_back(branch)
        self._waiting.appendleft(branch_of(branch.tickets))
        return True

    def _give_back(self, branch: Branch) -> None:
        size = self._blocks.block_size
        computed = self._blocks.blocks_for(branch.num_cached)
        self._unproven += branch.blocks[branch.num_found // size : computed]
        self._blocks.release(branch.blocks)

    def take_unproven(self) -> list[int]:
        """Return what must be wiped before anything is written to it, once."""
        taken, self._unproven = self._unproven, []
        return taken

    def start_over(
        self, tickets: Sequence[Ticket], change: Callable[[Begun], Begun] | None = None
    ) -> None:
        """Queue ``tickets``, what is being prefilled and what waits, with no block computed.

        ``change`` says what each of them goes on from; None is from the tokens it has.
        """
        while self.preempt_prefill():
            pass
        self.take_back(tickets)
        if change is not None:
            every = [ticket for branch in self._waiting for ticket in branch.tickets]
            changed = [replace(ticket, begun=change(ticket.begun)) for ticket in every]
            self._waiting = deque(_branches(changed))

    def _admit(self, num_running: int) -> None:
        free = self.max_running - num_running
        free -= sum(len(branch.tickets) for branch in self._prefilling)
        planned = sum(branch.num_left for branch in self._prefilling)
        while self._waiting and planned < self._max_prefill_tokens:
            if not self._may_start(self._waiting[0], free):
                break
            if self._is_being_computed(self._waiting[0]):
                break
            branch = self._split(free)
            if not self._give_blocks(branch, is_alone=num_running == 0 and not self._prefilling):
                self._waiting.appendleft(branch)
                break
            self._prefilling.append(branch)
            free -= len(branch.tickets)
            planned += branch.num_left

    def _is_being_computed(self, branch: Branch) -> bool:
        """Whether a prefill of now computes what ``branch`` begins with: next time it is found."""
        beginning = branch.token_ids[: self._blocks.block_size]
        if not any(b.token_ids[: len(beginning)] == beginning for b in self._prefilling):
            return False
        return len(branch.token_ids) > len(beginning) and not self._blocks.find(branch.token_ids)

    def _may_start(self, branch: Branch, free: int) -> bool:
        return len(branch.tickets) <= free or free * TEAR_SHARE >= max(self.max_running, TEAR_SHARE)

    def _split(self, free: int) -> Branch:
        """Take the first branch, or its first ``free`` rollouts; the others go on waiting."""
        branch = self._waiting.popleft()
        taken, left = branch.tickets[:free], branch.tickets[free:]
        if left:
            self._waiting.appendleft(branch_of(left))
        return branch_of(taken)

    def _give_blocks(self, branch: Branch, *, is_alone: bool) -> bool:
        """Give ``branch`` the blocks of its tokens, known beginnings first; False without room.

        Room is also asked for the block that each rollout writes to first, unless nothing else
        is there to make room later.
        """
        known = self._blocks.find(branch.token_ids)
        self._blocks.hold(known)
        missing = self._blocks.blocks_for(len(branch.token_ids)) - len(known)
        spare = 0 if is_alone else len(branch.tickets)
        if missing + spare > self._blocks.num_available:
            self._blocks.release(known)
            return False
        branch.blocks = known + self._blocks.take(missing)
        branch.num_cached = branch.num_found = len(known) * self._blocks.block_size
        return True

    def drop(self, collectors: AbstractSet[GroupCollector]) -> list[Ticket]:
        """Forget the rollouts of ``collectors`` and return their tickets."""
        dropped: list[Ticket] = []
        for branch in self._prefilling:
            if branch.tickets[0].collector in collectors:  # a branch is of one group
                self._give_back(branch)
        for queue in (self._prefilling, self._waiting):
            branches = list(queue)
            queue.clear()
            for branch in branches:
                if branch.tickets[0].collector in collectors:
                    dropped += branch.tickets
                else:
                    queue.append(branch)
        return dropped

    def clear(self) -> None:
        """Forget everything that waits or is being prefilled; its blocks stay held."""
        self._prefilling.clear()
        self._waiting.clear()
        self._unproven.clear()
