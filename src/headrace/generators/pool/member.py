"""What a pool knows of one of its members: the incarnation of now, and what that is busy with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.generators.pool.flights import Flight
from headrace.generators.pool.merging import over_time
from headrace.generators.pool.proxy import GeneratorProxy

MAX_BEATS = 1000
"""Of which what was counted is kept apart; then they become one."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One place in the pool, which one incarnation after another fills."""

    index: int
    max_rollouts: int
    """That it is given at once."""
    proxy: GeneratorProxy | None = None
    """Of the incarnation that serves; None while there is none."""
    incarnation: int = -1
    """Of the last one that was begun."""
    flights: set[Flight] = field(default_factory=set)
    """Groups that it samples."""
    takes_work: bool = True
    """Whether it is to stay."""
    is_over: bool = False
    """Whether it was given up."""
    reissued: Sequence[str] = ()
    """Groups that went to others with its last loss, until that was told."""
    losses_in_a_row: int = 0
    """Incarnations lost since the last group that came of one."""
    loss: asyncio.Future[str] | None = None
    """How the incarnation of now was lost, for whoever watches it."""
    keeper: asyncio.Task[None] | None = None
    """Starts it, watches it and starts it again."""
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    """Of its generator, of each beat since somebody took them."""
    _busy_since: float | None = None
    _busy_seconds: float = 0.0

    @property
    def is_serving(self) -> bool:
        """Whether it can be asked."""
        return self.proxy is not None

    @property
    def load(self) -> tuple[int, int]:
        """Sorts members by what is left to compute, then by their number."""
        return sum(flight.num_tokens for flight in self.flights), self.index

    def has_room(self, flight: Flight) -> bool:
        """Whether it is to take ``flight`` now; one without work takes any."""
        if not (self.is_serving and self.takes_work):
            return False
        running = sum(held.request.group_size for held in self.flights)
        return not running or running + flight.request.group_size <= self.max_rollouts

    def take(self, flight: Flight) -> None:
        """Note that it samples ``flight``."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self.flights.add(flight)

    def let_go(self, flight: Flight) -> None:
        """Note that it does not any more."""
        self.flights.discard(flight)
        if not self.flights and self._busy_since is not None:
            self._busy_seconds += time.monotonic() - self._busy_since
            self._busy_since = None

    def note_metrics(self, counted: Mapping[str, float]) -> None:
        """Keep what its generator counted until somebody takes it."""
        self.metrics.append(counted)
        if len(self.metrics) > MAX_BEATS:
            self.metrics = [over_time(self.metrics)]

    def take_busy_seconds(self) -> float:
        """Return for how long it had something to do since the last call."""
        now = time.monotonic()
        seconds = self._busy_seconds
        if self._busy_since is not None:
            seconds += now - self._busy_since
            self._busy_since = now
        self._busy_seconds = 0.0
        return seconds
