"""Engines around a `CudaRunner` on any device, and what stands in for a device's own parts.

Shared by tests/gpu and by the unit tests of what needs no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.cuda.decode_graphs import Graph
from headrace.generators.torch_engine.cuda.runner import CudaRunner
from headrace.generators.torch_engine.cuda.table_attention import PagedDecode
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Scheduler
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import weight_update
from headrace.types import (
    GenerationRequest,
    Prompt,
    RolloutGroup,
    SamplingParams,
    WeightUpdate,
)

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
BLOCK_SIZE = 4


class RecordingGraph:
    """Records operations with the very tensors they worked on, and repeats them on these.

    As with a real graph, a tensor that somebody replaces by another later goes on being read.
    """

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.num_replays = 0
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        calls = self._calls

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                found = func(*args, **(kwargs or {}))
                calls.append((func, args, kwargs or {}, found))
                return found

        with Recorder():
            return compute()

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, recorded in self._calls:
            found = func(*args, **kwargs)
            for new, old in zip(tree_flatten(found)[0], tree_flatten(recorded)[0], strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def slow_paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    window: int | None,
) -> Tensor:
    """What `paged_decode` computes, over whole tables and with every shape known beforehand."""
    num_rows, num_heads, width = query.shape
    repeats, size = num_heads // keys.shape[1], keys.shape[2]
    key, value = (
        part[table.long()].transpose(1, 2).reshape(num_rows, keys.shape[1], -1, width).float()
        for part in (keys, values)
    )
    grouped = query.float().view(num_rows, -1, repeats, width)
    distance = positions.unsqueeze(1) - torch.arange(table.shape[1] * size, device=query.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = (grouped @ key.transpose(-1, -2)) * width**-0.5
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    mixed = torch.softmax(scores, -1) @ value
    return mixed.flatten(1, 2).to(query.dtype)


class CudaLab:
    """Tiny models, and engines on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def decoder(self, seed: int = 0, dtype: torch.dtype = torch.float32, **kw: object) -> Decoder:
        """Weights on the CPU, large enough that the distribution is far from flat."""
        decoder = Decoder(DecoderConfig.from_hf({**SHAPE, **kw}))
        decoder.requires_grad_(requires_grad=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 + (parameter.dim() == 1))
        return decoder.to(dtype)

    def update(self, decoder: Decoder, version: int = 1) -> WeightUpdate:
        return weight_update(version, {n: w.detach() for n, w in decoder.named_parameters()})

    def requests(self, size: int = 3, **sampling: object) -> list[GenerationRequest]:
        """Prompts and completions of many lengths, so that rows come and go."""
        return [
            GenerationRequest(
                group_id=str(n),
                prompt=Prompt(
                    prompt_id=str(n), source="test", text="", token_ids=tuple(range(1, 2 + 7 * n))
                ),
                group_size=size,
                sampling=SamplingParams(**{"max_tokens": 2 + 9 * n, **sampling}),  # type: ignore[arg-type]
                seed=n,
            )
            for n in range(6)
        ]

    def engine(
        self,
        decoder: Decoder,
        mix: PagedDecode,
        make_graph: Callable[[], Graph] | None,
        *,
        num_blocks: int = 1000,
        max_running: int = 16,
        max_rows: int | None = None,
        is_quantized: bool = False,
    ) -> Engine:
        """An engine that holds version 1 of ``decoder`` and decodes by ``mix``."""
        runner = CudaRunner(
            decoder.config,
            BLOCK_SIZE,
            decoder.output_weight.dtype,
            self.device,
            num_blocks=num_blocks,
            max_rows=max_rows or max_running,
            mix=mix,
            make_graph=make_graph,
            is_quantized=is_quantized,
        )
        return self._engine(runner, decoder, num_blocks, max_running)

    def plain_engine(
        self, decoder: Decoder, device: str = "cpu", *, is_quantized: bool = False
    ) -> Engine:
        """An engine with nothing of a device's own."""
        runner = ModelRunner(
            decoder.config,
            BLOCK_SIZE,
            decoder.output_weight.dtype,
            torch.device(device),
            is_quantized=is_quantized,
        )
        return self._engine(runner, decoder, 1000, 16)

    def _engine(
        self, runner: ModelRunner, decoder: Decoder, num_blocks: int, max_running: int
    ) -> Engine:
        blocks = BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        scheduler = Scheduler(blocks, max_running=max_running, max_prefill_tokens=100)
        engine = Engine(runner, scheduler, blocks, str)
        engine.load(self.update(decoder))
        return engine


def run_out(engine: Engine, requests: Sequence[GenerationRequest]) -> list[RolloutGroup]:
    """Have ``engine`` sample every group to its end."""
    collectors = engine.submit(requests)
    while engine.has_work:
        engine.step()
    return [collector.group(str) for collector in collectors]


def assert_alike(
    found: Iterable[RolloutGroup], expected: Iterable[RolloutGroup], gap: float = 1e-4
) -> None:
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one.rollouts, other.rollouts, strict=True):
            assert ours.completion_ids == theirs.completion_ids
            assert ours.generator_logprobs == pytest.approx(theirs.generator_logprobs, abs=gap)
