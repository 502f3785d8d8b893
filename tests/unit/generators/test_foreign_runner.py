"""Rollouts of a model that only transformers computes, against transformers' own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from foreign_lab import CONFIGS, alone, write_foreign

from headrace.compute import ComputeThread
from headrace.errors import ConfigError, GeneratorFailure, WeightSyncError
from headrace.generators import TorchGenerator
from headrace.generators.torch_engine import foreign_runner
from headrace.models.foreign import load_foreign
from headrace.models.foreign_config import ForeignConfig
from headrace.models.weights import checksum, weight_update
from headrace.types import (
    GenerationRequest,
    Prompt,
    RolloutGroup,
    SamplingParams,
    WeightUpdate,
)

PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6,))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    return {family: write_foreign(folder / family, family) for family in CONFIGS}


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread("generator", 1)
    yield thread
    thread.close()


def update(directory: Path, version: int = 1) -> WeightUpdate:
    decoder = load_foreign(directory)
    return weight_update(version, {n: p.detach() for n, p in decoder.named_parameters()})


def request(index: int, **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        group_id=str(index),
        prompt=Prompt(prompt_id=str(index), source="s", text="", token_ids=PROMPTS[index]),
        group_size=2,
        sampling=SamplingParams(**{"max_tokens": 7, **sampling}),  # type: ignore[arg-type]
        seed=index,
    )


async def sampled(
    generator: TorchGenerator, weights: WeightUpdate, *requests: GenerationRequest
) -> list[RolloutGroup]:
    try:
        await generator.update_weights(weights)
        found = [group async for group in generator.generate(requests)]
    finally:
        await generator.close()
    return sorted(found, key=lambda group: group.group_id)


def made(directory: Path, compute: ComputeThread, **options: object) -> TorchGenerator:
    config = ForeignConfig.read(directory)
    return TorchGenerator(config, decode=str, compute=compute, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("pass_tokens", [1, 8192])
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_rollouts_are_those_of_transformers(
    family: str,
    pass_tokens: int,
    directories: dict[str, Path],
    compute: ComputeThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign_runner, "PASS_TOKENS", pass_tokens)
    generator = made(directories[family], compute, max_prefill_tokens=3)
    requests = [request(index, temperature=0.0) for index in range(len(PROMPTS))]
    groups = asyncio.run(sampled(generator, update(directories[family]), *requests))
    theirs = alone(directories[family])
    for group, prompt in zip(groups, PROMPTS, strict=True):
        expected = list(prompt)
        with torch.no_grad():
            for _ in range(7):
                expected.append(int(theirs(torch.tensor([expected])).logits[0, -1].argmax()))
        for rollout in group.rollouts:
            assert [*prompt, *rollout.completion_ids] == expected


@torch.no_grad()
def test_log_probs_are_of_the_distribution_that_was_sampled_from(
    directories: dict[str, Path], compute: ComputeThread
) -> None:
    generator = made(directories["gemma2"], compute)
    weights = update(directories["gemma2"], version=3)
    (group,) = asyncio.run(sampled(generator, weights, request(0, temperature=0.6)))
    theirs = alone(directories["gemma2"])
    assert group.rollouts[0].completion_ids != group.rollouts[1].completion_ids
    for rollout in group.rollouts:
        ids = [*PROMPTS[0], *rollout.completion_ids]
        logprobs = torch.log_softmax(theirs(torch.tensor([ids])).logits[0] / 0.6, dim=-1)
        expected = [float(logprobs[i + 4, token]) for i, token in
                    enumerate(rollout.completion_ids)]  # fmt: skip
        assert rollout.generator_logprobs == pytest.approx(expected, abs=1e-4)
        assert [span.policy_version for span in rollout.version_spans] == [3]


def test_new_weights_are_sampled_from_and_wrong_ones_change_nothing(
    directories: dict[str, Path], compute: ComputeThread
) -> None:
    generator = made(directories["gpt2"], compute)
    first = update(directories["gpt2"])
    doubled = {name: tensor * 2.0 for name, tensor in first.tensors.items()}
    lacking = dict(list(doubled.items())[1:])

    async def both() -> list[list[RolloutGroup]]:
        try:
            found = []
            with pytest.raises(GeneratorFailure):
                _ = [group async for group in generator.generate([request(0)])]
            for weights in (first, weight_update(2, doubled)):
                await generator.update_weights(weights)
                with pytest.raises(WeightSyncError, match="was not published"):
                    await generator.update_weights(weight_update(3, lacking))
                found.append([group async for group in generator.generate([request(0)])])
        finally:
            await generator.close()
        return found

    (before,), (after,) = asyncio.run(both())
    assert before.rollouts[0].generator_logprobs != after.rollouts[0].generator_logprobs
    assert [g.newest_version for g in (before, after)] == [1, 2]


@pytest.mark.parametrize("option", ["is_quantized", "batch_invariant"])
def test_what_transformers_does_not_do_is_refused(
    option: str, directories: dict[str, Path], compute: ComputeThread
) -> None:
    with pytest.raises(ConfigError, match="gpt2 is sampled through transformers"):
        made(directories["gpt2"], compute, **{option: True})


def test_staged_weights_are_computed_with_from_the_exchange_on(
    directories: dict[str, Path],
) -> None:
    directory = next(iter(directories.values()))
    config = ForeignConfig.read(directory)
    runner = foreign_runner.ForeignRunner(config, torch.float32, torch.device("cpu"))
    old = update(directory)
    new = {name: tensor * 1.5 for name, tensor in old.tensors.items()}
    runner.load(old.tensors)
    sequences = [torch.tensor(ids) for ids in PROMPTS]
    with torch.inference_mode():
        before = runner._next_logits(sequences)
        runner.stage(new, checksum(new.items()))
        assert torch.equal(runner._next_logits(sequences), before)
        runner.swap()
        after = runner._next_logits(sequences)
        runner.load(new)
        assert torch.equal(runner._next_logits(sequences), after)
    assert not torch.equal(before, after)
    runner.verify(new, checksum(new.items()))
