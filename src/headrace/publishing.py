"""The weights that are on their way to the generators, beside the learner's next step.

    begin     waits for the publication before and for the learner's weights to be copied
    finish    waits for the generators, whose own deadlines end the wait

Owns: one publication at a time, so that none overtakes another; and one that fails is an error for
whoever waits for it. Where ``is_beside`` is false nothing overlaps: `begin` returns once every
generator has the weights. Knows neither tensors nor slots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from headrace.roles import WeightSync


class Publishing:
    """At most one publication is under way. Used from one event loop."""

    def __init__(self, weight_sync: WeightSync, *, is_beside: bool) -> None:
        """``is_beside``: whether the learner goes on while generators load."""
        self._weight_sync = weight_sync
        self._is_beside = is_beside
        self._last: Publication | None = None
        self._seconds = 0.0
        """Of those that ended since somebody took them."""

    @property
    def last(self) -> Publication | None:
        """The newest one, over or not; None before the first."""
        return self._last

    async def begin(self, policy_version: int) -> None:
        """Return once the learner may step again. Raises WeightSyncError, also of the one before.

        Waits for that to be over, then for a copy of the weights, which the learner makes.
        """
        await self.finish()
        began = time.monotonic()
        bringing = await self._weight_sync.publish(policy_version)
        task = asyncio.create_task(self._bring(bringing, began), name=f"publish {policy_version}")
        self._last = Publication(policy_version, began, task)
        if not self._is_beside:
            await self.finish()

    async def finish(self) -> None:
        """Return once every generator has the newest weights. Raises WeightSyncError if not."""
        if self._last is not None:
            await self._last.over()

    async def settle(self, at_most: float | None = None) -> None:
        """Return once nothing is under way, whatever comes of it: there is an error already.

        After ``at_most`` seconds, if they are given, what is under way is given up.
        """
        if self._last is not None:
            await self._last.ended(at_most)

    def delay(self, seconds: float) -> str | None:
        """Say so if generators have not had the weights for so long; None where they have."""
        last = self._last
        if last is None or last.is_over or (waited := time.monotonic() - last.began) < seconds:
            return None
        return f"weights of version {last.policy_version} have been on their way for {waited:.0f} s"

    def take_seconds(self) -> float:
        """Return what the publications took that ended since the last call, from their begin."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def _bring(self, bringing: Awaitable[None], began: float) -> None:
        await bringing
        self._seconds += time.monotonic() - began


class Publication:
    """One version on its way."""

    def __init__(self, policy_version: int, began: float, task: asyncio.Task[None]) -> None:
        self.policy_version = policy_version
        self.began = began
        """By the monotonic clock."""
        self._task = task

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task.done()

    async def over(self) -> None:
        """Return once every generator has it. Raises WeightSyncError, and what they raise."""
        # Whoever stops waiting leaves it under way: what is half told must come to its end.
        await asyncio.shield(self._task)

    async def ended(self, at_most: float | None) -> None:
        """Return once it has ended, well or not; after ``at_most`` seconds it is cancelled."""
        await asyncio.wait({self._task}, timeout=at_most)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # somebody has heard of it, or of what came before it
