"""What is measured on prompts that are not trained on: held-out ones, and canaries.

A canary is a task that cannot be solved: whatever passes it has cheated the verifier. Canaries are
sampled as in training, because that is where cheating is learnt, and no metric of held-out quality
counts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.monitors import EvaluationMode, evaluation_metrics
from headrace.roles import Generator, Verifier
from headrace.types import GenerationRequest, Prompt, RolloutGroup, SamplingParams, derive_seed


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


async def evaluate_prompts(
    plan: EvaluationPlan, generator: Generator, verifier: Verifier, seed: int
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """Generate and score every held-out prompt in every mode; return groups and metrics."""
    groups: list[RolloutGroup] = []
    metrics: dict[str, float] = {}
    for mode, (count, sampling) in plan.modes.items():
        requests = [_request(mode, prompt, count, sampling, seed) for prompt in plan.prompts]
        scored = await _generate_and_score(requests, generator, verifier)
        pass_at_k = (1,) if mode == "greedy" else plan.pass_at_k
        metrics |= evaluation_metrics(scored, mode, pass_at_k)
        groups += scored
    return groups, metrics


async def try_canaries(
    plan: CanaryPlan, generator: Generator, verifier: Verifier, seed: int
) -> list[RolloutGroup]:
    """Generate and score every canary; return the scored groups."""
    requests = [
        _request("canary", prompt, plan.num_rollouts, plan.sampling, seed)
        for prompt in plan.prompts
    ]
    return await _generate_and_score(requests, generator, verifier)


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
    requests: Sequence[GenerationRequest], generator: Generator, verifier: Verifier
) -> list[RolloutGroup]:
    """Return the scored groups in the order of ``requests``."""
    groups = {group.group_id: group async for group in generator.generate(requests)}
    ordered = [groups[request.group_id] for request in requests]
    verdicts = await asyncio.gather(*(verifier.score(group) for group in ordered))
    return [group.scored(v) for group, v in zip(ordered, verdicts, strict=True)]
