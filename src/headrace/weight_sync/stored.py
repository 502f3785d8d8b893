"""Weights handed to generators in other processes: written once, told of, and let go.

Owns: a publication that some generator could not read because it lost what the notice rests on is
made once more, whole, before it counts as failed; and what was published before is released only
once every generator samples from what came after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace.errors import WeightSyncError
from headrace.roles import NoticeReceiver, WeightStore
from headrace.types import WeightNotice, WeightUpdate


class StoredWeightSync:
    """A `WeightSync` through a `WeightStore`."""

    def __init__(
        self,
        export: Callable[[], Awaitable[WeightUpdate]],
        store: WeightStore,
        receivers: Sequence[NoticeReceiver],
    ) -> None:
        """``export`` returns the weights as they are now, valid until the learner's next step.

        Then they are written, so nothing of the learner is read afterwards.
        """
        self._export, self._store, self._receivers = export, store, receivers

    async def publish(self, policy_version: int) -> Awaitable[None]:
        """See `WeightSync`. What is left is to wait for every receiver, with its own deadline."""
        update = await self._export()
        assert update.policy_version == policy_version, "the learner is at another version"
        return self._bring(update, await self._store.write(update))

    async def _bring(self, update: WeightUpdate, notice: WeightNotice) -> None:
        try:
            await self._tell(notice)
        except WeightSyncError:
            if len(notice.parts) == 1:
                raise
            await self._tell(await self._store.write(update, is_whole=True))
        self._store.release(update.policy_version)

    async def _tell(self, notice: WeightNotice) -> None:
        """Return once all have it. Raises the first error of any, once none still reads."""
        asked = [receiver.update_from(notice) for receiver in self._receivers]
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
