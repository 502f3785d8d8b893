"""What is wrong with the rows of a source, gathered into few lines that name every kind of fault.

Invariant: no kind of fault hides another. Rows with the same fault share a line, so that ten
thousand rows without an answer cannot push the one line that is not JSON out of the listing.
Whether a fault stops the load is decided by `headrace.data.prompts`.
"""

from __future__ import annotations

MAX_ROWS_PER_LINE = 10
MAX_LINES = 20


class RowError(Exception):
    """One row cannot be used. Never leaves ``headrace.data``.

    ``reason`` is the same for every row with this fault and says how to mend it; ``note`` is what
    is particular to this row.
    """

    def __init__(self, reason: str, note: str = "") -> None:
        super().__init__(reason, note)
        self.reason: str = reason
        self.note: str = note


class FaultList:
    """The faults of one source. Memory is bounded by the kinds of fault, not by the rows."""

    def __init__(self, *, origin: str, unit: str) -> None:
        self._origin = origin
        self._unit = unit
        self._kinds: dict[str, _Kind] = {}
        self._num_unlisted = 0

    def add(self, number: int, fault: RowError) -> None:
        """Record ``fault`` of row ``number``."""
        if fault.reason not in self._kinds and len(self._kinds) == MAX_LINES:
            self._num_unlisted += 1
            return
        self._kinds.setdefault(fault.reason, _Kind()).add(number, fault.note)

    def lines(self) -> tuple[str, ...]:
        """Return one line for each kind of fault, in the order the kinds were first met."""
        lines = [
            f"{self._origin}, {kind.rows(self._unit)}: {kind.explain(reason)}"
            for reason, kind in self._kinds.items()
        ]
        if self._num_unlisted:
            lines.append(f"{self._origin}: and {self._num_unlisted} more faults of other kinds")
        return tuple(lines)


class _Kind:
    """The rows that share one reason."""

    def __init__(self) -> None:
        self._listed: list[tuple[int, str]] = []
        self._count = 0

    def add(self, number: int, note: str) -> None:
        self._count += 1
        if len(self._listed) < MAX_ROWS_PER_LINE:
            self._listed.append((number, note))

    def rows(self, unit: str) -> str:
        """Name the rows: ``line 7``, or ``lines 3 (1300 tokens), 9 and 4998 more``."""
        if self._count == 1:
            return f"{unit} {self._listed[0][0]}"
        names = [f"{number} ({note})" if note else str(number) for number, note in self._listed]
        hidden = self._count - len(names)
        last = f"{hidden} more" if hidden else names.pop()
        return f"{unit}s {', '.join(names)} and {last}"

    def explain(self, reason: str) -> str:
        note = self._listed[0][1]
        return f"{reason} ({note})" if self._count == 1 and note else reason
