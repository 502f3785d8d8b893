"""`batch_invariant` on real models: the bundled one, and SmolLM2 where it was fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from headrace.compute import ComputeThread
from headrace.errors import ModelError
from headrace.generators import TorchGenerator
from headrace.models.catalogue import resolve_model
from headrace.models.checkpoint import load_decoder
from headrace.models.weights import weight_update
from headrace.types import GenerationRequest, Prompt, SamplingParams

Bits = dict[tuple[str, int], tuple[tuple[int, ...], tuple[float, ...]]]
"""Tokens and log-probs by group and rollout."""


def requests_for(vocabulary: int, *, num_groups: int, max_tokens: int) -> list[GenerationRequest]:
    """Groups of one to five rollouts whose prompts and completions differ in length."""
    source = torch.Generator().manual_seed(0)
    requests = []
    for index in range(num_groups):
        length = int(torch.randint(3, 40, (), generator=source))
        ids = torch.randint(3, vocabulary, (length,), generator=source).tolist()
        tokens = int(torch.randint(1, max_tokens + 1, (), generator=source))
        requests.append(
            GenerationRequest(
                group_id=str(index),
                prompt=Prompt(prompt_id=str(index), source="test", text="", token_ids=tuple(ids)),
                group_size=1 + index % 5,
                sampling=SamplingParams(max_tokens=tokens),
                seed=index,
            )
        )
    return requests


async def sampled(
    name: str, dtype: torch.dtype, calls: Sequence[Sequence[GenerationRequest]], room: int
) -> list[Bits]:
    """Return what each of ``calls`` gives, one after another, with prompts in parts of ``room``."""
    decoder = load_decoder(resolve_model(name), dtype).requires_grad_(requires_grad=False)
    update = weight_update(0, dict(decoder.named_parameters()))
    compute = ComputeThread("generator", 1)
    generator = TorchGenerator(
        decoder.config,
        decode=lambda _: "",
        compute=compute,
        dtype=dtype,
        max_prefill_tokens=room,
        batch_invariant=True,
    )
    found: list[Bits] = []
    for requests in calls:
        await generator.update_weights(update)
        found.append(
            {
                (group.group_id, r.rollout_index): (r.completion_ids, r.generator_logprobs)
                async for group in generator.generate(requests)
                for r in group.rollouts
            }
        )
    await generator.close()
    compute.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "num_groups", "max_tokens"), [("nano", 22, 24), ("smollm2-135m", 8, 12)]
)
def test_a_rollout_has_the_same_bits_alone_and_among_others(
    name: str, num_groups: int, max_tokens: int, dtype: torch.dtype
) -> None:
    try:
        vocabulary = load_decoder(resolve_model(name)).config.vocab_size
    except ModelError as error:
        pytest.skip(str(error))
    requests = requests_for(vocabulary, num_groups=num_groups, max_tokens=max_tokens)
    (together,) = asyncio.run(sampled(name, dtype, [requests], room=8192))
    alone = asyncio.run(sampled(name, dtype, [[request] for request in requests[:6]], room=23))
    for bits in alone:
        for key, (ids, logprobs) in bits.items():
            assert ids == together[key][0]
            assert torch.equal(torch.tensor(logprobs), torch.tensor(together[key][1]))
