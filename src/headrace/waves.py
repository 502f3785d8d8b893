"""Groups on their way to the buffer: drawn, generated, scored, delivered or dropped.

    run       waits for free slots (unblocked by the controller releasing, or a dropped group);
              draws prompts, has them generated, and starts a _score task for each group
    _score    waits for verdicts (the verifier has a deadline); delivers or drops

A wave is what is drawn together. Where one batch of slots is all there is, waves take turns with
the learner and with each other: what is generated together must then not depend on how fast a
verifier answers, or a synchronous run would not repeat. Where there are more, every free slot is
filled at once, and waves overlap. Owns: a group that a batch left behind for good is given up,
wherever it is, and its slot is free; what nobody will train on is not generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace.buffer import RolloutBuffer, Ticket
from headrace.data import Draw, PromptStream
from headrace.dropped import DroppedGroups
from headrace.errors import GeneratorFailure
from headrace.roles import Generator, Interruptible, Verifier
from headrace.types import GenerationRequest, RolloutGroup

MAX_NAMED = 5
"""Missing groups that are named."""
LATE = "late: the batch was made of groups that were whole before it"
"""Why a group is dropped that a batch left behind for good."""


class PausableGenerator(Generator, Interruptible, Protocol):
    """What every generator is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveParts:
    """What waves are made with."""

    generator: PausableGenerator
    verifier: Verifier
    buffer: RolloutBuffer
    stream: PromptStream
    dropped: DroppedGroups
    request: Callable[[Draw], GenerationRequest]
    step: Callable[[], int]
    """The step that is being prepared."""
    tell: Callable[[str, str], None]
    """Kind and message of an event."""


@dataclass(slots=True)
class WaveTimes:
    """Where the time of the step that is being prepared went."""

    began_at: float
    generate_seconds: float = 0.0
    """With something being generated, of waves that have ended."""
    wait_seconds: float = 0.0
    """In which the learner had no batch."""
    last_rollout_at: float = 0.0
    last_verdict_at: float = 0.0
    fill: Mapping[str, float] = field(default_factory=dict)
    """Where the groups were that were under way when the learner got its batch. Many that were
    scored: verifiers hold the others up; many that were ready: the learner does."""


