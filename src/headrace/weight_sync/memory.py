"""Weights handed over within one process.

The learner's own tensors are passed by reference and every generator copies them into its own, so
a generator's weights never change under it. Owns the checksum half of invariant 3: what is
published is counted here, what is loaded is counted by the receiver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from torch import Tensor

from headrace.models.weights import checksum
from headrace.roles import Generator
from headrace.types import WeightUpdate

Export = Callable[[], Awaitable[Mapping[str, Tensor]]]
"""Returns name -> weight in the generators' dtype; valid until the learner's next step."""


class MemoryWeightSync:
    """Publishes to generators that live in this process."""

    def __init__(self, export: Export, generators: Sequence[Generator]) -> None:
        self._export = export
        self._generators = generators

    async def publish(self, policy_version: int) -> None:
        """See `WeightSync`."""
        tensors = await self._export()
        update = WeightUpdate(
            policy_version=policy_version, tensors=tensors, checksum=checksum(tensors)
        )
        for generator in self._generators:
            await generator.update_weights(update)
