"""Generators without a model: what they sample rests on seed, place and version alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.pool.proxy import Hosted
from headrace.types import (
    GenerationRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    VersionSpan,
    WeightNotice,
    WeightPart,
    WeightUpdate,
    derive_seed,
)


def request(
    group_id: str, size: int = 2, *, seed: int = 0, max_tokens: int = 8
) -> GenerationRequest:
    prompt = Prompt(
        prompt_id=f"prompt-of-{group_id}",
        source="train",
        text="what is it?",
        token_ids=(1, 2, 3),
        answer="42",
        metadata={"row": 7},
    )
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(
        group_id=group_id, prompt=prompt, group_size=size, sampling=sampling, seed=seed
    )


def sampled(asked: GenerationRequest, version: int) -> RolloutGroup:
    """What any generator makes of it, at once; what was begun keeps what it has."""
    begun = {rollout.rollout_index: rollout for rollout in asked.begun}
    return RolloutGroup(
        group_id=asked.group_id,
        prompt=asked.prompt,
        sampling=asked.sampling,
        rollouts=tuple(
            whole(asked, index, version, begun.get(index)) for index in range(asked.group_size)
        ),
    )


def tokens(asked: GenerationRequest, index: int) -> tuple[int, ...]:
    count = asked.sampling.max_tokens
    return tuple(derive_seed(asked.seed, asked.group_id, index, n) % 97 for n in range(count))


def whole(
    asked: GenerationRequest, index: int, version: int, begun: Rollout | None = None
) -> Rollout:
    if begun is not None and not begun.may_go_on:
        return begun
    ids = tokens(asked, index)
    held = 0 if begun is None else len(begun.completion_ids)
    spans = () if begun is None else begun.version_spans
    assert begun is None or begun.completion_ids == ids[:held]
    return Rollout(
        rollout_index=index,
        completion_ids=ids,
        loss_mask=(True,) * len(ids),
        generator_logprobs=(-1.0,) * len(ids),
        version_spans=(*spans, VersionSpan(policy_version=version, start=held, end=len(ids))),
        finish_reason="length",
        text="",
    )


def cut(group: RolloutGroup, length: int) -> RolloutGroup:
    """The group as it was when each rollout had so many tokens."""
    return replace(group, rollouts=tuple(_cut(rollout, length) for rollout in group.rollouts))


def _cut(rollout: Rollout, length: int) -> Rollout:
    if len(rollout.completion_ids) <= length:
        return rollout
    spans = (
        replace(span, end=min(span.end, length))
        for span in rollout.version_spans
        if span.start < length
    )
    return replace(
        rollout,
        completion_ids=rollout.completion_ids[:length],
        loss_mask=rollout.loss_mask[:length],
        generator_logprobs=rollout.generator_logprobs[:length],
        version_spans=tuple(spans),
        finish_reason="abort",
    )


def notice(version: int) -> WeightNotice:
    part = WeightPart(policy_version=version, checksum=version, place="nowhere", num_bytes=0)
    return WeightNotice(parts=(part,))


class FakeReader:
    """Finds at each place what the notice says of it; refuses the place ``lost``."""

    def open(self, found: WeightNotice) -> AbstractContextManager[WeightUpdate]:
        if found.parts[-1].place == "lost":
            msg = f"version {found.policy_version} is not there any more"
            raise WeightSyncError(msg)
        return nullcontext(
            WeightUpdate(policy_version=found.policy_version, tensors={}, checksum=found.checksum)
        )

    def close(self) -> None:
        pass


class FakeStore:
    def __init__(self) -> None:
        self.released: list[int] = []

    async def write(self, update: WeightUpdate, *, is_whole: bool = False) -> WeightNotice:
        assert is_whole
        return notice(update.policy_version)

    def release(self, policy_version: int) -> None:
        self.released.append(policy_version)

    def close(self) -> None:
        pass


class FakeGenerator:
    """Obeys its orders: a group whose seed is named is what kills, hangs or breaks it."""

    def __init__(self, faults: Mapping[int, str] | None = None) -> None:
        self.faults = dict(faults or {})
        self.version: int | None = None
        self.runs = asyncio.Event()
        self.runs.set()
        self.open: list[tuple[str, asyncio.Future[None]]] = []
        self.num_asked = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        loop = asyncio.get_running_loop()
        self.num_asked += len(requests)
        mine = [(asked.group_id, loop.create_future()) for asked in requests]
        self.open += mine
        for asked, entry in zip(requests, mine, strict=True):
            await self._fault(self.faults.get(asked.seed))
            going = asyncio.ensure_future(self.runs.wait())
            try:
                await asyncio.wait({going, entry[1]}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                going.cancel()
            assert self.version is not None
            self.open.remove(entry)
            group = sampled(asked, self.version)
            yield cut(group, 3) if entry[1].done() else group

    async def _fault(self, fault: str | None) -> None:
        match fault:
            case "exit":
                print("the roof is on fire", flush=True)  # noqa: T201 - its last words
                os._exit(3)
            case "refuse":
                msg = "no such request"
                raise GeneratorFailure(msg)
            case "break":
                msg = "the torch engine failed"
                raise GeneratorFailure(msg) from MemoryError()
            case "stray":
                msg = "stray"
                raise RuntimeError(msg)
            case _:
                await asyncio.sleep(0)

    async def update_weights(self, update: WeightUpdate) -> None:
        await asyncio.sleep(0)
        self.version = update.policy_version

    async def pause(self) -> None:
        self.runs.clear()

    async def resume(self) -> None:
        self.runs.set()

    async def abort(self, group_ids: Sequence[str]) -> None:
        if unknown := set(group_ids) - {name for name, _ in self.open}:
            msg = f"asked to abort {unknown}"
            raise GeneratorFailure(msg)
        for name, aborted in self.open:
            if name in group_ids and not aborted.done():
                aborted.set_result(None)

    def metrics(self) -> Mapping[str, float]:
        count, self.num_asked = self.num_asked, 0
        return {"generator/engine/num_asked": float(count)}

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class FakeSpec:
    """Builds it in a child process."""

    faults: Mapping[int, str] | None = None
    start: str = "well"

    def build(self) -> Hosted:
        match self.start:
            case "exit":
                os._exit(5)
            case "refuse":
                msg = "there is no such model"
                raise GeneratorFailure(msg)
            case "hang":
                import time  # noqa: PLC0415 - of this fault alone

                time.sleep(3600)
        return Hosted(generator=FakeGenerator(self.faults), weights=FakeReader())
