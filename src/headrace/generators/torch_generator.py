"""TorchGenerator: the Generator role around the torch engine, which works on a compute thread.

The asyncio side: checks requests, waits for the engine and notices when it hangs. What is
sampled, and under which weights, is the engine's business.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from headrace.compute import ComputeThread
from headrace.errors import GeneratorFailure
from headrace.generators.admission import check_requests
from headrace.generators.engine_commands import Submission
from headrace.generators.engine_turns import EngineTurns
from headrace.generators.progress import Marks, Progress
from headrace.generators.stop_strings import Decode
from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.kv_cache import block_bytes
from headrace.generators.torch_engine.rollout_state import GroupCollector
from headrace.generators.torch_engine.runner_choice import choose_runner
from headrace.generators.torch_engine.scheduler import Scheduler
from headrace.host import available_memory
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign_config import ForeignConfig
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
        config: DecoderConfig | ForeignConfig,
        *,
        decode: Decode,
        compute: ComputeThread,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_concurrent_rollouts: int = 512,
        max_prefill_tokens: int = 8192,
        on_update: OnUpdate = "wait",
        max_cache_bytes: int | None = None,
        is_quantized: bool = False,
        batch_invariant: bool = False,
        staged_updates: bool = False,
    ) -> None:
        """``compute`` may serve others between engine steps and is closed by whoever made it.

        ``max_cache_bytes`` bounds keys and values; None takes `MEMORY_SHARE` of what is free.
        ``is_quantized``: matrices are held in eight bits, everything else in ``dtype``.
        ``batch_invariant``: what else is sampled changes no bit of a rollout.
        ``staged_updates``: prepare new weights beside those at work, in memory for a second copy.
        """
        self._config = config
        self._decode = decode
        self._open: Counter[str] = Counter()
        """Group id -> open calls that have not yielded it yet."""
        device = device or torch.device("cpu")
        budget = max_cache_bytes or default_cache_bytes(device)
        num_blocks = budget // block_bytes(config, BLOCK_SIZE, dtype)
        self._max_cached_tokens = num_blocks * BLOCK_SIZE
        blocks = BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        runner = choose_runner(
            config,
            BLOCK_SIZE,
            dtype,
            device,
            num_blocks=num_blocks,
            max_rows=max_concurrent_rollouts,
            is_quantized=is_quantized,
            batch_invariant=batch_invariant,
        )
        scheduler = Scheduler(
            blocks, max_running=max_concurrent_rollouts, max_prefill_tokens=max_prefill_tokens
        )
        self._stager = ComputeThread("weights", 1) if staged_updates else None
        self._engine = EngineTurns(
            Engine(runner, scheduler, blocks, decode), decode, compute, on_update, self._stager
        )

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """See `Generator`. Waits for the engine, which delivers every group or a failure.

        Raises GeneratorFailure before anything is sampled if one of ``requests`` cannot be served.
        What the caller does not wait for is taken back. A request of which nothing is left to be
        sampled is answered at once, paused or not.
        """
        check_requests(requests, self._config, max_cached_tokens=self._max_cached_tokens)
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[RolloutGroup | GeneratorFailure] = asyncio.Queue()
        collectors = [GroupCollector(request=request) for request in requests]
        for collector in collectors:
            if collector.is_whole:
                arrivals.put_nowait(collector.group(self._decode))

        def deliver(item: RolloutGroup | GeneratorFailure) -> None:
            try:
                loop.call_soon_threadsafe(arrivals.put_nowait, item)
            except RuntimeError:  # the caller's event loop has closed
                submission.abandoned = True

        left = [collector.request for collector in collectors if not collector.is_whole]
        submission = Submission(requests=left, deliver=deliver)
        if left:
            self._engine.submit(submission)
        waiting = {request.group_id for request in requests}
        self._open.update(waiting)
        try:
            while waiting:
                item = await self._watched(arrivals.get(), f"groups {_some(waiting)}")
                if isinstance(item, GeneratorFailure):
                    raise item
                waiting.remove(item.group_id)
                self._open[item.group_id] -= 1
                yield item
        finally:
            submission.abandoned = True
            self._open.subtract(waiting)
            self._open += Counter()  # forget what is no more open

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`. Waits for the engine, with ``wait`` for all that it has begun."""
        command = self._engine.load(update)
        try:
            await self._watched(
                asyncio.wrap_future(command.done), f"version {update.policy_version}"
            )
        finally:
            # The tensors stop being valid when this returns: let a load that began end.
            if left := self._engine.withdraw(command):
                await _waited_for(left)

    async def pause(self) -> None:
        """See `Interruptible`. Waits for the engine to come out of its step."""
        await self._obeyed(self._engine.pause(), "the pause")

    async def resume(self) -> None:
        """See `Interruptible`."""
        await self._obeyed(self._engine.resume(), "going on")

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `Interruptible`. Of two open calls with one group id, both yield it."""
        names = set(group_ids)
        if unknown := {name for name in names if self._open[name] < 1}:
            msg = f"asked to abort {_some(unknown)}: no open generate() call waits for such groups"
            raise GeneratorFailure(msg)
        if names:
            await self._obeyed(self._engine.abort(names), f"the end of groups {_some(names)}")

    async def progress(self, marks: Marks) -> Progress:
        """See `TellsProgress`. Waits for the engine to come out of its step."""
        told = asyncio.wrap_future(self._engine.progress(marks))
        return await self._watched(told, "the progress of rollouts")

    def metrics(self) -> Mapping[str, float]:
        """See `Generator`."""
        return self._engine.take_statistics().metrics()

    async def close(self) -> None:
        """See `Generator`."""
        await asyncio.to_thread(self._engine.close, STALL_SECONDS)
        if self._stager is not None:
            await asyncio.to_thread(self._stager.close, STALL_SECONDS)

    async def _obeyed(self, done: concurrent.futures.Future[None], what: str) -> None:
        await self._watched(asyncio.wrap_future(done), what)

    async def _watched(self, awaited: Awaitable[T], what: str) -> T:
        """Wait while the engine makes steps or is paused; else raise GeneratorFailure."""
        future = asyncio.ensure_future(awaited)
        try:
            while True:
                before = self._engine.num_turns
                await asyncio.wait({future}, timeout=STALL_SECONDS)
                if future.done():
                    return future.result()
                if self._engine.num_turns == before and not self._engine.stands_still:
                    msg = f"no engine step for {STALL_SECONDS:.0f} s while waiting for {what}"
                    # A cause of its own: another process may do better than this one.
                    raise GeneratorFailure(msg) from TimeoutError(msg)
        finally:
            future.cancel()


async def _waited_for(begun: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Return once all are done, or hang; not before, however often the caller is cancelled."""
    wait = asyncio.to_thread(concurrent.futures.wait, begun, STALL_SECONDS)
    waiting = asyncio.ensure_future(wait)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled


def default_cache_bytes(device: torch.device) -> int:
    """Return `MEMORY_SHARE` of the memory that is free on ``device``."""
    return int(MEMORY_SHARE * (free_memory(device) or UNKNOWN_MEMORY))


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that are free on ``device``; None where the machine does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def _some(names: set[str]) -> str:
    """Name a few of many."""
    more = len(names) - MAX_NAMED
    return ", ".join(sorted(names)[:MAX_NAMED]) + f" and {more} more" * (more > 0)
