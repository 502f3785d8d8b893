"""What is measured on prompts that are not trained on: held-out ones, and canaries.

A canary is a task that cannot be solved: whatever passes it has cheated the verifier. Canaries are
sampled as in training, because that is where cheating is learnt, and no metric of held-out quality
counts them.

An evaluation is made while nothing is trained, or beside training (`InterleavedEvaluation`). Owns:
every one says which policy versions sampled its tokens, and one that is made beside training holds
up neither the learner nor, for longer than one portion takes, what is generated for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.buffer import tokens_by_version
from headrace.monitors import EvaluationMode, canary_metrics, evaluation_metrics
from headrace.roles import Generator, Verifier
from headrace.types import (
    EvaluationRecord,
    GenerationRequest,
    Prompt,
    RolloutGroup,
    SamplingParams,
    derive_seed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    """How canaries are sampled."""

    prompts: Sequence[Prompt]
    num_rollouts: int
    """Of each."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is measured, and when."""

    prompts: Sequence[Prompt]
    every: int
    modes: Mapping[EvaluationMode, tuple[int, SamplingParams]]
    """Mode -> rollouts of each prompt and how they are sampled."""
    pass_at_k: tuple[int, ...]
    canaries: CanaryPlan | None = None
    interleaved: bool = False
    """Training goes on beside all evaluations but the first and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation, and the scored canaries that its record does not hold."""

    record: EvaluationRecord
    canaries: Sequence[RolloutGroup]


async def evaluate(
    plan: EvaluationPlan,
    generator: Generator,
    verifier: Verifier,
    seed: int,
    *,
    step: int,
    policy_version: int,
    portion: int | None = None,
) -> Evaluated:
    """Generate and score what ``plan`` says after ``step``, at ``policy_version`` or newer ones.

    ``portion``: groups that the generator is asked for at once; None asks for all of a mode.
    """
    began = time.monotonic()
    groups, metrics = await evaluate_prompts(plan, generator, verifier, seed, portion)
    canaries: Sequence[RolloutGroup] = ()
    if plan.canaries is not None:
        canaries = await _try_canaries(plan.canaries, generator, verifier, seed, portion)
        metrics |= canary_metrics(canaries)
    versions = tokens_by_version([*groups, *canaries])
    if versions:
        metrics["generator/evaluation_version/min"] = float(min(versions))
        metrics["generator/evaluation_version/max"] = float(max(versions))
    metrics["controller/time/eval_seconds"] = time.monotonic() - began
    record = EvaluationRecord(
        step=step, policy_version=policy_version, metrics=metrics, groups=tuple(groups)
    )
    return Evaluated(record=record, canaries=canaries)


class InterleavedEvaluation:
    """At most one evaluation beside training. Used from one event loop."""

    def __init__(self) -> None:
        self._under_way: asyncio.Task[Evaluated] | None = None

    def give_up(self) -> bool:
        """End the one that is under way, and return whether there was one."""
        return self._under_way is not None and self._under_way.cancel()

    def begin(self, task: asyncio.Task[Evaluated]) -> None:
        """Take charge of ``task``. Whoever owns it hears of its failure first."""
        assert self._under_way is None, "an evaluation is under way already"
        self._under_way = task

    async def finished(self, *, wait: bool) -> Evaluated | None:
        """Return the evaluation that was under way, once; None where there is none to return.

        ``wait`` until it is there; unblocked by the generator and the verifier.
        """
        if self._under_way is None or not (wait or self._under_way.done()):
            return None
        evaluated = await self._under_way
        self._under_way = None
        return evaluated


async def evaluate_prompts(
    plan: EvaluationPlan,
    generator: Generator,
    verifier: Verifier,
    seed: int,
    portion: int | None = None,
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Generate and score every held-out prompt in every mode; return groups and metrics."""
    groups: list[RolloutGroup] = []
    metrics: dict[str, float] = {}
    for mode, (count, sampling) in plan.modes.items():
        requests = [_request(mode, prompt, count, sampling, seed) for prompt in plan.prompts]
        scored = await _generate_and_score(requests, generator, verifier, portion)
        pass_at_k = (1,) if mode == "greedy" else plan.pass_at_k
        metrics |= evaluation_metrics(scored, mode, pass_at_k)
        groups += scored
    return groups, metrics


async def _try_canaries(
    plan: CanaryPlan, generator: Generator, verifier: Verifier, seed: int, portion: int | None
) -> list[RolloutGroup]:
    """Generate and score every canary; return the scored groups."""
    requests = [
        _request("canary", prompt, plan.num_rollouts, plan.sampling, seed)
        for prompt in plan.prompts
    ]
    return await _generate_and_score(requests, generator, verifier, portion)


def _request(
    mode: str, prompt: Prompt, group_size: int, sampling: SamplingParams, seed: int
) -> GenerationRequest:
    return GenerationRequest(
        group_id=f"eval/{mode}/{prompt.prompt_id}",
        prompt=prompt,
        group_size=group_size,
        sampling=sampling,
        # The same at every evaluation, so that two of them differ by the policy alone.
        seed=derive_seed(seed, "eval", mode, prompt.prompt_id),
    )


async def _generate_and_score(
    requests: Sequence[GenerationRequest],
    generator: Generator,
    verifier: Verifier,
    portion: int | None,
) -> list[RolloutGroup]:
    """Return the scored groups in the order of ``requests``, made portion by portion."""
    scored: list[RolloutGroup] = []
    size = portion or max(len(requests), 1)
    for first in range(0, len(requests), size):
        asked = requests[first : first + size]
        groups = {group.group_id: group async for group in generator.generate(asked)}
        ordered = [groups[request.group_id] for request in asked]
        verdicts = await asyncio.gather(*(verifier.score(group) for group in ordered))
        scored += [group.scored(v) for group, v in zip(ordered, verdicts, strict=True)]
    return scored
