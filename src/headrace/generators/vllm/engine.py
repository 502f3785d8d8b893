"""One start of vLLM: its processes from launch to end, and calls to it that never hang.

Every call has a deadline. An engine that misses one is killed, and an engine that is dead, however
it died, shows as `EngineDied` in every call that was open. Knows nothing of prompts and groups, and
never starts itself again: that is the generator's decision.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.generators.vllm.launch import END_SECONDS, Launch, Launched, end_client
from headrace.generators.vllm.processes import ProcessTree
from headrace.generators.vllm.segment import Segment
from headrace.generators.vllm.settings import VllmSettings

T = TypeVar("T")

_TICK_SECONDS = 0.25
"""How often a call that waits looks whether the engine still lives."""


class EngineDied(Exception):
    """The engine's processes are dead or were just killed for not answering."""


class UpdateRefused(Exception):
    """The engine answered a weight update with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one request has gained since the last one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    """Of each token, as the engine core stamped its step."""
    finish_reason: str | None
    num_found: int
    """Prompt tokens that were found in the cache."""


class VllmEngine:
    """An AsyncLLM and the processes below it. Belongs to the event loop it was started in."""

    def __init__(self, launched: Launched, settings: VllmSettings, tree: ProcessTree) -> None:
        self._launched = launched
        self._client = launched.client
        self._settings = settings
        self._deadline = settings.options.call_deadline_seconds
        self._tree = tree
        self._vital = launched.roots
        self._ending: asyncio.Task[None] | None = None
        self._num_waiting = 0
        self._last_output = time.monotonic()
        self._is_still = False
        self._watchdog = asyncio.create_task(self._watch(), name="vllm-watchdog")

    @classmethod
    async def start(cls, settings: VllmSettings) -> VllmEngine:
        """Launch vLLM, without weights. Raises GeneratorFailure when it does not come up."""
        launched = await Launch(settings).run(settings.options.start_deadline_seconds)
        # Looked at here and not in a thread: nothing may come between, and it takes milliseconds.
        engine = cls(launched, settings, ProcessTree.below(launched.roots))
        try:
            await engine.tie()
        except BaseException:
            await engine.end()
            raise
        return engine

    async def tie(self) -> None:
        """Let the engine's processes end when this one does, and learn which are its workers."""
        from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415 - imported where it runs
            WeightTransferInitRequest,
        )

        owner = WeightTransferInitRequest(init_info={"owner_pid": os.getpid()})
        await self._call(self._client.init_weight_transfer_engine(owner), "first call")
        workers = await self._call(self._client.collective_rpc("process_id"), "first call")
        self._vital = (*self._launched.roots, *workers)

    @property
    def pids(self) -> tuple[int, ...]:
        """Its cores and workers, without which it is dead."""
        return self._vital

    @property
    def is_dead(self) -> bool:
        """Whether it has been ended, or has lost one of the processes it cannot be without."""
        return (
            self._ending is not None
            or self._client.errored
            or not all(map(self._tree.has, self._vital))
        )

    async def stream(
        self, request_id: str, token_ids: Sequence[int], params: object, salt: str
    ) -> AsyncGenerator[Delta, None]:
        """Yield what the request gains until it ends. Closing the iterator takes it back.

        Requests of different ``salt`` share nothing of the cache. Raises EngineDied.
        """
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415 - vLLM is only imported here

        prompt = tokens_input(list(token_ids), cache_salt=salt)
        adding = self._client.add_request(request_id, prompt, params)
        try:
            collector = await self._call(adding, "request")
        except BaseException:
            # It may be in the engine already, where nobody would wait for it.
            if not self.is_dead:
                await self._client.abort(request_id)
            raise
        # vLLM reports versions with a finished request alone; until then they are here. It is
        # absent when the request has finished already.
        state = self._client.output_processor.request_states.get(collector.request_id)
        versions = state.weight_version_starts if state is not None else ()
        start, finished = 0, False
        self._num_waiting += 1
        self._last_output = time.monotonic()
        try:
            while not finished:
                output = collector.get_nowait() or await self._alive(collector.get())
                self._last_output = time.monotonic()
                finished = output.finished
                delta = _delta(output, versions, start)
                start += len(delta.token_ids)
                yield delta
        finally:
            self._num_waiting -= 1
            if not finished and not self.is_dead:
                await self._client.abort(collector.request_id, internal=True)
            collector.close()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their streams say so. Those that are not open are no error."""
        await self._call(self._client.abort(list(request_ids)), "abort")

    async def pause(self, *, forget_cache: bool) -> None:
        """Return once no token is being sampled. With ``forget_cache`` all keys go.

        What was running computes them once more when it goes on.
        """
        self._is_still = True
        await self._call(
            self._client.pause_generation(mode="keep", clear_cache=forget_cache), "pause"
        )

    async def resume(self) -> None:
        """Go on."""
        await self._call(self._client.resume_generation(), "resume")
        self._last_output = time.monotonic()
        self._is_still = False

    async def load(self, segment: Segment) -> Mapping[str, int]:
        """Replace all weights while paused; return what the first worker says of them.

        Raises UpdateRefused when a worker answers with an error. The engine then holds its old
        weights or a mixture, and must not go on unless it is known which.
        """
        update = {"segment": segment.info.to_json()}
        rpc = self._client.collective_rpc
        try:
            await self._call(self._client.start_weight_update(), "start of an update")
            await self._call(rpc("update_weights", kwargs={"update_info": update}), "update")
            version = str(segment.info.policy_version)
            await self._call(self._client.finish_weight_update(version), "end of an update")
            reports = await self._call(rpc("loaded_weights_report"), "report of an update")
        except EngineDied:
            raise
        except Exception as error:
            raise UpdateRefused(str(error)) from error
        report: Mapping[str, int] = reports[0]
        unread = report["num_unread"]
        if unread and self._settings.options.tensor_parallel_size == 1:
            msg = f"{unread} of the published tensors could not be read back from the engine"
            raise UpdateRefused(msg)
        return report

    async def end(self) -> None:
        """Kill every process and unlink what they shared. Idempotent."""
        if self._ending is None:
            self._watchdog.cancel()
            self._ending = asyncio.create_task(self._end(), name="vllm-end")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        # What follows is no accident that vLLM would have to report.
        self._client.engine_core.resources.engine_dead = True
        if self._client.output_handler is not None:
            self._client.output_handler.cancel()
        now = ProcessTree.below(filter(self._tree.has, self._launched.roots))
        await asyncio.to_thread(self._tree.joined(now).end, END_SECONDS)
        # Open streams are told by vLLM's own monitor, or here where that was faster.
        self._client.output_processor.propagate_error(EngineDied("the engine was ended"))
        await asyncio.to_thread(end_client, self._launched)
        await asyncio.to_thread(shutil.rmtree, self._launched.directory, ignore_errors=True)

    async def _alive(self, awaitable: Awaitable[T]) -> T:
        """Wait, with `EngineDied` for all that vLLM raises once its engine is dead."""
        try:
            return await awaitable
        except Exception as error:
            if isinstance(error, EngineDied) or self.is_dead:
                raise EngineDied(str(error)) from error
            raise

    async def _call(self, awaitable: Awaitable[T], what: str) -> T:
        """Wait for an answer; vLLM leaves a call open when the engine dies under it."""
        if self.is_dead:
            asyncio.ensure_future(awaitable).cancel()
            raise EngineDied(what)
        future = asyncio.ensure_future(awaitable)
        deadline = time.monotonic() + self._deadline
        try:
            while not (await asyncio.wait({future}, timeout=_TICK_SECONDS))[0]:
                if self.is_dead:
                    raise EngineDied(what)
                if time.monotonic() > deadline:
                    await self.end()
                    msg = f"{what}: no answer for {self._deadline:g} s"
                    raise EngineDied(msg)
            return await self._alive(future)
        finally:
            future.cancel()

    async def _watch(self) -> None:
        """Ends the engine when requests wait and no token comes; ended by `end`."""
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._deadline))
            silence = time.monotonic() - self._last_output
            hangs = not self._is_still and silence > self._deadline
            if self._num_waiting and (hangs or self.is_dead):
                await self.end()


def _delta(output: Any, starts: Sequence[tuple[str, int]], position: int) -> Delta:  # noqa: ANN401 - vLLM's own
    """Read one output of vLLM, whose first token is number ``position`` of its request."""
    (completion,) = output.outputs
    if completion.weight_versions is not None:
        starts = [(span.version, span.start) for span in completion.weight_versions]
    ids = tuple(completion.token_ids)
    logprobs = completion.logprobs or []
    return Delta(
        token_ids=ids,
        logprobs=tuple(found[token].logprob for found, token in zip(logprobs, ids, strict=True)),
        policy_versions=tuple(_version_at(starts, position + k) for k in range(len(ids))),
        finish_reason=completion.finish_reason,
        num_found=output.num_cached_tokens or 0,
    )


def _version_at(starts: Sequence[tuple[str, int]], position: int) -> int:
    """Return the version of one token, from where each version begins, in order."""
    return int(next(version for version, start in reversed(starts) if start <= position))
