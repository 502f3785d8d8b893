"""Which of the groups under way make the next batch.

Every group has a deadline: the last step whose batch may hold it. Owns: no order hands out a batch
after which some group could not be trained by its deadline, and no group leaves after its own.
docs/STALENESS.md has the proofs. Knows no groups, only tickets; keeps no time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias

Ticket: TypeAlias = int
"""Place in the order of reservation."""


class Order(Protocol):
    """Tickets that are under way, some of them complete."""

    @property
    def num_held(self) -> int:
        """Tickets that are under way or complete."""
        ...

    def admit(self, ticket: Ticket, deadline: int) -> None:
        """Hold a ticket from now on; tickets and deadlines never decrease."""
        ...

    def complete(self, ticket: Ticket) -> None:
        """Its group is scored."""
        ...

    def remove(self, ticket: Ticket) -> None:
        """Forget one whose group will never be complete."""
        ...

    def take(self, step: int, size: int) -> Sequence[Ticket] | None:
        """Return ``size`` complete tickets for the batch of ``step``; None while it must wait."""
        ...

    def overdue(self, step: int) -> Sequence[Ticket]:
        """Return and forget those that no batch after ``step`` may hold."""
        ...


class StrictOrder:
    """The oldest leave first, however long they take."""

    def __init__(self) -> None:
        self._open: deque[Ticket] = deque()
        """In order of reservation; the first one is not complete."""
        self._complete: set[Ticket] = set()
        """Of them."""
        self._removed: set[Ticket] = set()
        """Of them: taken out once they come to the front, so that nothing is searched."""
        self._leading: deque[Ticket] = deque()
        """Complete, and older than every one that is open."""

    @property
    def num_held(self) -> int:
        """Tickets that are under way or complete."""
        return len(self._open) - len(self._removed) + len(self._leading)

    def admit(self, ticket: Ticket, deadline: int) -> None:
        """Hold a ticket. Its deadline is met by the order itself."""
        del deadline
        self._open.append(ticket)

    def complete(self, ticket: Ticket) -> None:
        """Its group is scored."""
        self._complete.add(ticket)
        self._advance()

    def remove(self, ticket: Ticket) -> None:
        """Forget one whose group will never be complete."""
        self._removed.add(ticket)
        self._advance()

    def take(self, step: int, size: int) -> Sequence[Ticket] | None:
        """Return the ``size`` oldest once they are complete."""
        del step
        if len(self._leading) < size:
            return None
        return [self._leading.popleft() for _ in range(size)]

    def overdue(self, step: int) -> Sequence[Ticket]:
        """None ever is."""
        del step
        return ()

    def _advance(self) -> None:
        while self._open:
            ticket = self._open[0]
            if ticket in self._complete:
                self._complete.remove(ticket)
                self._leading.append(ticket)
            elif ticket in self._removed:
                self._removed.remove(ticket)
            else:
                return
            self._open.popleft()


class WindowedOrder:
    """The oldest that are complete leave first, as long as what stays can still be trained.

    With ``surplus`` = 0 no group is ever overdue. With more, a batch may leave up to so many behind
    that no later batch may hold.
    """

    def __init__(self, *, groups_per_step: int, surplus: int) -> None:
        self._groups_per_step = groups_per_step
        self._surplus = surplus
        self._deadlines: dict[Ticket, int] = {}
        self._by_deadline: dict[int, set[Ticket]] = {}
        """Of all that are held; as many entries as batches are under way."""
        self._num_complete: Counter[int] = Counter()
        """By deadline."""
        self._heap: list[Ticket] = []
        """Complete ones, the oldest on top; those that became overdue are left in it."""

    @property
    def num_held(self) -> int:
        """Tickets that are under way or complete."""
        return len(self._deadlines)

    def admit(self, ticket: Ticket, deadline: int) -> None:
        """Hold a ticket."""
        self._deadlines[ticket] = deadline
        self._by_deadline.setdefault(deadline, set()).add(ticket)

    def complete(self, ticket: Ticket) -> None:
        """Its group is scored."""
        self._num_complete[self._deadlines[ticket]] += 1
        heapq.heappush(self._heap, ticket)

    def remove(self, ticket: Ticket) -> None:
        """Forget one whose group will never be complete."""
        self._forget(ticket)

    def take(self, step: int, size: int) -> Sequence[Ticket] | None:
        """Return the ``size`` oldest complete ones, unless too many older ones would stay."""
        if self._num_complete.total() < size or not self._may_leave(step, size):
            return None
        taken: list[Ticket] = []
        while len(taken) < size:
            ticket = heapq.heappop(self._heap)
            if ticket in self._deadlines:
                self._num_complete[self._deadlines[ticket]] -= 1
                self._forget(ticket)
                taken.append(ticket)
        return taken

    def overdue(self, step: int) -> Sequence[Ticket]:
        """Return and forget those that no batch after ``step`` may hold, complete ones too."""
        found = sorted(
            ticket
            for deadline, tickets in self._by_deadline.items()
            if deadline <= step
            for ticket in tickets
        )
        assert len(found) <= self._surplus, "more groups are overdue than may be left behind"
        for ticket in found:
            self._num_complete.pop(self._deadlines[ticket], None)
            self._forget(ticket)
        return found

    def _may_leave(self, step: int, size: int) -> bool:
        """Whether, for every deadline, enough of those due by then are taken now.

        After this batch, ``deadline - step`` more of ``groups_per_step`` can hold those due by
        ``deadline``. Taking the oldest takes as many of each as can be taken at all.
        """
        num_held = num_complete = 0
        for deadline in sorted(self._by_deadline):
            num_held += len(self._by_deadline[deadline])
            num_complete += self._num_complete[deadline]
            later = (deadline - step) * self._groups_per_step + self._surplus
            if num_held - min(num_complete, size) > later:
                return False
        return True

    def _forget(self, ticket: Ticket) -> None:
        tickets = self._by_deadline[self._deadlines.pop(ticket)]
        tickets.remove(ticket)
        if not tickets:
            self._by_deadline = {d: kept for d, kept in self._by_deadline.items() if kept}
