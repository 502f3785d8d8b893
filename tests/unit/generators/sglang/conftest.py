from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_server import EOS, VOCAB, ContractServer, Model, decode, until

from headrace.config import SGLangConfig
from headrace.generators.sglang import SGLangGenerator, client
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

HANG_SECONDS = 240
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@dataclass(kw_only=True)
class Site:
    """A generator and its servers."""

    servers: list[ContractServer]
    generator: SGLangGenerator
    weights_directory: Path
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def server(self) -> ContractServer:
        return self.servers[0]

    async def load(self, version: int, seed: int | None = None) -> None:
        await self.generator.update_weights(update(version, version if seed is None else seed))

    async def collect(self, *requests: GenerationRequest) -> dict[str, RolloutGroup]:
        return {group.group_id: group async for group in self.generator.generate(requests)}

    async def one(self, request: GenerationRequest) -> Rollout:
        return (await self.collect(request))[request.group_id].rollouts[0]

    def begin(self, *requests: GenerationRequest) -> asyncio.Task[dict[str, RolloutGroup]]:
        task = asyncio.create_task(self.collect(*requests))
        self.tasks.append(task)
        return task

    def begin_update(self, version: int) -> asyncio.Task[None]:
        task = asyncio.create_task(self.load(version))
        self.tasks.append(task)
        return task

    def is_hasty(self, **deadlines: float) -> None:
        """Shorten deadlines of what is asked from now on: a busy machine may be late before."""
        vars(self.generator._calls.options).update(deadlines)

    async def seen(self, path: str, number: int = 1, server: int = 0) -> None:
        """Wait until a server has been sent ``number`` requests for ``path``."""
        await until(lambda: len(self.servers[server].bodies(path)) >= number)

    async def settled(self) -> None:
        """Give every task the time to come to where it waits."""
        for _ in range(30):
            await asyncio.sleep(0.001)


def update(version: int, seed: int) -> WeightUpdate:
    """Weights by ``seed``: what a server samples depends on them."""
    generator = torch.Generator().manual_seed(seed)
    return weight_update(
        version, {"model.embed_tokens.weight": torch.rand(4, 4, generator=generator)}
    )


def request(
    name: str = "a",
    ids: Sequence[int] = (3, 1, 4),
    *,
    size: int = 1,
    seed: int = 0,
    begun: tuple[Rollout, ...] = (),
    **sampling: Any,  # noqa: ANN401 - of SamplingParams
) -> GenerationRequest:
    prompt = Prompt(prompt_id=name, source="test", text="", token_ids=tuple(ids))
    params = SamplingParams(**{"max_tokens": 12, "stop_token_ids": (EOS,), **sampling})
    return GenerationRequest(
        group_id=name, prompt=prompt, group_size=size, sampling=params, seed=seed, begun=begun
    )


class Lab:
    """Makes sites and runs what is to be seen in them."""

    update = staticmethod(update)
    request = staticmethod(request)

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.asynccontextmanager
    async def site(
        self,
        num_servers: int = 1,
        *,
        model: Model | None = None,
        max_concurrent_rollouts: int = 512,
        on_update: Any = "wait",  # noqa: ANN401 - an OnUpdate
        api_key: str | None = None,
        **options: Any,  # noqa: ANN401 - of SGLangConfig
    ) -> AsyncIterator[Site]:
        servers = [ContractServer(model) for _ in range(num_servers)]
        for server in servers:
            await server.start()
        weights = self.directory / "weights"
        patience = {"control_deadline_seconds": 60.0, "connect_deadline_seconds": 60.0}
        generator = SGLangGenerator(
            SGLangConfig(
                urls=tuple(server.url for server in servers),
                **{"weights_directory": weights, **patience, **options},
            ),
            DecoderConfig.from_hf(HF_CONFIG),
            hf_config=HF_CONFIG,
            model_directory=self.directory,
            decode=decode,
            api_key=api_key,
            on_update=on_update,
            max_concurrent_rollouts=max_concurrent_rollouts,
        )
        site = Site(servers=servers, generator=generator, weights_directory=weights)
        try:
            yield site
        finally:
            for task in site.tasks:
                task.cancel()
            await asyncio.gather(*site.tasks, return_exceptions=True)
            await generator.close()
            for server in servers:
                await server.die()

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``; see that it ends and leaves nothing behind."""

        async def main() -> None:
            await asyncio.wait_for(work(), HANG_SECONDS)
            await asyncio.sleep(0.01)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks were left: {left}"

        asyncio.run(main())
        assert not list(self.directory.glob("weights/*")), "published weights were left"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.01)
    return Lab(tmp_path)
