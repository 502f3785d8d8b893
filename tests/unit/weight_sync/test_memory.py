from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest
import torch
from sync_lab import published
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.models.weights import checksum, copied_update, weight_update
from headrace.types import GenerationRequest, RolloutGroup, WeightUpdate
from headrace.weight_sync import MemoryRoom, MemoryWeightSync


class FakeGenerator:
    """Keeps what it is sent, and refuses what does not have the published checksum."""

    def __init__(self, *, loses: str | None = None, gate: asyncio.Event | None = None) -> None:
        """``gate``: what it waits for before it copies."""
        self.held: dict[str, Tensor] = {}
        self.versions: list[int] = []
        self._loses, self._gate = loses, gate

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        assert not requests
        return
        yield

    async def update_weights(self, update: WeightUpdate) -> None:
        if self._gate is not None:
            await self._gate.wait()
        tensors = {name: t.clone() for name, t in update.tensors.items() if name != self._loses}
        if checksum(tensors.items()) != update.checksum:
            msg = "lost a tensor"
            raise WeightSyncError(msg)
        self.held = tensors
        self.versions.append(update.policy_version)

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        self.held = {}


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


async def export() -> WeightUpdate:
    return weight_update(3, WEIGHTS)


def test_every_generator_holds_the_weights_and_the_version_once_published() -> None:
    generators = [FakeGenerator(), FakeGenerator()]
    asyncio.run(published(MemoryWeightSync(export, generators), 3))
    for generator in generators:
        assert generator.versions == [3]
        assert all(torch.equal(generator.held[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_generator_that_lost_a_tensor_is_an_error_of_the_publisher() -> None:
    generators = [FakeGenerator(), FakeGenerator(loses="b")]
    with pytest.raises(WeightSyncError, match="lost a tensor"):
        asyncio.run(published(MemoryWeightSync(export, generators), 3))


def test_each_publication_exports_anew() -> None:
    weight = torch.zeros(3)
    versions = iter((0, 1))

    async def export_now() -> WeightUpdate:
        return weight_update(next(versions), {"w": weight})

    generator = FakeGenerator()
    sync = MemoryWeightSync(export_now, [generator])

    async def main() -> None:
        await published(sync, 0)
        weight.add_(1)
        assert generator.held["w"].sum() == 0
        await published(sync, 1)

    asyncio.run(main())
    assert generator.held["w"].sum() == 3
    assert generator.versions == [0, 1]


class Masters:
    """A learner's weights, which it exports copied or as they are."""

    def __init__(self, *, room: MemoryRoom | None) -> None:
        self.tensors = {"w": torch.arange(4096.0).view(64, 64), "bias": torch.ones(3)}
        self._room, self._version = room, 0

    async def export(self) -> WeightUpdate:
        self._version += 1
        if self._room is None:
            return weight_update(self._version, self.tensors)
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        targets = self._room.take(shapes, torch.bfloat16)
        return copied_update(self._version, self.tensors, targets)

    def step(self) -> None:
        for tensor in self.tensors.values():
            tensor.mul_(2)


async def publish_beside_a_step(masters: Masters) -> FakeGenerator:
    gate = asyncio.Event()
    generator = FakeGenerator(gate=gate)
    sync = MemoryWeightSync(masters.export, [generator], is_copied=True)
    bringing = await sync.publish(1)
    masters.step()
    gate.set()
    await bringing
    return generator


def test_a_generator_loads_what_was_copied_while_the_learner_steps() -> None:
    masters = Masters(room=MemoryRoom(torch.device("cpu")))
    expected = masters.tensors["w"].to(torch.bfloat16)

    generator = asyncio.run(publish_beside_a_step(masters))

    assert torch.equal(generator.held["w"], expected)
    assert generator.held["w"].dtype == torch.bfloat16


def test_masters_that_change_while_a_generator_reads_them_are_noticed() -> None:
    with pytest.raises(WeightSyncError):
        asyncio.run(publish_beside_a_step(Masters(room=None)))


def test_without_copies_a_generator_has_the_weights_before_the_learner_may_step() -> None:
    masters, generator = Masters(room=None), FakeGenerator()
    expected = masters.tensors["w"].clone()

    async def main() -> None:
        bringing = await MemoryWeightSync(masters.export, [generator]).publish(1)
        masters.step()
        await bringing

    asyncio.run(main())
    assert torch.equal(generator.held["w"], expected)


def test_a_room_is_used_again_and_made_anew_where_other_weights_are_to_lie_in_it() -> None:
    room = MemoryRoom(torch.device("cpu"))
    first = room.take({"w": (2, 3)}, torch.float32)
    again = room.take({"w": (2, 3)}, torch.float32)
    other = room.take({"w": (2, 3)}, torch.bfloat16)

    assert first["w"] is again["w"]
    assert other["w"].dtype == torch.bfloat16


def test_weights_of_another_version_are_not_published_under_this_one() -> None:
    with pytest.raises(AssertionError, match="another version"):
        asyncio.run(published(MemoryWeightSync(export, [FakeGenerator()]), 4))
