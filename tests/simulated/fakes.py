"""Stand-ins for the roles: small, honest about the Protocols, and quick.

The buffer, the ledger and the prompt stream are the real ones. Everything that happens goes into
one journal, so that a test can say what came before what.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.buffer import RolloutBuffer
from headrace.checkpoints import Write
from headrace.config import AlarmConfig
from headrace.controller import Controller, Parts, Plan, RunOutcome
from headrace.data import Ledger, PromptStream
from headrace.errors import GeneratorFailure, RunError
from headrace.held_out import EvaluationPlan
from headrace.monitors import Alarms
from headrace.types import (
    EvaluationRecord,
    GenerationRequest,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    RunEvent,
    SamplingParams,
    StepRecord,
    StepResult,
    Verdict,
    VersionSpan,
    WeightUpdate,
)

HANG_SECONDS = 120.0
Journal = list[tuple[str, Any]]
Rewards = Callable[[RolloutGroup], Sequence[float | None]]


def prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(prompt_id=f"p{n:03d}", source="train", text=f"{n}", token_ids=(1, 2), answer="1")
        for n in range(count)
    )


@dataclass
class FakeGenerator:
    """Two tokens a rollout, labelled with the version it was last given."""

    journal: Journal
    seconds: float = 0.0
    stuck: Callable[[str], bool] = lambda _: False
    """Groups that never come."""
    lost: Callable[[str], bool] = lambda _: False
    """Groups it forgets, ending all the same."""
    failure: Exception | None = None
    fail_after: int = 0
    version: int | None = None
    num_groups: int = 0
    closed: bool = False

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        if self.version is None:
            msg = "asked to generate before the first update_weights"
            raise GeneratorFailure(msg)
        self.journal.append(("generate", [request.group_id for request in requests]))
        for request in requests:
            await asyncio.sleep(self.seconds)
            if self.failure is not None and self.num_groups >= self.fail_after:
                raise self.failure
            if self.stuck(request.group_id):
                await asyncio.Event().wait()
            self.num_groups += 1
            if not self.lost(request.group_id):
                yield self._group(request)

    def _group(self, request: GenerationRequest) -> RolloutGroup:
        assert self.version is not None
        spans = (VersionSpan(policy_version=self.version, start=0, end=2),)
        return RolloutGroup(
            group_id=request.group_id,
            prompt=request.prompt,
            rollouts=tuple(
                Rollout(
                    rollout_index=index,
                    completion_ids=(3, 4),
                    loss_mask=(True, True),
                    generator_logprobs=(-0.5, -0.5),
                    version_spans=spans,
                    finish_reason="stop",
                    text="ab",
                )
                for index in range(request.group_size)
            ),
            sampling=request.sampling,
        )

    async def update_weights(self, update: WeightUpdate) -> None:
        self.version = update.policy_version

    async def pause(self) -> None:
        """Nothing is sampled between two groups."""

    async def resume(self) -> None:
        """See `pause`."""

    async def abort(self, group_ids: Sequence[str]) -> None:
        raise NotImplementedError(group_ids)

    def metrics(self) -> Mapping[str, float]:
        return {"generator/engine/num_steps": float(self.num_groups)}

    async def close(self) -> None:
        self.closed = True


def alternating(group: RolloutGroup) -> Sequence[float | None]:
    return [float(index % 2) for index in range(group.group_size)]


@dataclass
class FakeVerifier:
    """Pays what ``rewards`` says; None is a failure of ours."""

    rewards: Rewards = alternating
    seconds: Callable[[str], float] = lambda _: 0.0
    failure: Exception | None = None
    fail_on: Callable[[str], bool] = lambda _: True
    in_flight: set[str] = field(default_factory=set)

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        self.in_flight.add(group.group_id)
        try:
            await asyncio.sleep(self.seconds(group.group_id))
        finally:
            self.in_flight.discard(group.group_id)
        if self.failure is not None and self.fail_on(group.group_id):
            raise self.failure
        return tuple(_verdict(reward) for reward in self.rewards(group))

    def metrics(self) -> Mapping[str, float]:
        return {"verifier/kind/fake/slots/num_jobs": 1.0}

    async def close(self) -> None:
        self.in_flight.clear()


def _verdict(reward: float | None) -> Verdict:
    if reward is None:
        detail = "the judge is down"
        return Verdict(outcome=Outcome.INFRA, reward=None, verifier="fake", detail=detail)
    outcome = Outcome.PASS if reward >= 1 else Outcome.WRONG
    return Verdict(outcome=outcome, reward=reward, verifier="fake")


@dataclass
class FakeLearner:
    """One update a step, unless told otherwise."""

    journal: Journal
    seconds: float = 0.0
    updates: Callable[[int], int] = lambda _: 1
    failure: Exception | None = None
    fail_at: int = 0
    version: int = 0
    num_steps: int = 0
    batches: list[tuple[RolloutGroup, ...]] = field(default_factory=list)
    keep_batches: bool = True
    stuck_at: int | None = None

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        await asyncio.sleep(self.seconds)
        self.num_steps += 1
        if self.num_steps == self.stuck_at:
            await asyncio.Event().wait()
        if self.failure is not None and self.num_steps >= self.fail_at:
            raise self.failure
        updates = self.updates(self.num_steps)
        self.version += updates
        if self.keep_batches:
            self.batches.append(tuple(groups))
        self.journal.append(("step", self.version))
        return StepResult(policy_version=self.version, num_updates=updates, metrics={})

    async def save(self, directory: Path) -> None:
        (directory / "version").write_text(str(self.version), encoding="utf-8")

    async def load(self, directory: Path) -> int:
        self.version = int((directory / "version").read_text(encoding="utf-8"))
        return self.version

    async def close(self) -> None:
        self.batches.clear()


@dataclass
class FakeWeightSync:
    """Hands over a version and no tensors."""

    journal: Journal
    generator: FakeGenerator
    copy_seconds: float = 0.0
    """In which the learner must not step."""
    seconds: Callable[[int], float] = lambda _: 0.0
    """Beside the next step, by version."""
    failure: Exception | None = None
    fail_at: int = 1

    async def publish(self, policy_version: int) -> Awaitable[None]:
        await asyncio.sleep(self.copy_seconds)
        self.journal.append(("copy", policy_version))
        return self._bring(policy_version)

    async def _bring(self, policy_version: int) -> None:
        await asyncio.sleep(self.seconds(policy_version))
        if self.failure is not None and policy_version == self.fail_at:
            raise self.failure
        update = WeightUpdate(policy_version=policy_version, tensors={}, checksum=0)
        await self.generator.update_weights(update)
        self.journal.append(("publish", policy_version))


@dataclass
class FakeMonitor:
    """Remembers everything, or only counts."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    on_each_step: Callable[[StepRecord], None] = lambda _: None
    on_each_event: Callable[[RunEvent], None] = lambda _: None
    keep: bool = True

    def on_step(self, record: StepRecord) -> None:
        if self.keep:
            self.steps.append(record)
        self.on_each_step(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)

    def on_event(self, event: RunEvent) -> None:
        if self.keep:
            self.events.append(event)
        self.on_each_event(event)

    def close(self) -> None:
        self.steps.clear()

    def messages(self, kind: str) -> list[str]:
        return [event.message for event in self.events if event.kind == kind]


