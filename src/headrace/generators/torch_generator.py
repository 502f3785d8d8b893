"""TorchGenerator: the Generator role around the torch engine, which runs in a thread of its own.

Commands reach the engine thread through an inbox and are obeyed in order, so a weight update
closes admission: what was submitted before it is finished under the old weights, what comes after
it starts under the new ones (``on_update = wait``).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from headrace.errors import GeneratorFailure, HeadraceError, WeightSyncError
from headrace.generators.torch_engine.engine import Decode, Engine
from headrace.generators.torch_engine.rollout_state import GroupCollector
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Scheduler
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import checksum
from headrace.types import GenerationRequest, RolloutGroup, WeightUpdate

STALL_SECONDS = 600.0
"""A generator that completes no group and makes no engine step for so long has hung."""


@dataclass(slots=True, kw_only=True)
class _Submission:
    requests: Sequence[GenerationRequest]
    deliver: Callable[[RolloutGroup | GeneratorFailure], None]
    waiting: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _Update:
    update: WeightUpdate
    done: Future[None]


class _Close:
    pass


class TorchGenerator:
    """Samples with an own copy of the weights, on one device, in one thread."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        decode: Decode,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_concurrent_rollouts: int = 512,
        max_prefill_tokens: int = 8192,
    ) -> None:
        self._decode = decode
        self._runner = ModelRunner(config, dtype, device or torch.device("cpu"))
        scheduler = Scheduler(
            max_running=max_concurrent_rollouts, max_prefill_tokens=max_prefill_tokens
        )
        self._engine = Engine(self._runner, scheduler, decode)
        self._inbox: queue.SimpleQueue[_Submission | _Update | _Close] = queue.SimpleQueue()
        self._open: list[_Submission] = []
        self._num_steps = 0
        self._thread = threading.Thread(target=self._serve, name="generator", daemon=True)
        self._thread.start()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """See `Generator`. Waits for the engine thread, which delivers every group or a failure."""
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[RolloutGroup | GeneratorFailure] = asyncio.Queue()
        waiting = {request.group_id for request in requests}

        def deliver(item: RolloutGroup | GeneratorFailure) -> None:
            loop.call_soon_threadsafe(arrivals.put_nowait, item)

        self._inbox.put(_Submission(requests=requests, deliver=deliver, waiting=set(waiting)))
        while waiting:
            item = await self._next(arrivals, waiting)
            if isinstance(item, GeneratorFailure):
                raise item
            waiting.remove(item.group_id)
            yield item

    async def _next(
        self, arrivals: asyncio.Queue[RolloutGroup | GeneratorFailure], waiting: set[str]
    ) -> RolloutGroup | GeneratorFailure:
        """Wait for the next arrival as long as the engine keeps making steps."""
        while True:
            before = self._num_steps
            try:
                return await asyncio.wait_for(arrivals.get(), STALL_SECONDS)
            except TimeoutError:
                if self._num_steps == before:
                    msg = f"no engine step for {STALL_SECONDS:.0f} s; missing {sorted(waiting)}"
                    raise GeneratorFailure(msg) from None

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`. Waits for the engine thread, which first finishes what it has begun."""
        done: Future[None] = Future()
        self._inbox.put(_Update(update=update, done=done))
        await asyncio.wrap_future(done)

    async def close(self) -> None:
        """See `Generator`."""
        if self._thread.is_alive():
            self._inbox.put(_Close())
            await asyncio.to_thread(self._thread.join, STALL_SECONDS)

    def _serve(self) -> None:
        """Obey commands and step the engine until closed. The only code that touches the engine."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                self._step()
                continue
            match command:
                case _Submission():
                    self._submit(command)
                case _Update():
                    self._apply(command)
                case _Close():
                    self._fail_open(GeneratorFailure("the generator was closed"))
                    return

    def _submit(self, submission: _Submission) -> None:
        if self._engine.policy_version is None:
            submission.deliver(
                GeneratorFailure("asked to generate before the first update_weights")
            )
            return
        self._open.append(submission)
        self._engine.submit(submission.requests)

    def _step(self) -> None:
        """One engine step; a failure in it ends every open submission, never the thread."""
        try:
            for collector in self._engine.step():
                self._deliver(collector)
        except (RuntimeError, ValueError, IndexError, HeadraceError) as error:
            self._engine.abort()
            failure = GeneratorFailure(f"the torch engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail_open(failure)
        self._num_steps += 1

    def _deliver(self, collector: GroupCollector) -> None:
        request = collector.request
        finished = sorted(collector.finished, key=lambda rollout: rollout.rollout_index)
        group = RolloutGroup(
            group_id=request.group_id,
            prompt=request.prompt,
            rollouts=tuple(r.to_rollout(self._decode(r.completion_ids)) for r in finished),
            sampling=request.sampling,
        )
        for submission in self._open:
            if request.group_id in submission.waiting:
                submission.waiting.remove(request.group_id)
                submission.deliver(group)
                break
        self._open = [submission for submission in self._open if submission.waiting]

    def _fail_open(self, failure: GeneratorFailure) -> None:
        for submission in self._open:
            submission.deliver(failure)
        self._open = []

    def _apply(self, command: _Update) -> None:
        """Finish what runs, then replace every weight and prove that all of them arrived."""
        while self._engine.has_work:
            self._step()
        try:
            self._load(command.update)
        except (WeightSyncError, RuntimeError, KeyError) as error:
            self._engine.policy_version = None
            command.done.set_exception(
                WeightSyncError(f"version {command.update.policy_version} was not loaded: {error}")
            )
        else:
            command.done.set_result(None)

    def _load(self, update: WeightUpdate) -> None:
        self._runner.load(update.tensors)
        held = checksum(self._runner.weights())
        if held != update.checksum:
            msg = f"checksum {held:x} of the loaded weights, {update.checksum:x} was published"
            raise WeightSyncError(msg)
        self._engine.policy_version = update.policy_version
