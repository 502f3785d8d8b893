from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.models.weights import checksum, weight_update
from headrace.types import GenerationRequest, RolloutGroup, WeightUpdate
from headrace.weight_sync import MemoryWeightSync


class FakeGenerator:
    """Keeps what it is sent, and refuses what does not have the published checksum."""

    def __init__(self, *, loses: str | None = None) -> None:
        self.held: dict[str, Tensor] = {}
        self.versions: list[int] = []
        self._loses = loses

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        assert not requests
        return
        yield

    async def update_weights(self, update: WeightUpdate) -> None:
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
    asyncio.run(MemoryWeightSync(export, generators).publish(3))
    for generator in generators:
        assert generator.versions == [3]
        assert all(torch.equal(generator.held[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_generator_that_lost_a_tensor_is_an_error_of_the_publisher() -> None:
    generators = [FakeGenerator(), FakeGenerator(loses="b")]
    with pytest.raises(WeightSyncError, match="lost a tensor"):
        asyncio.run(MemoryWeightSync(export, generators).publish(3))


def test_each_publication_exports_anew() -> None:
    weight = torch.zeros(3)
    versions = iter((0, 1))

    async def export_now() -> WeightUpdate:
        return weight_update(next(versions), {"w": weight})

    generator = FakeGenerator()
    sync = MemoryWeightSync(export_now, [generator])

    async def main() -> None:
        await sync.publish(0)
        weight.add_(1)
        assert generator.held["w"].sum() == 0
        await sync.publish(1)

    asyncio.run(main())
    assert generator.held["w"].sum() == 3
    assert generator.versions == [0, 1]


def test_weights_of_another_version_are_not_published_under_this_one() -> None:
    with pytest.raises(AssertionError, match="another version"):
        asyncio.run(MemoryWeightSync(export, [FakeGenerator()]).publish(4))
