from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.generators import TorchGenerator
from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Scheduler
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import weight_update
from headrace.types import (
    GenerationRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    WeightUpdate,
)

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
"""What the kernels for processors take; torch's own operators run heads of another size."""


class Lab:
    """Tiny models and everything around them."""

    def __init__(self) -> None:
        self.threads: list[ComputeThread] = []

    def config(self, **changes: object) -> DecoderConfig:
        return DecoderConfig.from_hf({**SHAPE, **changes})

    def decoder(self, seed: int = 0, **changes: object) -> Decoder:
        """Weights large enough that the distribution is far from flat."""
        decoder = Decoder(self.config(**changes)).requires_grad_(requires_grad=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 + (parameter.dim() == 1))
        return decoder

    def update(self, decoder: Decoder, version: int = 1) -> WeightUpdate:
        tensors = {name: weight.detach() for name, weight in decoder.named_parameters()}
        return weight_update(version, tensors)

    def request(
        self,
        name: str,
        ids: Sequence[int] = (3, 1, 4),
        *,
        size: int = 1,
        seed: int = 0,
        **kw: object,
    ) -> GenerationRequest:
        prompt = Prompt(prompt_id=name, source="test", text="", token_ids=tuple(ids))
        sampling = SamplingParams(**{"max_tokens": 8, **kw})
        return GenerationRequest(
            group_id=name, prompt=prompt, group_size=size, sampling=sampling, seed=seed
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Token 0 is special and has no text; the others are a character each."""
        return "".join(chr(64 + token) for token in ids if token)

    def generator(self, config: DecoderConfig, **options: object) -> TorchGenerator:
        compute = ComputeThread("generator", torch.get_num_threads())
        self.threads.append(compute)
        return TorchGenerator(config, **{"decode": self.decode, "compute": compute, **options})

    def slow_down(self, generator: TorchGenerator, seconds: float = 0.01) -> threading.Event:
        """Have each step take so much longer until the event is set.

        Rollouts that are to be under way still are then when a test comes to its next line, however
        long the machine lets it wait.
        """
        engine, in_haste = generator._engine._engine, threading.Event()
        step = engine.step

        def slow() -> Any:  # noqa: ANN401 - the engine's
            in_haste.wait(seconds)
            return step()

        engine.step = slow  # type: ignore[method-assign]
        return in_haste

    def engine(
        self,
        decoder: Decoder,
        *,
        max_running: int = 16,
        num_blocks: int = 1000,
        max_prefill_tokens: int = 100,
        dtype: torch.dtype = torch.float32,
    ) -> Engine:
        """An engine with blocks of four tokens that holds version 1 of ``decoder``."""
        runner = ModelRunner(decoder.config, 4, dtype, torch.device("cpu"))
        blocks = BlockManager(num_blocks=num_blocks, block_size=4)
        scheduler = Scheduler(
            blocks, max_running=max_running, max_prefill_tokens=max_prefill_tokens
        )
        engine = Engine(runner, scheduler, blocks, self.decode)
        engine.load(self.update(decoder))
        return engine

    def run_out(
        self, engine: Engine, requests: Sequence[GenerationRequest]
    ) -> dict[str, RolloutGroup]:
        """Have ``engine`` sample every group to its end."""
        collectors = engine.submit(requests)
        while engine.has_work:
            engine.step()
        return {c.request.group_id: c.group(self.decode) for c in collectors}

    def assert_alike(
        self, found: Mapping[str, RolloutGroup], expected: Mapping[str, RolloutGroup]
    ) -> None:
        """Equal in all but log-probs, which depend in the last bits on what runs beside them."""
        assert found.keys() == expected.keys()
        for name, group in expected.items():
            for one, other in zip(found[name].rollouts, group.rollouts, strict=True):
                near = pytest.approx(other.generator_logprobs, abs=1e-4)
                assert one.generator_logprobs == near
                assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)
                assert _without_logprobs(one) == _without_logprobs(other)

    async def collect(
        self, generator: TorchGenerator, requests: Sequence[GenerationRequest]
    ) -> dict[str, RolloutGroup]:
        return {group.group_id: group async for group in generator.generate(requests)}

    def run(
        self, decoder: Decoder, requests: Sequence[GenerationRequest], **options: object
    ) -> dict[str, RolloutGroup]:
        """Generate with a generator of its own."""

        async def main() -> dict[str, RolloutGroup]:
            generator = self.generator(decoder.config, **options)
            try:
                await generator.update_weights(self.update(decoder))
                return await self.collect(generator, requests)
            finally:
                await generator.close()

        return asyncio.run(main())

    def logits(self, decoder: Decoder, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """[T, vocab] that each completion token was drawn from, in one full forward pass."""
        ids = torch.tensor([*prompt, *completion])
        lengths = [len(ids)]
        attention = PackedCausal(lengths, decoder.config.windows)
        hidden = decoder(ids, positions_of(lengths), attention)
        return decoder.logits(hidden[len(prompt) - 1 : -1])

    def gap(self, decoder: Decoder, prompt: Sequence[int], rollout: Rollout, t: float = 1) -> float:
        """Largest difference between reported log-probs and those of a full forward pass."""
        logits = self.logits(decoder, prompt, rollout.completion_ids)
        ids = torch.tensor(rollout.completion_ids).unsqueeze(1)
        expected = torch.log_softmax(logits / t, -1).gather(1, ids).squeeze(1)
        return float((expected - torch.tensor(rollout.generator_logprobs)).abs().max())


def _without_logprobs(rollout: Rollout) -> Rollout:
    zeros = (0.0,) * len(rollout.completion_ids)
    return replace(rollout, generator_logprobs=zeros, raw_logprobs=None)


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    for thread in lab.threads:
        thread.close(timeout_seconds=60.0)


@pytest.fixture
def shape() -> dict[str, Any]:
    """What `Lab.config` is made of."""
    return dict(SHAPE)
