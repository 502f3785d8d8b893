"""The program inside a member's process: a `GeneratorHost` behind two pipes.

Started by `child_proxy` as ``python -m headrace.generators.pool.hosted``. Owns: nothing printed
here gets into the channel, and the process ends with its parent. Questions begin in the order in
which they come, and one that takes long holds up no other.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any, BinaryIO

import torch

from headrace.child import die_with_parent, take_channel
from headrace.child.channel import READY, Answer, Request, encode, read_request
from headrace.errors import HeadraceError
from headrace.generators.pool.host import GeneratorHost
from headrace.generators.pool.proxy import MemberLostError
from headrace.types import GenerationRequest


class Service:
    """Hands requests to a host and answers to the pool."""

    def __init__(self, host: GeneratorHost, replies: BinaryIO) -> None:
        self._host = host
        self._replies = replies
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, asyncio.Task[None]] = {}
        """By the first number of their groups."""
        self._over = asyncio.Event()

    async def serve(self, requests: BinaryIO) -> None:
        """Waits for requests; unblocked by the pool, whose closing of the pipe ends it."""
        loop = asyncio.get_running_loop()
        # A thread, since a pipe that a process was given may be a file or terminal in a test.
        reader = threading.Thread(target=self._read, args=(requests, loop), daemon=True)
        reader.start()
        self.answer(Answer(number=READY))
        await self._over.wait()

    def _read(self, requests: BinaryIO, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while (request := read_request(requests)) is not None:
                loop.call_soon_threadsafe(self._begin, request)
        finally:
            loop.call_soon_threadsafe(self._over.set)

    def _begin(self, request: Request) -> None:
        match request.method:
            case "generate":
                task = self._start(self._generate(*request.arguments))
                self._calls[request.number] = task
                task.add_done_callback(lambda _: self._calls.pop(request.number, None))
            case "abandon":
                if call := self._calls.get(request.number):
                    call.cancel()
            case _:
                self._start(self._do(request))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _generate(
        self, numbers: Sequence[int], requests: Sequence[GenerationRequest]
    ) -> None:
        """Answer by group: ``numbers`` are those of the answers to ``requests``."""
        left = {request.group_id: n for n, request in zip(numbers, requests, strict=True)}
        try:
            async with aclosing(self._host.generate(requests)) as deliveries:
                async for delivery in deliveries:
                    self.answer(Answer(number=left.pop(delivery.group.group_id), value=delivery))
        except Exception as error:  # noqa: BLE001 - told to the pool, which judges it
            for number in left.values():
                self.answer(Answer(number=number, error=_told(error)))

    async def _do(self, request: Request) -> None:
        question: Any = request.method
        try:
            answer = Answer(
                number=request.number,
                value=await self._host.answer(question, *request.arguments),
            )
        except Exception as error:  # noqa: BLE001 - as in `_generate`
            answer = Answer(number=request.number, error=_told(error))
        self.answer(answer)

    def answer(self, answer: Answer) -> None:
        """Send it. Only from the event loop."""
        self._replies.write(encode(answer))
        self._replies.flush()


def _told(error: Exception) -> Exception:
    """Return ``error`` as another process can read it."""
    if isinstance(error, HeadraceError | MemberLostError):
        return type(error)(*error.args)
    traceback.print_exception(error)
    return MemberLostError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Build the generator, answer requests, and end when the pool closes the pipe."""
    requests, replies = take_channel()
    die_with_parent(requests)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    first = read_request(requests)
    if first is None:
        return
    spec, incarnation = first.arguments
    torch.set_num_threads(1)  # the compute thread has the cores
    try:
        hosted = spec.build()
    except Exception as error:  # noqa: BLE001 - told to the pool
        replies.write(encode(Answer(number=READY, error=_told(error))))
        replies.flush()
        os._exit(1)

    async def serve() -> None:
        host = GeneratorHost(hosted, incarnation=incarnation)
        await Service(host, replies).serve(requests)

    asyncio.run(serve())
    # Not torn down: threads that compute would hold its end, and the kernel takes all back.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
