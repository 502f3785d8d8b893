"""Members that are child processes of this one, reached over pipes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from headrace.child.channel import READY, Request, encode
from headrace.child.process import ChildEndedError, ChildProcess, launch
from headrace.errors import HeadraceError
from headrace.generators.pool.proxy import Deliveries, GeneratorSpec, MemberLostError, Question
from headrace.types import GenerationRequest

_MODULE = "headrace.generators.pool.hosted"
"""What a member's process runs."""


class ChildProxy:
    """One member's process. Used from one event loop."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._numbers = itertools.count(READY + 1)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    async def generate(self, requests: Sequence[GenerationRequest]) -> Deliveries:
        """See `GeneratorProxy`. Waits for groups; unblocked by them, and by the child's end."""
        numbers = [next(self._numbers) for _ in requests]
        waiting = {self._child.expect(number) for number in numbers}
        first, arguments = numbers[0], (tuple(numbers), tuple(requests))
        self._child.send(encode(Request(number=first, method="generate", arguments=arguments)))
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    yield await self._answer(future)
        finally:
            if waiting:
                for future in waiting:
                    future.cancel()
                self._child.send(encode(Request(number=first, method="abandon")))

    async def ask(self, question: Question, *arguments: object) -> Any:  # noqa: ANN401 - by question
        """See `GeneratorProxy`. Waits for the answer; unblocked by it and by the child's end."""
        number = next(self._numbers)
        future = self._child.expect(number)
        self._child.send(encode(Request(number=number, method=question, arguments=arguments)))
        return await self._answer(future)

    async def _answer(self, future: asyncio.Future[Any]) -> Any:  # noqa: ANN401 - whatever was asked
        try:
            return await future
        except ChildEndedError as error:
            raise MemberLostError(await self.lost()) from error

    async def lost(self) -> str:
        """See `GeneratorProxy`."""
        await self._child.over()
        await self._child.reaped()
        return (
            f"process {self._child.pid} {self._child.ending()}; its last words: "
            f"{self._child.last_words}"
        )

    async def kill(self) -> None:
        """See `GeneratorProxy`."""
        await self._child.end()


class ChildLauncher:
    """Starts members on this machine."""

    def __init__(self, spec: GeneratorSpec, *, deadline_seconds: float) -> None:
        """``deadline_seconds``: longest start of a process, imports and compiling included."""
        self._spec = spec
        self._deadline = deadline_seconds

    async def __call__(self, *, member: int, incarnation: int) -> ChildProxy:
        """See `Launch`. Waits for the process; unblocked by its first answer or the deadline."""
        child = ChildProcess(await launch(_MODULE))
        try:
            ready = child.expect(READY)
            arguments = (self._spec, incarnation)
            child.send(encode(Request(number=READY, method="begin", arguments=arguments)))
            await asyncio.wait_for(ready, self._deadline)
        except BaseException as error:
            await child.end()
            why = _why_not_started(error, child, self._deadline)
            if why is None:
                raise
            msg = f"generator {member} did not start: {why}"
            raise MemberLostError(msg) from error
        return ChildProxy(child)


def _why_not_started(error: BaseException, child: ChildProcess, deadline: float) -> str | None:
    """Say what was wrong with the start; None where that was not it."""
    match error:
        case ChildEndedError():
            return f"process {child.pid} {child.ending()}; its last words: {child.last_words}"
        case TimeoutError():
            allowed = f"{deadline:g} s (placement.start_deadline_seconds)"
            return f"process {child.pid} was not ready within {allowed}"
        case MemberLostError() | HeadraceError():
            return str(error)
        case _:
            return None
