"""How far the log-probs that the generator records are from those of others, for the same tokens.

Two references: transformers on each whole rollout, in the generator's precision
(`agreement_hf_*`), and the learner's own path in fp32, which computes each group's prompt once
(`agreement_learner_*`). All on the same checkpoint, in one process; in nats, over every sampled
token. Not measured: speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.generate_records import SHORT_NAMES, GeneratePlan
from headrace.bench.generate_workload import engine_of, requests
from headrace.types import RolloutGroup

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.decoder import Decoder

WORKLOAD = GeneratePlan(engine="headrace", model="", num_groups=4, group_size=4)
"""What is sampled: random prompts, so that the distributions are wide."""


def agreement(
    model: Path, *, dtypes: Sequence[str] = tuple(SHORT_NAMES), plan: GeneratePlan = WORKLOAD
) -> Mapping[str, float]:
    """Return ``agreement_{hf,learner}_{fp32,bf16,int8}_{mean,max}`` of the checkpoint in ``model``.

    The absolute difference of log-probs. transformers has no eight bits of the same kind.
    """
    figures: dict[str, float] = {}
    for dtype in dtypes:
        figures |= _of_dtype(replace(plan, model=str(model), dtype=dtype))
    return figures


def _of_dtype(plan: GeneratePlan) -> dict[str, float]:
    import torch

    from headrace.models.checkpoint import load_decoder
    from headrace.runtime.devices import CPU
    from headrace.runtime.precision import resolve_dtype

    model, kind = Path(plan.model), SHORT_NAMES[plan.dtype]
    groups = asyncio.run(sample(plan, load_decoder(model, resolve_dtype(plan.dtype, CPU))))
    figures = _figures(
        f"agreement_learner_{kind}", _learner_gaps(load_decoder(model, torch.float32), groups)
    )
    if plan.dtype != "int8":
        figures |= _figures(f"agreement_hf_{kind}", _transformers_gaps(plan, groups))
    return figures


def _figures(name: str, gaps: Sequence[Tensor]) -> dict[str, float]:
    import torch

    every = torch.cat(list(gaps)).abs()
    return {f"{name}_mean": float(every.mean()), f"{name}_max": float(every.max())}


async def sample(plan: GeneratePlan, decoder: Decoder) -> list[RolloutGroup]:
    """Return a group for each prompt, sampled by the torch engine at temperature 1."""
    from headrace.compute import ComputeThread
    from headrace.models.weights import weight_update

    compute = ComputeThread("agreement", plan.num_threads)
    generator = engine_of(plan, decoder.config, compute)
    tensors = {name: weight.detach() for name, weight in decoder.named_parameters()}
    asked = requests(plan, decoder.config.vocab_size, seed=0)
    try:
        await generator.update_weights(weight_update(0, tensors))
        return [group async for group in generator.generate(asked)]
    finally:
        await generator.close()
        compute.close()


def _transformers_gaps(plan: GeneratePlan, groups: Sequence[RolloutGroup]) -> list[Tensor]:
    """Return differences [T] to transformers for each rollout, which it gets whole and alone."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=getattr(torch, plan.dtype))
    gaps = []
    for group in groups:
        prompt = group.prompt.token_ids
        for rollout in group.rollouts:
            ids = torch.tensor([[*prompt, *rollout.completion_ids]])
            with torch.no_grad():
                logits = theirs(ids).logits[0, len(prompt) - 1 : -1].float()
            chosen = torch.tensor(rollout.completion_ids).unsqueeze(1)
            expected = torch.log_softmax(logits, -1).gather(1, chosen).squeeze(1)
            gaps.append(expected - torch.tensor(rollout.generator_logprobs))
    return gaps


def _learner_gaps(decoder: Decoder, groups: Sequence[RolloutGroup]) -> list[Tensor]:
    """Return differences to the learner for the tokens of each of its micro-batches."""
    import torch

    from headrace.learners.loss import token_logprobs
    from headrace.learners.packing import microbatches
    from headrace.learners.selection import unweighted

    rows = unweighted(groups)
    longest = max(group.num_tokens for group in rows)
    with torch.no_grad():
        return [
            token_logprobs(decoder, batch, 1.0)[0] - batch.generator_logprobs
            for batch in microbatches(rows, max_tokens=2 * longest, device=torch.device("cpu"))
        ]
