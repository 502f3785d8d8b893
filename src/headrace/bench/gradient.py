"""The learner's gradient against one computed with none of its code.

`plain_gradient` runs transformers' model on one unpadded sequence after the other and writes the
loss out as the papers do: no packing, no shared prompts, no fused log-probs, no code of
`objectives` or `learners`. Holds for the objective of `bench step`: GRPO advantages, the clipped
ratio to the generator's log-probs, one mean over all tokens, every rollout scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.config import PpoClipLoss, RunConfig
from headrace.learners import PolicySource, TorchLearner
from headrace.models.checkpoint import load_decoder
from headrace.models.hf_files import read_hf_config
from headrace.types import Rollout, RolloutGroup

Gradient = Mapping[str, Tensor]
"""Hugging Face parameter name -> gradient in fp32."""


def gradient_relative_error(
    directory: Path, config: RunConfig, groups: Sequence[RolloutGroup]
) -> float:
    """Return |learner - plain| / |plain|, L2 over all parameters, for one batch.

    ``directory`` holds the policy that sampled ``groups``.
    """
    ours = learner_gradient(directory, config, groups)
    loss = config.objective.loss
    assert isinstance(loss, PpoClipLoss), "which is what the plain version computes"
    plain = plain_gradient(
        directory,
        groups,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        temperature=config.sampling.temperature,
    )
    return relative_error(ours, plain)


def relative_error(found: Gradient, expected: Gradient) -> float:
    """Return |found - expected| / |expected|, L2 over all parameters, summed in float64."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    difference = sum(_squares(found[name] - expected[name]) for name in expected)
    return float((difference / sum(_squares(tensor) for tensor in expected.values())) ** 0.5)


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def learner_gradient(
    directory: Path, config: RunConfig, groups: Sequence[RolloutGroup]
) -> Gradient:
    """Return what one `TorchLearner.step` has accumulated before it clips and updates."""
    decoder = load_decoder(directory)
    found: dict[str, Tensor] = {}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        # A copy, since clipping scales in place; the last backward pass leaves the whole sum.
        found[name] = parameter.grad.clone()

    for name, parameter in decoder.named_parameters():
        hook = partial(keep, name)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    source = PolicySource(directory=directory, hf_config=read_hf_config(directory))
    compute = ComputeThread("learner", torch.get_num_threads())
    asyncio.run(
        _step(TorchLearner(decoder, source, config, num_updates=1, compute=compute), groups)
    )
    compute.close()
    return found


async def _step(learner: TorchLearner, groups: Sequence[RolloutGroup]) -> None:
    try:
        await learner.step(groups)
    finally:
        await learner.close()


def plain_gradient(
    directory: Path,
    groups: Sequence[RolloutGroup],
    *,
    clip_low: float,
    clip_high: float,
    temperature: float,
) -> Gradient:
    """Return the gradient of -(1/N) sum_t min(r A, clip(r) A), N the tokens of all rollouts.

    r = exp(log pi(t) - generator's log-prob); A = (R - mean) / std with n - 1 under the root.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert not model.training, "dropout would make another gradient"
    # It would drop the gradient of the padding token's embedding, which is no part of the loss'
    # gradient: SmolLM2 pads with the end-of-turn token, and every prompt has one.
    model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]
    num_tokens = sum(sum(rollout.loss_mask) for group in groups for rollout in group.rollouts)
    for group in groups:
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        if rewards.max() == rewards.min():
            continue  # every advantage is 0; its tokens stay in num_tokens
        advantages = (rewards - rewards.mean()) / rewards.std()
        for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
            logprobs = _logprobs(model, group.prompt.token_ids, rollout, temperature)
            ratio = (logprobs - torch.tensor(rollout.generator_logprobs)).exp()
            clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
            objective = torch.minimum(ratio * advantage, clipped * advantage)
            loss = -objective[torch.tensor(rollout.loss_mask)].sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
    parameters = model.named_parameters()
    return {name: weight.grad for name, weight in parameters if weight.grad is not None}


def _logprobs(
    model: torch.nn.Module, prompt_ids: Sequence[int], rollout: Rollout, temperature: float
) -> Tensor:
    """Return log pi [T] of the completion after its prompt."""
    ids = torch.tensor([*prompt_ids, *rollout.completion_ids])
    logits: Tensor = model(ids.unsqueeze(0)).logits[0, len(prompt_ids) - 1 : -1] / temperature
    targets = ids[len(prompt_ids) :].unsqueeze(1)
    logprobs = logits.log_softmax(dim=-1)
    return logprobs.gather(1, targets).squeeze(1)
