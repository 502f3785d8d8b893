"""The part of `bench async` about control: what controller, waves and buffer cost by themselves.

Roles that answer at once stand in for generator, verifier, learner and weight sync; everything
between them is the real thing: loops, buffer, prompt stream, metrics, alarms, and a ledger on the
disk. ``buffer_groups_per_second``: groups drawn, generated, scored, delivered, trained on and
settled in a second of one thread, two batches under way. ``step_control_ms``: between the end of
one learner step of 256 groups and the beginning of the next, whose batch lies there whole; the
median. Not measured: writing rollouts and metrics to files, which is the monitors' part.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.result import Figures, Peers, Progress
from headrace.buffer import RolloutBuffer
from headrace.config import AlarmConfig
from headrace.controller import Controller, Parts, Plan
from headrace.data import Ledger, PromptStream
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

NUM_STEPS = 40
GROUPS_PER_STEP = 256
GROUP_SIZE = 8
NUM_TOKENS = 16

_LEARNER_SECONDS = 0.1
"""Of a step whose end the next batch waits for: longer than 256 groups take to be delivered."""


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Return the figures of control."""
    rate = groups_per_second()
    progress(f"control: {rate:.0f} groups a second")
    gaps = control_gaps()
    overhead = 1e3 * statistics.median(gaps)
    progress(f"control: {overhead:.2f} ms between two steps of {GROUPS_PER_STEP} groups")
    return {"buffer_groups_per_second": rate, "step_control_ms": overhead}


def groups_per_second(num_steps: int = NUM_STEPS) -> float:
    """Return how many groups go through the controller in a second; the best of three runs."""
    seconds = []
    for _ in range(3):
        learner = InstantLearner(seconds=0.0)
        began = time.perf_counter()
        _run(learner, num_steps)
        seconds.append(time.perf_counter() - began)
    return num_steps * GROUPS_PER_STEP / min(seconds)


def control_gaps(num_steps: int = NUM_STEPS) -> Sequence[float]:
    """Return the seconds between each two steps whose batches were whole beforehand."""
    learner = InstantLearner(seconds=_LEARNER_SECONDS)
    _run(learner, num_steps)
    ends, begins = learner.ended_at[:-1], learner.began_at[1:]
    return [begin - end for end, begin in zip(ends, begins, strict=True)]


def _run(learner: InstantLearner, num_steps: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder,
        Ledger(Path(folder) / "ledger.sqlite") as ledger,
    ):
        asyncio.run(_controller(learner, num_steps, ledger).run())


def _controller(learner: InstantLearner, num_steps: int, ledger: Ledger) -> Controller:
    generator = InstantGenerator()
    return Controller(
        Plan(
            seed=0,
            num_steps=num_steps,
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_tokens=NUM_TOKENS),
            checkpoint_every=num_steps,
        ),
        Parts(
            generator=generator,
            verifier=InstantVerifier(),
            learner=learner,
            weight_sync=VersionSync(generator),
            monitor=SilentMonitor(),
            buffer=RolloutBuffer(groups_per_step=GROUPS_PER_STEP, max_staleness=1),
            stream=PromptStream(
                _prompts(num_steps * GROUPS_PER_STEP),
                seed=0,
                shuffle=False,
                num_epochs=1,
                ledger=ledger,
            ),
            ledger=ledger,
            checkpoints=NoCheckpoints(),
            alarms=Alarms(AlarmConfig()),
        ),
    )


def _prompts(count: int) -> Sequence[Prompt]:
    return [
        Prompt(prompt_id=f"p{n}", source="bench", text="", token_ids=(1, 2)) for n in range(count)
    ]


class InstantGenerator:
    """Has every group at once: the same tokens, labelled with the version last loaded."""

    def __init__(self) -> None:
        self._rollouts: tuple[Rollout, ...] = ()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """See `Generator`."""
        for request in requests:
            yield RolloutGroup(
                group_id=request.group_id,
                prompt=request.prompt,
                rollouts=self._rollouts,
                sampling=request.sampling,
            )

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`."""
        span = VersionSpan(policy_version=update.policy_version, start=0, end=NUM_TOKENS)
        self._rollouts = tuple(
            Rollout(
                rollout_index=index,
                completion_ids=(3,) * NUM_TOKENS,
                loss_mask=(True,) * NUM_TOKENS,
                generator_logprobs=(-0.5,) * NUM_TOKENS,
                version_spans=(span,),
                finish_reason="stop",
                text="",
            )
            for index in range(GROUP_SIZE)
        )

    async def pause(self) -> None:
        """Nothing is ever being sampled."""

    async def resume(self) -> None:
        """See `pause`."""

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `pause`."""

    def metrics(self) -> Mapping[str, float]:
        """There are none."""
        return {}

    async def close(self) -> None:
        """Holds nothing."""


class InstantVerifier:
    """Pays every other rollout."""

    def __init__(self) -> None:
        self._verdicts = tuple(
            Verdict(
                outcome=Outcome.PASS if index % 2 else Outcome.WRONG,
                reward=float(index % 2),
                verifier="instant",
                components={"answer": float(index % 2)},
            )
            for index in range(GROUP_SIZE)
        )

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """See `Verifier`."""
        del group
        return self._verdicts

    def metrics(self) -> Mapping[str, float]:
        """There are none."""
        return {}

    async def close(self) -> None:
        """Holds nothing."""


@dataclass
class InstantLearner:
    """Counts versions, and notes when it is asked."""

    seconds: float
    """Of a step."""
    began_at: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    _versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner`."""
        del groups
        self.began_at.append(time.perf_counter())
        if self.seconds:
            await asyncio.sleep(self.seconds)
        self.ended_at.append(time.perf_counter())
        return StepResult(policy_version=next(self._versions), num_updates=1, metrics={})

    async def save(self, directory: Path) -> None:
        """Nothing is kept."""

    async def load(self, directory: Path) -> int:
        """Nothing is kept."""
        del directory
        return 0

    async def close(self) -> None:
        """Holds nothing."""


class VersionSync:
    """Hands over a version without tensors."""

    def __init__(self, generator: InstantGenerator) -> None:
        self._generator = generator

    async def publish(self, policy_version: int) -> None:
        """See `WeightSync`."""
        update = WeightUpdate(policy_version=policy_version, tensors={}, checksum=0)
        await self._generator.update_weights(update)


class SilentMonitor:
    """Sees and does not tell."""

    def on_step(self, record: StepRecord) -> None:
        """See `Monitor`."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """See `Monitor`."""

    def on_event(self, event: RunEvent) -> None:
        """See `Monitor`."""

    def close(self) -> None:
        """See `Monitor`."""


class NoCheckpoints:
    """Keeps none."""

    async def begin(self, step: int, policy_version: int, write: object) -> asyncio.Task[Any]:
        """See `headrace.checkpoints.Checkpoints`."""
        del step, policy_version, write
        return asyncio.create_task(asyncio.sleep(0))
