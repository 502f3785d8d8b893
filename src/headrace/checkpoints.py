"""The checkpoint that is being written while training goes on.

Owns: one at a time, since each holds a copy of all that is trained; and one that fails is an error
at the next step, or at the end. What is settled after it began is no part of it: whoever resumes
from it goes back to its step. Knows no files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

Write: TypeAlias = Callable[[Path], Awaitable[Awaitable[None] | None]]
"""`Learner.save`."""


class Checkpoints(Protocol):
    """Where checkpoints go."""

    async def begin(self, step: int, policy_version: int, write: Write) -> asyncio.Task[Any]:
        """Let ``write`` copy or write what is to be kept; return what makes it a checkpoint.

        Both raise CheckpointError.
        """
        ...


class CheckpointWriting:
    """What the controller asks of `Checkpoints`, and what it has not heard of yet."""

    def __init__(
        self, checkpoints: Checkpoints, write: Write, *, step: int, tell: Callable[[int], None]
    ) -> None:
        """``step``: of the last checkpoint there is; ``tell`` gets the step of every new one."""
        self._checkpoints = checkpoints
        self._write = write
        self._tell = tell
        self._last = step
        self._under_way: tuple[int, asyncio.Task[Any]] | None = None

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of ``step``, or one under way."""
        return step in {self._last, self._under_way[0] if self._under_way else None}

    async def begin(self, step: int, policy_version: int) -> None:
        """Begin one, unless there is one of this step. Raises CheckpointError.

        Waits for the one under way, if any, which the learner's ranks and the disk unblock.
        """
        await self.finish()
        if not self.has(step):
            self._under_way = (
                step,
                await self._checkpoints.begin(step, policy_version, self._write),
            )

    async def finish(self) -> None:
        """Wait for the one under way, if any. Raises CheckpointError."""
        if self._under_way is None:
            return
        step, task = self._under_way
        try:
            # Cancelled, it stays under way: nobody else may write meanwhile.
            await asyncio.shield(task)
        finally:
            if task.done():
                self._under_way = None
        self._last = step
        self._tell(step)

    async def look(self) -> None:
        """Say so if the one that was under way is there. Raises CheckpointError if it failed."""
        if self._under_way is not None and self._under_way[1].done():
            await self.finish()
