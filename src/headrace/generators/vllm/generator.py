"""VllmGenerator: the Generator role around vLLM, whose engine runs in processes of its own.

Each rollout is a request of its own. That is what vLLM's front end makes of ``n = G`` too, and so
every rollout has its own seed, goes on alone after an interruption, and shares its prompt with its
group through the prefix cache all the same. Owns the promise that every rollout asked for comes
back: one that the death of an engine interrupts is submitted again with the tokens it has.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing

import torch

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.admission import check_requests
from headrace.generators.failure_watch import FailureWatch
from headrace.generators.stop_strings import Decode
from headrace.generators.vllm.engine import EngineDied, VllmEngine
from headrace.generators.vllm.flight import Flight
from headrace.generators.vllm.groups import OpenGroup, OpenGroups
from headrace.generators.vllm.sampling import check_request, engine_params
from headrace.generators.vllm.segment import written
from headrace.generators.vllm.settings import VllmSettings
from headrace.generators.vllm.statistics import Statistics
from headrace.generators.vllm.supervisor import CLOSED, Supervisor
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import misfits
from headrace.types import GenerationRequest, OnUpdate, RolloutGroup, WeightUpdate

MAX_TRIES = 3
"""A rollout that vLLM gives up is submitted this many times without a token before it fails."""
_PATIENCE_SECONDS = 1.0
"""Before each of them: an engine that is ending has then ended, and another one takes over."""


class VllmGenerator:
    """Samples with vLLM. Belongs to the event loop of its first update."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        decode: Decode,
        settings: VllmSettings,
        on_update: OnUpdate = "wait",
    ) -> None:
        """Start nothing yet: the engine starts with the first weights."""
        self._config = config
        self._decode = decode
        self._on_update: OnUpdate = on_update
        self._max_tokens = settings.options.max_model_len or config.max_positions
        with torch.device("meta"):
            self._expected = dict(Decoder(config).to(settings.dtype).named_parameters())
        self._supervisor = Supervisor(settings)
        self._updates = asyncio.Lock()
        self._admission = asyncio.Event()
        self._admission.set()
        self._landed = asyncio.Condition()
        self._groups = OpenGroups()
        self._in_air: dict[Flight, str] = {}
        """Rollouts that an engine works at, and the id of their newest request."""
        self._ids = itertools.count()
        self._statistics = Statistics()
        self._failures = FailureWatch()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """See `Generator`. What the caller does not wait for is taken back.

        Raises GeneratorFailure before anything is sampled, or when engines die one after another.
        """
        check_requests(requests, self._config)
        for request in requests:
            check_request(request, self._max_tokens)
        self._supervisor.require_weights()
        opened = [OpenGroup(request, self._decode, self._fly) for request in requests]
        arrivals: asyncio.Queue[OpenGroup] = asyncio.Queue()
        self._groups.add(opened)
        try:
            for group in opened:
                group.start(arrivals.put_nowait)
            for _ in opened:
                # Every group arrives: its rollouts end, are taken back, or fail.
                yield (await arrivals.get()).result()
        finally:
            self._groups.remove(opened)
            await asyncio.gather(*(group.take_back() for group in opened))

    async def _fly(self, flight: Flight) -> None:
        """Sample one rollout to its end, with as many engines as that takes.

        Waits while an update or a restart is going on; unblocked by their end.
        """
        await self._admission.wait()
        self._in_air[flight] = ""
        try:
            await self._bring_to_its_end(flight)
            self._supervisor.note_ended_rollout()
            self._note_ended(flight)
        finally:
            del self._in_air[flight]
            async with self._landed:
                self._landed.notify_all()

    async def _bring_to_its_end(self, flight: Flight) -> None:
        num_tries = 0
        while not flight.has_ended:
            engine = await self._supervisor.ready()
            life, num_tokens = flight.life, len(flight.completion_ids)
            try:
                await self._sample(engine, flight)
            except EngineDied:
                await self._supervisor.revive(engine)
                continue
            if flight.life != life or flight.finish_reason is not None:
                continue
            # vLLM gave it up by itself, as an engine does that is about to end.
            num_tries = 1 if len(flight.completion_ids) > num_tokens else num_tries + 1
            if num_tries > MAX_TRIES:
                msg = (
                    f"vLLM ended rollout {flight.rollout_index} {num_tries} times without a token "
                    "and without a reason; VLLM_LOGGING_LEVEL=INFO shows what it says"
                )
                raise GeneratorFailure(msg)
            await asyncio.sleep(_PATIENCE_SECONDS)

    def _note_ended(self, flight: Flight) -> None:
        """Count one that has ended. Raises GeneratorFailure when too many came to an error."""
        self._statistics.add(flight)
        version = self._supervisor.policy_version
        assert version is not None
        self._failures.note(
            num_failed=int(flight.finish_reason == "error"),
            num_ended=1,
            num_running=len(self._in_air),
            version=version,
        )

    async def _sample(self, engine: VllmEngine, flight: Flight) -> None:
        """Let ``engine`` sample until the rollout ends or starts over. Raises EngineDied."""
        version = self._supervisor.policy_version
        assert version is not None
        flight.begin(version)
        life, request_id = flight.life, f"rollout-{next(self._ids)}"
        self._in_air[flight] = request_id
        params = engine_params(
            flight.request.sampling,
            num_done=len(flight.completion_ids),
            seed=flight.seed,
            vocab_size=self._config.vocab_size,
        )
        prompt, is_first = flight.token_ids, True
        # Keys of one version never meet rollouts that begin under another.
        stream = engine.stream(request_id, prompt, params, salt=f"version {version}")
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if flight.life != life:
                    return
                if is_first:
                    self._statistics.note_prefill(len(prompt), delta.num_found)
                    is_first = False
                flight.extend(delta)
                if flight.has_ended:
                    return

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`. The first one starts the engine.

        With ``wait``, waits for all rollouts in the engine, which end or have their own deadline.
        Raises WeightSyncError, after which the old weights are as they were.
        """
        if wrong := misfits(self._expected, update.tensors):
            msg = f"version {update.policy_version}: {wrong}"
            raise WeightSyncError(msg)
        segment, is_handed_over = await written(update), False
        try:
            async with self._updates:
                self._admission.clear()
                try:
                    await self._let_land(update.policy_version)
                    is_handed_over = True
                    await self._supervisor.replace(segment, self._on_update, self._take_back)
                except GeneratorFailure as failure:
                    msg = f"version {update.policy_version}: {failure}"
                    raise WeightSyncError(msg) from failure
                finally:
                    self._admission.set()
        finally:
            if not is_handed_over:
                segment.close()

    async def _let_land(self, policy_version: int) -> None:
        if self._on_update != "wait":
            return
        async with self._landed:
            await self._landed.wait_for(lambda: not self._in_air or self._supervisor.is_paused)
        if self._in_air:
            msg = (
                f"version {policy_version}: the generator is paused with unfinished rollouts, and "
                'generator.on_update = "wait" would wait for them for ever; resume it first'
            )
            raise WeightSyncError(msg)

    def _take_back(self) -> list[str]:
        """Return the requests that may not go on under new weights; their rollouts do, in others.

        Under ``keep`` these are the ones that have sampled nothing: keys of old weights would serve
        a first token that says it is of the new ones.
        """
        version, taken = self._supervisor.policy_version, []
        assert version is not None
        for flight, request_id in self._in_air.items():
            if flight.has_ended:
                continue
            if self._on_update == "restart":
                flight.start_over(version)
            elif self._on_update == "keep" and flight.is_queued:
                flight.submit_again()
            else:
                continue
            taken.append(request_id)
        return [request_id for request_id in taken if request_id]

    async def pause(self) -> None:
        """See `Interruptible`."""
        await self._supervisor.pause()
        async with self._landed:
            self._landed.notify_all()

    async def resume(self) -> None:
        """See `Interruptible`."""
        await self._supervisor.resume()

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `Interruptible`."""
        await asyncio.gather(*(group.take_back() for group in self._groups.find(group_ids)))

    def metrics(self) -> Mapping[str, float]:
        """See `Generator`."""
        taken, self._statistics = self._statistics, Statistics()
        supervisor = self._supervisor
        seconds, supervisor.update_seconds = supervisor.update_seconds, 0.0
        num_restarts, supervisor.num_restarts = supervisor.num_restarts, 0
        return taken.metrics() | {
            "generator/engine/num_restarts": float(num_restarts),
            "generator/idle/weights_seconds": seconds,
        }

    async def close(self) -> None:
        """See `Generator`."""
        closed = GeneratorFailure(CLOSED)
        await asyncio.gather(*(group.take_back(closed) for group in self._groups.all()))
        await self._supervisor.close()
