"""Waits for what may hang, in which time does not run while this process itself stands still.

A run is suspended by a batch system, by `docker pause` or with a laptop, and goes on after hours.
What it waited for stood still too, or answered meanwhile unheard. Owns: of such a time one tenth of
the deadline counts at most, and what was answered before is heard before anything counts as late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

LOOKS = 10
"""Times that the clock is looked at within one deadline."""


async def wait_patiently(
    expected: Collection[asyncio.Future[Any]], seconds: float, *, stops_at_failure: bool = False
) -> set[asyncio.Future[Any]]:
    """Wait for ``expected``; unblocked by them, or by the deadline. Return those that are not done.

    ``stops_at_failure``: the first one that fails ends the wait too. Sets no result and cancels
    nothing.
    """
    when = asyncio.FIRST_EXCEPTION if stops_at_failure else asyncio.ALL_COMPLETED
    waiting = set(expected)
    for _ in range(LOOKS):
        if not waiting:
            break
        done, waiting = await asyncio.wait(waiting, timeout=seconds / LOOKS, return_when=when)
        if stops_at_failure and any(future.exception() for future in done):
            break
    return waiting
