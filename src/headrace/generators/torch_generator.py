"""TorchGenerator: the Generator role around the torch engine, which works on a compute thread.

The asyncio side: checks requests, waits for the engine and notices when it hangs. What is
sampled, and under which weights, is the engine's business.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import TypeVar

import torch

from headrace.compute import ComputeThread
from headrace.errors import GeneratorFailure
from headrace.generators.engine_turns import EngineTurns, Submission
from headrace.generators.torch_engine.admission import check_requests
from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.engine import Decode, Engine
from headrace.generators.torch_engine.kv_cache import block_bytes
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Scheduler
from headrace.host import available_memory
from headrace.models.decoder_config import DecoderConfig
from headrace.types import GenerationRequest, OnUpdate, RolloutGroup, WeightUpdate

T = TypeVar("T")

STALL_SECONDS = 600.0
"""An engine that makes no step for so long while someone waits for it has hung."""


BLOCK_SIZE = 16
"""Tokens of a cache block. What a group shares ends at a whole block, so blocks are small."""
MEMORY_SHARE = 0.5
"""Of the memory that is free at the start, how much the cache may grow to when nobody says."""
UNKNOWN_MEMORY = 8 << 30
"""Taken to be free where the machine does not say."""
MAX_NAMED = 5
"""Groups that an error names."""


class TorchGenerator:
    """Samples with an own copy of the weights, on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        decode: Decode,
        compute: ComputeThread,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_concurrent_rollouts: int = 512,
        max_prefill_tokens: int = 8192,
        on_update: OnUpdate = "wait",
        max_cache_bytes: int | None = None,
    ) -> None:
        """``compute`` may serve others between engine steps and is closed by whoever made it.

        ``max_cache_bytes`` bounds keys and values; None takes `MEMORY_SHARE` of what is free.
        """
        self._config = config
        device = device or torch.device("cpu")
        budget = max_cache_bytes or default_cache_bytes(device)
        num_blocks = budget // block_bytes(config, BLOCK_SIZE, dtype)
        self._max_cached_tokens = num_blocks * BLOCK_SIZE
        blocks = BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        runner = ModelRunner(config, BLOCK_SIZE, dtype, device)
        scheduler = Scheduler(
            blocks, max_running=max_concurrent_rollouts, max_prefill_tokens=max_prefill_tokens
        )
        self._engine = EngineTurns(
            Engine(runner, scheduler, blocks, decode), decode, compute, on_update
        )

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """See `Generator`. Waits for the engine, which delivers every group or a failure.

        Raises GeneratorFailure before anything is sampled if one of ``requests`` cannot be served.
        What the caller does not wait for is taken back.
        """
        check_requests(requests, self._config, max_cached_tokens=self._max_cached_tokens)
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[RolloutGroup | GeneratorFailure] = asyncio.Queue()
        waiting = {request.group_id for request in requests}

        def deliver(item: RolloutGroup | GeneratorFailure) -> None:
            try:
                loop.call_soon_threadsafe(arrivals.put_nowait, item)
            except RuntimeError:  # the caller's event loop has closed
                submission.abandoned = True

        submission = Submission(requests=tuple(requests), deliver=deliver)
        if waiting:
            self._engine.submit(submission)
        try:
            while waiting:
                item = await self._watched(arrivals.get(), f"groups {_some(waiting)}")
                if isinstance(item, GeneratorFailure):
                    raise item
                waiting.remove(item.group_id)
                yield item
        finally:
            submission.abandoned = True

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`. Waits for the engine, with ``wait`` for all that it has begun."""
        done = self._engine.load(update)
        try:
            await self._watched(asyncio.wrap_future(done), f"version {update.policy_version}")
        finally:
            if not done.cancel():
                # The tensors stop being valid when this returns: let a load that began end.
                concurrent.futures.wait([done], STALL_SECONDS)

    def metrics(self) -> Mapping[str, float]:
        """See `Generator`."""
        return self._engine.take_statistics().metrics()

    async def close(self) -> None:
        """See `Generator`."""
        await asyncio.to_thread(self._engine.close, STALL_SECONDS)

    async def _watched(self, awaited: Awaitable[T], what: str) -> T:
        """Wait as long as the engine keeps making steps; else raise GeneratorFailure."""
        future = asyncio.ensure_future(awaited)
        try:
            while True:
                before = self._engine.num_steps
                await asyncio.wait({future}, timeout=STALL_SECONDS)
                if future.done():
                    return future.result()
                if self._engine.num_steps == before:
                    msg = f"no engine step for {STALL_SECONDS:.0f} s while waiting for {what}"
                    raise GeneratorFailure(msg)
        finally:
            future.cancel()


def default_cache_bytes(device: torch.device) -> int:
    """Return `MEMORY_SHARE` of the memory that is free on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = available_memory() or UNKNOWN_MEMORY
    return int(MEMORY_SHARE * free)


def _some(names: set[str]) -> str:
    """Name a few of many."""
    more = len(names) - MAX_NAMED
    return ", ".join(sorted(names)[:MAX_NAMED]) + f" and {more} more" * (more > 0)
