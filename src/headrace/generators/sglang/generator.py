"""SGLangGenerator: the Generator and Interruptible roles over SGLang servers.

Checks requests, opens groups and gives them back; `Calls` samples their rollouts and `Updates`
stops the servers and brings them weights. Starts no server and ends none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config import SGLangConfig
from headrace.config.sglang_rules import sglang_refusals
from headrace.errors import GeneratorFailure
from headrace.generators.admission import check_requests
from headrace.generators.sglang.calls import Calls, OpenGroup, OpenRollout, take_back
from headrace.generators.sglang.client import Server, http_client
from headrace.generators.sglang.draft import Draft
from headrace.generators.sglang.sampling import unsupported_by
from headrace.generators.sglang.servers import Member, usable
from headrace.generators.sglang.statistics import Statistics
from headrace.generators.sglang.uninterrupted import in_thread, to_the_end
from headrace.generators.sglang.updates import CLOSED, Updates
from headrace.generators.sglang.weights import PublishedWeights
from headrace.generators.stop_strings import Decode
from headrace.models.decoder_config import DecoderConfig
from headrace.types import GenerationRequest, OnUpdate, RolloutGroup, WeightUpdate


class SGLangGenerator:
    """Samples with servers that were launched by somebody else."""

    def __init__(
        self,
        options: SGLangConfig,
        config: DecoderConfig,
        *,
        hf_config: Mapping[str, Any],
        model_directory: Path,
        decode: Decode,
        api_key: str | None = None,
        on_update: OnUpdate = "wait",
        max_concurrent_rollouts: int = 512,
    ) -> None:
        """``hf_config`` and ``model_directory`` are the run's model, as it is published.

        ``api_key`` is sent as a bearer token: what the servers were given as ``--api-key``.
        """
        self._config = config
        self._decode = decode
        self._http = http_client(api_key, options.connect_deadline_seconds)
        members = [Member(Server(url, self._http), options) for url in options.urls]
        self._calls = Calls(members, options, max_open=max_concurrent_rollouts)
        self._weights = PublishedWeights(options.weights_directory, hf_config, model_directory)
        architectures = hf_config.get("architectures") or [None]
        self._updates = Updates(
            self._calls, self._weights, lambda: tuple(self._open), on_update, architectures[0]
        )
        self._open: dict[OpenGroup, None] = {}
        self._is_closed = False

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """See `Generator`. Waits for the servers; every call to one has a deadline of its own.

        Raises GeneratorFailure before anything is sampled if one of ``requests`` cannot be served.
        What the caller does not wait for is taken back.
        """
        self._refuse(requests)
        await self._updates.admission.passed()
        self._refuse(requests)
        groups = [self._opened(request) for request in requests]
        tasks = [asyncio.create_task(_finished(group)) for group in groups]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            await self._closed(groups, tasks)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`. Each server has ``generator.sglang.update_deadline_seconds`` to load."""
        await self._updates.update(update)

    def metrics(self) -> Mapping[str, float]:
        """See `Generator`."""
        taken, self._calls.statistics = self._calls.statistics, Statistics()
        return taken.metrics(len(usable(self._calls.members, self._calls.name)))

    async def pause(self) -> None:
        """See `Interruptible`."""
        await self._updates.pause()

    async def resume(self) -> None:
        """See `Interruptible`."""
        await self._updates.resume()

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `Interruptible`. A rollout whose server answers no abort keeps what it had before."""
        unknown = set(group_ids) - {group.request.group_id for group in self._open}
        if unknown:
            msg = f"groups {', '.join(sorted(unknown))} are in no open call; nothing was aborted"
            raise GeneratorFailure(msg)
        groups = [group for group in self._open if group.request.group_id in group_ids]
        rollouts = [
            r
            for group in groups
            for r in group.rollouts
            if r.task is not None and not r.task.done()
        ]
        for group in groups:
            group.is_aborted = True
        await self._updates.queue_paused()
        await asyncio.gather(*map(take_back, rollouts))

    async def close(self) -> None:
        """See `Generator`. The servers stay as they are, and go on if they were paused."""
        if self._is_closed:
            return
        self._is_closed = True
        self._calls.name = None
        for group in self._open:
            group.fail(GeneratorFailure(CLOSED))
        await to_the_end(self._let_go())

    async def _let_go(self) -> None:
        """End what is open, set the servers going, hang up, and remove what was written."""
        tasks = [r.task for g in self._open for r in g.rollouts if r.task is not None]
        try:
            if tasks:
                await asyncio.wait(tasks)
            await self._updates.close()
            await self._http.aclose()
        finally:
            # What a disk that hangs keeps is removed by the next run.
            with contextlib.suppress(TimeoutError):
                await in_thread(self._weights.close, self._calls.options.control_deadline_seconds)

    def _refuse(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise GeneratorFailure for what no server can do, before any of it is begun."""
        if self._is_closed:
            raise GeneratorFailure(CLOSED)
        if self._calls.name is None:
            msg = "generate was called before the first update_weights, or after one that failed"
            raise GeneratorFailure(msg)
        check_requests(requests, self._config)
        members = usable(self._calls.members, self._calls.name)
        for request in requests:
            sampling, length = request.sampling, len(request.prompt.token_ids)
            problems = [f"sampling.{keys[0]} {why}" for keys, why in sglang_refusals(sampling)]
            for member in members:
                assert member.facts is not None
                found = unsupported_by(member.facts, sampling, length)
                problems += [f"{member.url}: {problem}" for problem in found]
            if problems:
                msg = f"group {request.group_id}: {'; '.join(problems)}"
                raise GeneratorFailure(msg)

    def _opened(self, request: GenerationRequest) -> OpenGroup:
        """Begin all rollouts of ``request``, in order."""
        drafts = [Draft(request, k, self._decode) for k in range(request.group_size)]
        group = OpenGroup(request, [OpenRollout(draft) for draft in drafts])
        self._open[group] = None
        for rollout in group.rollouts:
            rollout.task = asyncio.create_task(self._calls.finish(group, rollout))
        return group

    async def _closed(
        self, groups: Sequence[OpenGroup], tasks: Sequence[asyncio.Task[RolloutGroup]]
    ) -> None:
        """End what nobody waits for any more."""
        for group in groups:
            self._open.pop(group, None)
            group.fail(GeneratorFailure("nobody waits for it"))
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # seen: the first one has been raised


async def _finished(group: OpenGroup) -> RolloutGroup:
    """Wait for all rollouts of ``group`` and return it. One that fails ends the others."""
    tasks = [rollout.task for rollout in group.rollouts if rollout.task is not None]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    if group.failure is not None:
        raise group.failure
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    assert group.is_aborted or not any(task.cancelled() for task in tasks)
    return RolloutGroup(
        group_id=group.request.group_id,
        prompt=group.request.prompt,
        rollouts=tuple(rollout.draft.rollout() for rollout in group.rollouts),
        sampling=group.request.sampling,
    )