@dataclass
class FakeCheckpoints:
    """Says which step was kept."""

    journal: Journal
    seconds: float = 0.0
    """Before training goes on."""
    failure: Exception | None = None
    writing_seconds: float = 0.0
    """While training goes on."""
    writing_failure: Exception | None = None

    async def begin(self, step: int, policy_version: int, write: Write) -> asyncio.Task[None]:
        del write, policy_version
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        return asyncio.create_task(self._finish(step))

    async def _finish(self, step: int) -> None:
        self.journal.append(("copied", step))
        await asyncio.sleep(self.writing_seconds)
        if self.writing_failure is not None:
            raise self.writing_failure
        self.journal.append(("checkpoint", step))


class JournalBuffer(RolloutBuffer):
    """The real buffer, written down."""

    journal: Journal

    async def release(self, count: int) -> None:
        self.journal.append(("release", count))
        await super().release(count)


class JournalLedger(Ledger):
    """The real ledger, in memory and written down."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(Path(":memory:"))
        self.journal = journal
        self.settled_groups: list[tuple[int, str, str | None]] = []
        self.seconds = 0.0
        """What the disk takes."""
        self.refuses: int | None = None
        """A step that does not fit on it."""

    def settle(self, step: int, trained: Sequence[str], dropped: Mapping[str, str]) -> None:
        time.sleep(self.seconds)
        if step == self.refuses:
            msg = f"step {step}: the disk is full"
            raise RunError(msg)
        super().settle(step, trained, dropped)
        self.journal.append(("settle", step))
        self.settled_groups += [(step, group_id, None) for group_id in trained]
        self.settled_groups += [(step, group_id, reason) for group_id, reason in dropped.items()]


@dataclass
class World:
    """Everything a controller needs, with real bookkeeping and fake work."""

    num_steps: int = 3
    groups_per_step: int = 2
    group_size: int = 4
    max_staleness: int = 0
    num_prompts: int = 100
    num_epochs: int | None = None
    checkpoint_every: int = 100
    start_step: int = 0
    start_version: int = 0
    max_refills: int | None = None
    pipeline: dict[str, Any] = field(default_factory=dict)
    """Of the buffer: depth, late, surplus."""
    evaluation: EvaluationPlan | None = None
    watch_seconds: float = 60.0
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    journal: Journal = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = FakeGenerator(self.journal)
        self.verifier = FakeVerifier()
        self.learner = FakeLearner(self.journal, version=self.start_version)
        self.weight_sync = FakeWeightSync(self.journal, self.generator)
        self.monitor = FakeMonitor()
        self.checkpoints = FakeCheckpoints(self.journal)
        self.ledger = JournalLedger(self.journal)
        self.buffer = JournalBuffer(
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            **self.pipeline,
        )
        self.buffer.journal = self.journal

    def controller(self) -> Controller:
        plan = Plan(
            seed=0,
            num_steps=self.num_steps,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            sampling=SamplingParams(max_tokens=4),
            checkpoint_every=self.checkpoint_every,
            max_refills=self.max_refills,
            start_step=self.start_step,
            start_version=self.start_version,
            evaluation=self.evaluation,
        )
        parts = Parts(
            generator=self.generator,
            verifier=self.verifier,
            learner=self.learner,
            weight_sync=replace(self.weight_sync, generator=self.generator),
            monitor=self.monitor,
            buffer=self.buffer,
            stream=PromptStream(
                prompts(self.num_prompts),
                seed=0,
                shuffle=False,
                num_epochs=self.num_epochs,
                ledger=self.ledger,
            ),
            ledger=self.ledger,
            checkpoints=self.checkpoints,
            alarms=Alarms(self.alarms),
        )
        return Controller(plan, parts, watch_seconds=self.watch_seconds)

    def run(self) -> RunOutcome:
        """Run to the end, prove that no task is left behind, and close the ledger."""
        return asyncio.run(self._run(self.controller()))

    async def _run(self, controller: Controller) -> RunOutcome:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                return await controller.run()
        finally:
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            self.ledger.close()
            assert not left, f"tasks were left running: {left}"

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.journal]

    def trained(self) -> list[str]:
        return [group_id for _, group_id, reason in self.ledger.settled_groups if reason is None]

    def dropped(self) -> list[str]:
        return [group_id for _, group_id, reason in self.ledger.settled_groups if reason]


def evaluation_plan(
    *, every: int, num_prompts: int = 2, interleaved: bool = False
) -> EvaluationPlan:
    sampled = SamplingParams(temperature=0.7, max_tokens=4)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    return EvaluationPlan(
        prompts=prompts(num_prompts),
        every=every,
        modes={"greedy": (1, greedy), "sampled": (4, sampled)},
        pass_at_k=(1, 4),
        interleaved=interleaved,
    )