class Waves:
    """All that is under way. Used from one event loop."""

    def __init__(self, parts: WaveParts, *, num_missing: int) -> None:
        self.times = WaveTimes(time.monotonic())
        self.moved_at = time.monotonic()
        """When something last arrived, or last began that is waited for."""
        self.in_flight: dict[Ticket, str] = {}
        """Group ids of what is neither delivered nor dropped."""
        self._parts = parts
        self._num_missing = num_missing
        """Groups that the run still needs and that are not under way."""
        self._refill = asyncio.Event()
        self._generating: set[Ticket] = set()
        self._scoring: dict[Ticket, asyncio.Task[None]] = {}
        self._given_up: set[Ticket] = set()
        self._num_waves = 0
        """That are being generated."""
        self._generating_since = 0.0
        self._has_rollouts = False

    def begin_step(self) -> None:
        """Count times for the next step from now on."""
        self.times = WaveTimes(time.monotonic())

    def note_batch(self) -> None:
        """Note that the learner has a batch, and where the other groups are meanwhile."""
        self.times.wait_seconds = time.monotonic() - self.times.began_at
        num_ready = self._parts.buffer.num_under_way - len(self.in_flight)
        self.times.fill = {
            "controller/groups/num_generating": float(len(self._generating)),
            "controller/groups/num_scoring": float(len(self._scoring)),
            "controller/groups/num_ready": float(num_ready),
        }

    def delay(self, seconds: float) -> str | None:
        """Say what is missing if nothing has arrived for so long; None where nothing is amiss."""
        silence = time.monotonic() - self.moved_at
        if not self.in_flight or silence < seconds:
            return None
        missing = ", ".join(sorted(self.in_flight.values())[:MAX_NAMED])
        return (
            f"nothing arrived for {silence:.0f} s; {len(self.in_flight)} groups are missing, "
            f"among them {missing}"
        )

    def score_seconds(self) -> float:
        """Return the time of this step in which verdicts were all that was waited for."""
        if self._num_waves:
            return 0.0
        since = max(self.times.last_rollout_at, self.times.began_at)
        return max(0.0, self.times.last_verdict_at - since)

    def generate_seconds(self) -> float:
        """Return the time of this step in which something was being generated, up to now."""
        seconds = self.times.generate_seconds
        return seconds + self._generated_for() if self._overlap and self._num_waves else seconds

    async def run(self) -> None:
        """Waits for free slots; unblocked by the controller and by dropped groups.

        Once every group that the run needs is under way, waits for one to be dropped.
        """
        buffer = self._parts.buffer
        # What is generated ends with this loop, however it ends.
        async with asyncio.TaskGroup() as waves:
            while True:
                tickets = await buffer.reserve(buffer.wave_size)
                wanted = min(len(tickets), self._num_missing)
                drawn = (self._parts.stream.draw() for _ in range(wanted))
                draws = [draw for draw in drawn if draw is not None]
                self._num_missing -= len(draws)
                for ticket in tickets[len(draws) :]:
                    await buffer.drop(ticket)
                if not wanted:
                    await self._refill.wait()
                    self._refill.clear()
                    continue
                if not draws:
                    await buffer.close_admission()
                    return
                wave = self._wave(dict(zip(tickets, draws, strict=False)))
                if self._overlap:
                    waves.create_task(wave)
                else:
                    await wave

    async def give_up_late(self) -> None:
        """End what the last batch left behind for good, wherever it is.

        Waits for the generator to obey. What is whole already is dropped here; the rest drops as it
        comes back.
        """
        late = self._parts.buffer.take_late()
        self._given_up.update(ticket for ticket, group in late.items() if group is None)
        for ticket, group in late.items():
            if group is not None:
                await self._drop_late(ticket, group.group_id)
            elif ticket in self._scoring:
                self._scoring[ticket].cancel()
        names = [self.in_flight[t] for t in late if t in self._generating]
        if names:
            # A generator may not know a request yet that it has been handed; such a group, and what
            # was to be given up with it, is dropped when it comes. Its own failure `_wave` meets.
            with contextlib.suppress(GeneratorFailure):
                await self._parts.generator.abort(names)

    @property
    def _overlap(self) -> bool:
        return self._parts.buffer.num_batches > 1

    async def _wave(self, draws: Mapping[Ticket, Draw]) -> None:
        """Generate one wave of groups, each scored as soon as it is whole."""
        self._begin_generating(draws)
        tickets = {draw.group_id: ticket for ticket, draw in draws.items()}
        # A group of tasks: what is being scored ends with this wave, however it ends.
        async with asyncio.TaskGroup() as scoring:
            requests = [self._parts.request(draw) for draw in draws.values()]
            async for group in self._parts.generator.generate(requests):
                self._note_arrival()
                ticket = tickets.pop(group.group_id)
                self._generating.discard(ticket)
                if ticket in self._given_up:
                    await self._drop_late(ticket, group.group_id)
                else:
                    scoring.create_task(self._score(ticket, group))
            if tickets:
                msg = f"the generator ended without groups {', '.join(sorted(tickets))}"
                raise GeneratorFailure(msg)
            # Before any await: the last group's score task must not run before this is noted.
            self._end_generating()

    def _begin_generating(self, draws: Mapping[Ticket, Draw]) -> None:
        now = self.moved_at = time.monotonic()
        if self._num_waves == 0:
            self._generating_since = now
        self._num_waves += 1
        self._generating.update(draws)
        self.in_flight.update({ticket: draw.group_id for ticket, draw in draws.items()})

    def _end_generating(self) -> None:
        self._num_waves -= 1
        self.times.last_rollout_at = time.monotonic()
        if self._num_waves == 0:
            self.times.generate_seconds += self._generated_for()

    def _generated_for(self) -> float:
        return time.monotonic() - max(self._generating_since, self.times.began_at)

    async def _score(self, ticket: Ticket, group: RolloutGroup) -> None:
        """Deliver a group with verdicts that it can be trained on by, or drop it with the reason.

        Raises NoSignalError when a step never comes together.
        """
        scored = await self._scored(ticket, group)
        if scored is None:
            await self._drop_late(ticket, group.group_id)
            return
        self._note_arrival()
        self.times.last_verdict_at = time.monotonic()
        dropped, group_id = self._parts.dropped, group.group_id
        if failure := dropped.failure(scored):
            dropped.note_failure(group_id, failure)
            self._parts.tell("dropped", f"group {group_id} dropped: {failure}")
        elif reason := dropped.lack_of_spread(scored):
            dropped.note_no_spread(group_id, reason)
        elif await self._parts.buffer.deliver(ticket, scored):
            self.in_flight.pop(ticket, None)
            return
        else:
            dropped.note_late(group_id, LATE)
        await self._let_go(ticket)

    async def _scored(self, ticket: Ticket, group: RolloutGroup) -> RolloutGroup | None:
        """Return the group with its verdicts; None where it was given up meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._scoring[ticket] = task
        try:
            return group.scored(await self._parts.verifier.score(group))
        except asyncio.CancelledError:
            # Taken back, if it is `give_up_late` alone that asked for it.
            if ticket in self._given_up and task.uncancel() == 0:
                return None
            raise
        finally:
            del self._scoring[ticket]

    async def _drop_late(self, ticket: Ticket, group_id: str) -> None:
        self._parts.dropped.note_late(group_id, LATE)
        await self._let_go(ticket)

    async def _let_go(self, ticket: Ticket) -> None:
        """Free the slot of a group that will not be trained on, and have another one drawn."""
        self.in_flight.pop(ticket, None)
        self._given_up.discard(ticket)
        self._num_missing += 1
        self._refill.set()
        self._parts.dropped.judge(self._parts.step())
        await self._parts.buffer.drop(ticket)

    def _note_arrival(self) -> None:
        if not self._has_rollouts:
            self._parts.tell("first_rollout", "first rollouts arrived")
            self._has_rollouts = True
        self.moved_at = time.monotonic()
