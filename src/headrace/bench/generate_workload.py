"""The work of `bench generate`, the same for every engine, and headrace's own engine for it."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from headrace.bench.generate_records import GeneratePlan
from headrace.types import GenerationRequest, Prompt, SamplingParams

if TYPE_CHECKING:
    from headrace.compute import ComputeThread
    from headrace.generators import TorchGenerator
    from headrace.models.decoder_config import DecoderConfig


def prompts(plan: GeneratePlan, vocabulary: int) -> list[list[int]]:
    """Return the token ids of every prompt: random, and the same for every engine."""
    source = random.Random(0)  # noqa: S311 - test prompts, not secrets
    ids = range(vocabulary // 10, vocabulary)
    return [source.choices(ids, k=plan.num_prompt_tokens) for _ in range(plan.num_groups)]


def lengths(plan: GeneratePlan) -> list[int]:
    """Return the new tokens of each group's rollouts: equal, or drawn log-normal.

    The distribution has ``num_new_tokens`` as its mean; what is drawn is cut at 8 times that, so
    with a large ``length_sigma`` the lengths are somewhat shorter on average.
    """
    if plan.length_sigma == 0.0:
        return [plan.num_new_tokens] * plan.num_groups
    source = random.Random(1)  # noqa: S311 - as above
    drawn = [source.lognormvariate(0.0, plan.length_sigma) for _ in range(plan.num_groups)]
    scale = plan.num_new_tokens / math.exp(plan.length_sigma**2 / 2)
    return [max(1, min(round(scale * length), 8 * plan.num_new_tokens)) for length in drawn]


def requests(plan: GeneratePlan, vocabulary: int, seed: int) -> list[GenerationRequest]:
    """Return what headrace is asked for: the prompts of every engine, at temperature 1."""
    return [
        GenerationRequest(
            group_id=str(index),
            prompt=Prompt(prompt_id=str(index), source="bench", text="", token_ids=tuple(ids)),
            group_size=plan.group_size,
            sampling=SamplingParams(max_tokens=length),
            seed=seed,
        )
        for index, (ids, length) in enumerate(
            zip(prompts(plan, vocabulary), lengths(plan), strict=True)
        )
    ]


def engine_of(plan: GeneratePlan, config: DecoderConfig, compute: ComputeThread) -> TorchGenerator:
    """Return the torch engine that samples ``plan``; nobody reads its texts."""
    from headrace.generators import TorchGenerator
    from headrace.runtime.devices import CPU
    from headrace.runtime.precision import resolve_dtype

    return TorchGenerator(
        config,
        decode=lambda _: "",
        compute=compute,
        dtype=resolve_dtype(plan.dtype, CPU),
        max_concurrent_rollouts=plan.max_concurrent_rollouts,
        is_quantized=plan.dtype == "int8",
    )
