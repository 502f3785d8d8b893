"""Weights handed over within one process.

The learner's own tensors are passed by reference and every generator copies them into its own, so
a generator's weights never change under it. Owns nothing of invariant 3: the learner counts the
checksum of what it publishes, and every generator that of what arrived, before it replaces
anything. How much of what it then holds is read back is the generator's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from headrace.roles import Generator
from headrace.types import WeightUpdate

Export = Callable[[], Awaitable[WeightUpdate]]
"""Returns the weights in the generators' dtype; valid until the learner's next step."""


class MemoryWeightSync:
    """Publishes to generators that live in this process."""

    def __init__(self, export: Export, generators: Sequence[Generator]) -> None:
        self._export = export
        self._generators = generators

    async def publish(self, policy_version: int) -> None:
        """See `WeightSync`."""
        update = await self._export()
        assert update.policy_version == policy_version, "the learner is at another version"
        for generator in self._generators:
            await generator.update_weights(update)
