"""A generator that samples a token of each rollout in each turn of the event loop, and tells so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from pool_lab import tokens

from headrace.generators.progress import Marks, Progress, RolloutPart, packed
from headrace.generators.version_spans import version_spans
from headrace.types import GenerationRequest, OnUpdate, Rollout, RolloutGroup, WeightUpdate


def length_of(asked: GenerationRequest, index: int) -> int:
    """How long a rollout becomes: each of a group another number of tokens."""
    return max(asked.sampling.max_tokens - index, 1)


def rollout(asked: GenerationRequest, index: int, versions: Sequence[int]) -> Rollout:
    """It, as far as tokens of ``versions`` go."""
    count, most = len(versions), length_of(asked, index)
    return Rollout(
        rollout_index=index,
        completion_ids=tokens(asked, index)[:count],
        loss_mask=(True,) * count,
        generator_logprobs=tuple(-float(version) - n for n, version in enumerate(versions)),
        version_spans=version_spans(versions),
        finish_reason="abort" if count < most else "stop",
        text=f"{count} tokens" if count == most else "",
        kept_support=tuple(bytes([n]) for n in range(count)),
        raw_logprobs=tuple(-0.5 - n for n in range(count)),
    )


def undisturbed(asked: GenerationRequest, version: int) -> RolloutGroup:
    """What comes of ``asked`` under weights that never change."""
    return RolloutGroup(
        group_id=asked.group_id,
        prompt=asked.prompt,
        sampling=asked.sampling,
        rollouts=tuple(
            rollout(asked, k, (version,) * length_of(asked, k)) for k in range(asked.group_size)
        ),
    )


class SteppingGenerator:
    """Obeys ``on_update`` as the torch engine does, but for ``wait``, which tests see to."""

    def __init__(self, on_update: OnUpdate = "keep", steps_left: int | None = None) -> None:
        self.on_update = on_update
        self.steps_left = steps_left
        """Before it stands still; None: it does not."""
        self.version: int | None = None
        self.runs = asyncio.Event()
        self.runs.set()
        self.num_sampled = 0
        self.groups: dict[str, tuple[GenerationRequest, dict[int, Rollout]]] = {}
        self.aborted: set[str] = set()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        mine = {asked.group_id: asked for asked in requests}
        for name, asked in mine.items():
            begun = {r.rollout_index: r for r in asked.begun}
            fresh = {k: rollout(asked, k, ()) for k in range(asked.group_size)}
            self.groups[name] = (asked, fresh | begun)
        try:
            while mine:
                await asyncio.sleep(0)
                if self.runs.is_set() and self.steps_left != 0:
                    self.steps_left = None if self.steps_left is None else self.steps_left - 1
                    for name in mine:
                        self._step(name)
                for name in list(mine):
                    asked, rollouts = self.groups[name]
                    if name in self.aborted or not any(r.may_go_on for r in rollouts.values()):
                        del mine[name], self.groups[name]
                        self.aborted.discard(name)
                        yield replace(
                            undisturbed(asked, 0),
                            rollouts=tuple(rollouts[k] for k in range(asked.group_size)),
                        )
        finally:
            for name in mine:
                del self.groups[name]

    def _step(self, name: str) -> None:
        asked, rollouts = self.groups[name]
        assert self.version is not None
        for index, known in rollouts.items():
            if known.may_go_on:
                rollouts[index] = rollout(asked, index, (*known.policy_versions, self.version))
                self.num_sampled += 1

    async def progress(self, marks: Marks) -> Progress:
        await asyncio.sleep(0)
        parts: dict[str, tuple[RolloutPart, ...]] = {}
        for name, wanted in marks.items():
            known = self.groups[name][1] if name in self.groups else {}
            told = []
            for index, mark in wanted.items():
                held = known.get(index)
                if held is None or (held.may_go_on and len(held.completion_ids) == mark.num_tokens):
                    continue
                told.append(part_of(held, mark.num_tokens))
            if told:
                parts[name] = tuple(told)
        return Progress(parts=parts, seconds=1e-6)

    async def update_weights(self, update: WeightUpdate) -> None:
        await asyncio.sleep(0)
        self.version = update.policy_version
        if self.on_update == "restart":
            for asked, rollouts in self.groups.values():
                for index, known in rollouts.items():
                    if known.may_go_on:
                        rollouts[index] = rollout(asked, index, ())

    async def pause(self) -> None:
        self.runs.clear()

    async def resume(self) -> None:
        self.runs.set()

    async def abort(self, group_ids: Sequence[str]) -> None:
        self.aborted.update(set(group_ids) & set(self.groups))

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        pass


def part_of(held: Rollout, start: int) -> RolloutPart:
    """What ``held`` has from token ``start`` on; all of it if that is beyond its end."""
    start = start if start <= len(held.completion_ids) else 0
    assert held.kept_support is not None
    assert held.raw_logprobs is not None
    return packed(
        held.rollout_index,
        start,
        completion_ids=held.completion_ids[start:],
        generator_logprobs=held.generator_logprobs[start:],
        loss_mask=held.loss_mask[start:],
        policy_versions=held.policy_versions[start:],
        raw_logprobs=held.raw_logprobs[start:],
        kept_support=held.kept_support[start:],
        finish_reason=held.finish_reason,
        text=held.text,
    )
