"""Weights handed over within one process.

Generators copy them into their own, so a generator's weights never change under it. What they copy
from are the learner's own tensors, or copies in a `MemoryRoom`, beside which it may step. Owns
nothing of invariant 3: the learner counts the checksum of what it publishes, and every generator
that of what it holds, before it samples from it. How that is read back is the generator's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch
from torch import Tensor

from headrace.models.weight_layout import WeightLayout
from headrace.roles import Generator
from headrace.types import WeightUpdate

Export = Callable[[], Awaitable[WeightUpdate]]
"""Returns the weights in the generators' dtype; valid until the learner's next step."""


class MemoryWeightSync:
    """Publishes to generators that live in this process."""

    def __init__(
        self, export: Export, generators: Sequence[Generator], *, is_copied: bool = False
    ) -> None:
        """``is_copied``: what ``export`` returns stays as it is until the next export."""
        self._export = export
        self._generators = generators
        self._is_copied = is_copied

    async def publish(self, policy_version: int) -> Awaitable[None]:
        """See `WeightSync`. Without copies all of it is done at once."""
        update = await self._export()
        assert update.policy_version == policy_version, "the learner is at another version"
        if self._is_copied:
            return self._bring(update)
        await self._bring(update)
        return asyncio.sleep(0)

    async def _bring(self, update: WeightUpdate) -> None:
        for generator in self._generators:
            await generator.update_weights(update)


class MemoryRoom:
    """A `WeightRoom` of this process: a second copy of the weights, in the generators' dtype.

    For one publication at a time: what is taken lies where the one before lay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: Mapping[str, Tensor] = {}

    def take(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """See `WeightRoom`."""
        wanted = WeightLayout.of(shapes, dict.fromkeys(shapes, dtype))
        if WeightLayout.of_tensors(self._tensors) != wanted:
            self._tensors = {
                name: torch.empty(tuple(shape), dtype=dtype, device=self._device)
                for name, shape in shapes.items()
            }
        return self._tensors
