"""The bundled model in vLLM: weights, requests, and what its tokens should have cost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.config import VllmConfig
from headrace.generators.vllm import VllmGenerator, VllmSettings
from headrace.generators.vllm.engine import VllmEngine
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.catalogue import resolve_model
from headrace.models.checkpoint import load_decoder
from headrace.models.decoder import Decoder
from headrace.models.weights import weight_update
from headrace.types import (
    GenerationRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    WeightUpdate,
)

T = TypeVar("T")


def decode(ids: Sequence[int]) -> str:
    """Token 0 is special and has no text; the others are a letter each."""
    return "".join(chr(96 + token) for token in ids if token)


class VllmLab:
    """The bundled model, versions of its weights, and generators that sample from them."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.model = resolve_model("nano")
        self.decoder = load_decoder(self.model)
        self.version = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def weights(self, seed: int) -> dict[str, Tensor]:
        """The model's own weights for seed 0, and others beside them."""
        noise = torch.Generator().manual_seed(seed)
        return {
            name: weight.detach() + 0.05 * bool(seed) * torch.randn(weight.shape, generator=noise)
            for name, weight in self.decoder.named_parameters()
        }

    def update(self, seed: int = 0) -> WeightUpdate:
        """Weights of a version that was not there before."""
        self.version += 1
        return weight_update(self.version, self.weights(seed))

    def settings(self, **options: Any) -> VllmSettings:
        return VllmSettings(
            model=self.model,
            dtype=torch.float32,
            options=VllmConfig(**options),
            max_concurrent_rollouts=32,
            max_prefill_tokens=512,
            max_cache_bytes=1 << 26,
            num_threads=1,
        )

    def generator(self, **options: Any) -> VllmGenerator:
        return VllmGenerator(self.decoder.config, decode=decode, settings=self.settings(**options))

    def request(
        self,
        name: str = "a",
        *,
        size: int = 4,
        begun: tuple[Rollout, ...] = (),
        prompt: Sequence[int] = tuple(range(1, 11)),
        **sampling: Any,
    ) -> GenerationRequest:
        params = SamplingParams(**{"max_tokens": 20, **sampling})
        return GenerationRequest(
            group_id=name,
            prompt=Prompt(prompt_id=name, source="test", text="", token_ids=tuple(prompt)),
            group_size=size,
            sampling=params,
            seed=7,
            begun=begun,
        )

    @torch.no_grad()
    def logprobs(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], rollout: Rollout, **kw: Any
    ) -> list[float]:
        """Under the distribution sampled from, by headrace's own decoder in one forward pass."""
        decoder = Decoder(self.decoder.config)
        decoder.load_state_dict(dict(weights), strict=False)
        ids = torch.tensor([*prompt, *rollout.completion_ids])
        attention = PackedCausal([len(ids)], decoder.config.windows)
        hidden = decoder(ids, positions_of([len(ids)]), attention)
        logits = decoder.logits(hidden[len(prompt) - 1 : -1])
        return [
            float(kept_logprobs(row, **kw)[token])
            for row, token in zip(logits, rollout.completion_ids, strict=True)
        ]


def kept_logprobs(
    logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """The literal definition: top-k, then top-p, of one row of logits."""
    weights = torch.softmax(logits / temperature, -1)
    order = weights.argsort(descending=True).tolist()
    kept, mass = [], 0.0
    candidates = order[:top_k] if top_k else order
    total = float(weights[candidates].sum())
    for token in candidates:
        if kept and mass >= top_p * total:
            break
        kept.append(token)
        mass += float(weights[token])
    masked = torch.full_like(weights, 0.0)
    masked[kept] = weights[kept] / weights[kept].sum()
    return masked.log()


async def collect(
    generator: VllmGenerator, requests: Sequence[GenerationRequest]
) -> dict[str, RolloutGroup]:
    return {group.group_id: group async for group in generator.generate(requests)}


async def under_way(generator: VllmGenerator, call: asyncio.Task[Any], num_tokens: int = 3) -> None:
    """Return once every rollout in the engine has ``num_tokens`` tokens; ``call`` waits for them.

    Fails when it ends before.
    """

    def least() -> int:
        return min((len(flight.completion_ids) for flight in generator._in_air), default=0)

    while least() < num_tokens:
        assert not call.done(), call
        await asyncio.sleep(0.001)


def engine_of(generator: VllmGenerator) -> VllmEngine:
    engine = generator._supervisor._engine
    assert engine is not None
    return engine
