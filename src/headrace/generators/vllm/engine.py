"""One start of vLLM: its processes from launch to end, and calls to it that never hang.

Every call has a deadline. An engine that misses one is killed, and an engine that is dead, however
it died, shows as `EngineDied` in every call that was open. Knows nothing of prompts and groups, and
never starts itself again: that is the generator's decision.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.errors import GeneratorFailure
from headrace.generators.vllm.processes import ProcessTree, is_running
from headrace.generators.vllm.segment import Segment
from headrace.generators.vllm.settings import VllmSettings, exported

T = TypeVar("T")

_TICK_SECONDS = 0.25
"""How often a call that waits looks whether the engine still lives."""
_END_SECONDS = 30.0
"""A killed process that has not gone by then hangs in the kernel."""


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

    def __init__(self, client: Any, settings: VllmSettings, tree: ProcessTree) -> None:  # noqa: ANN401 - vLLM's own AsyncLLM
        self._client = client
        self._deadline = settings.options.call_deadline_seconds
        self._tree = tree
        self._ending: asyncio.Task[None] | None = None
        self._num_waiting = 0
        self._last_output = time.monotonic()
        self._is_still = False
        self._watchdog = asyncio.create_task(self._watch(), name="vllm-watchdog")

    @classmethod
    async def start(cls, settings: VllmSettings) -> VllmEngine:
        """Launch vLLM, without weights. Raises GeneratorFailure when it does not come up."""
        seconds = settings.options.start_deadline_seconds
        others = _core_pids()
        launch = asyncio.ensure_future(asyncio.to_thread(_launch, settings))
        try:
            done, _ = await asyncio.wait({launch}, timeout=seconds)
        finally:
            if not launch.done():
                # The thread cannot be ended; killing what it waits for lets it end by itself.
                await asyncio.to_thread(ProcessTree.below(_core_pids() - others).end, _END_SECONDS)
        if not done:
            msg = (
                f"vLLM was not ready after generator.vllm.start_deadline_seconds = {seconds:g}; "
                "raise it if the machine is slow"
            )
            raise GeneratorFailure(msg)
        try:
            client, roots = launch.result()
        except Exception as error:
            msg = f"vLLM did not start: {type(error).__name__}: {error}"
            raise GeneratorFailure(msg) from error
        engine = cls(client, settings, await asyncio.to_thread(ProcessTree.below, roots))
        try:
            await engine.tie()
        except BaseException:
            await engine.end()
            raise
        return engine

    async def tie(self) -> None:
        """Let the engine's processes end when this one does, however that happens."""
        from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415 - imported where it runs
            WeightTransferInitRequest,
        )

        owner = WeightTransferInitRequest(init_info={"owner_pid": os.getpid()})
        await self._call(self._client.init_weight_transfer_engine(owner), "first call")

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of this engine."""
        return self._tree.pids

    @property
    def is_dead(self) -> bool:
        """Whether it has been ended, or has lost one of its processes."""
        return (
            self._ending is not None or self._client.errored or not all(map(is_running, self.pids))
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
        collector = await self._call(adding, "request")
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
        update = {"segment": segment.info.to_dict()}
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
        roots = [pid for pid in self.pids[:1] if is_running(pid)]
        tree = ProcessTree.below(roots)
        tree = ProcessTree(
            pids=tuple({*self.pids, *tree.pids}),
            segments=tuple({*self._tree.segments, *tree.segments}),
        )
        await asyncio.to_thread(tree.end, _END_SECONDS)
        # Open streams are told by vLLM's own monitor, or here where that was faster.
        self._client.output_processor.propagate_error(EngineDied("the engine was ended"))
        await asyncio.to_thread(self._client.shutdown, 0.0)

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


def _launch(settings: VllmSettings) -> tuple[Any, list[int]]:
    """Import vLLM and start it; return the client and the processes it started."""
    with exported(settings.environment()):
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - takes seconds
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - as above

        class Client(AsyncLLM):
            """Is shut down by `VllmEngine.end`, and not once more by the interpreter at its end."""

            def __del__(self) -> None:
                pass

        client = Client.from_engine_args(AsyncEngineArgs(**settings.arguments()))
    return client, [
        process.pid for process in client.engine_core.resources.engine_manager.processes
    ]


def _core_pids() -> set[int]:
    """Return the engine cores that this process has started and that still run."""
    children = multiprocessing.active_children()
    return {child.pid for child in children if child.name == "EngineCore" and child.pid is not None}


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
