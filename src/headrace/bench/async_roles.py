"""Roles that stand in for the real ones where `bench async` measures what lies between them.

They answer at once, hold to the Protocols, and compute nothing. `run_controller` puts them around
the real loops, buffer, prompt stream, alarms and ledger.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.buffer import RolloutBuffer
from headrace.config import AlarmConfig
from headrace.controller import Controller, Parts, Plan
from headrace.data import Ledger, PromptStream
from headrace.monitors import Alarms
from headrace.roles import Learner, Verifier, WeightSync
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
from headrace.waves import PausableGenerator

NUM_TOKENS = 16
"""Of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who plays."""

    generator: PausableGenerator
    verifier: Verifier
    learner: Learner
    weight_sync: WeightSync
    buffer: RolloutBuffer


IN_MEMORY = Path(":memory:")
"""A ledger that waits for no disk."""


def run_controller(
    cast: Cast,
    *,
    num_steps: int,
    groups_per_step: int,
    group_size: int,
    ledger_path: Path = IN_MEMORY,
) -> None:
    """Train for ``num_steps``, with as many prompts as that takes and half as many again."""
    num_prompts = num_steps * groups_per_step * 3 // 2
    with Ledger(ledger_path) as ledger:
        plan = Plan(
            seed=0,
            num_steps=num_steps,
            groups_per_step=groups_per_step,
            group_size=group_size,
            sampling=SamplingParams(max_tokens=NUM_TOKENS),
            checkpoint_every=num_steps,
        )
        parts = Parts(
            generator=cast.generator,
            verifier=cast.verifier,
            learner=cast.learner,
            weight_sync=cast.weight_sync,
            monitor=SilentMonitor(),
            buffer=cast.buffer,
            stream=PromptStream(
                _prompts(num_prompts), seed=0, shuffle=False, num_epochs=1, ledger=ledger
            ),
            ledger=ledger,
            checkpoints=NoCheckpoints(),
            alarms=Alarms(AlarmConfig()),
        )
        asyncio.run(Controller(plan, parts).run())


def _prompts(count: int) -> Sequence[Prompt]:
    return [
        Prompt(prompt_id=f"p{n}", source="bench", text="", token_ids=(1, 2)) for n in range(count)
    ]


def rollouts(group_size: int, spans: Sequence[VersionSpan]) -> tuple[Rollout, ...]:
    """Return rollouts of a group whose tokens ``spans`` cover."""
    length = spans[-1].end
    return tuple(
        Rollout(
            rollout_index=index,
            completion_ids=(3,) * length,
            loss_mask=(True,) * length,
            generator_logprobs=(-0.5,) * length,
            version_spans=tuple(spans),
            finish_reason="stop",
            text="",
        )
        for index in range(group_size)
    )


class InstantGenerator:
    """Has every group at once: the same tokens, labelled with the version last loaded."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
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
        self._rollouts = rollouts(self._group_size, [span])

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

    def __init__(self, group_size: int) -> None:
        self._verdicts = tuple(
            Verdict(
                outcome=Outcome.PASS if index % 2 else Outcome.WRONG,
                reward=float(index % 2),
                verifier="instant",
                components={"answer": float(index % 2)},
            )
            for index in range(group_size)
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

    def __init__(self, generator: PausableGenerator) -> None:
        self._generator = generator

    async def publish(self, policy_version: int) -> Awaitable[None]:
        """See `WeightSync`."""
        update = WeightUpdate(policy_version=policy_version, tensors={}, checksum=0)
        return self._generator.update_weights(update)


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
