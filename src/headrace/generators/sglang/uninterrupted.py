"""Work that is waited for to its end, also by a task that is cancelled: nothing is left halfway."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for the end of ``work``, which has deadlines of its own; then be cancelled, if so."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # seen: being cancelled comes first
        raise cancelled
    return running.result()


async def in_thread(work: Callable[[], T], seconds: float) -> T:
    """Run ``work`` in a thread of its own and wait for its end, at most ``seconds``.

    Raises TimeoutError after them. The thread, which nothing can end, is then left; it holds up no
    exit of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], outcome: object) -> None:
        if not done.done():
            settle(outcome)

    def run() -> None:
        settle: Callable[[Any], None] = done.set_result
        outcome: object
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            settle, outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(tell, settle, outcome)

    async def within() -> T:
        async with asyncio.timeout(seconds):
            return await done

    threading.Thread(target=run, name="published weights", daemon=True).start()
    return await to_the_end(within())
