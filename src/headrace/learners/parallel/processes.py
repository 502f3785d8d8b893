"""The processes of a learner's ranks: started, asked, watched and ended together.

Owns: a rank that dies, fails or hangs ends all of them within a deadline, and the error names it,
how it ended and its last words, never one of the ranks that merely waited for it. Nothing outlives
`close`. Has a thread with an event loop of its own, so that ranks may be asked from any loop or
thread, and no caller's loop ever waits for a pipe. Does not know what they compute, nor on which
machines (`hosts`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.child.channel import READY, Request, encode
from headrace.child.process import ChildEndedError, ChildProcess
from headrace.errors import LearnerFailure, RunError
from headrace.learners.parallel.hosts import RankHosts, RankLine
from headrace.patience import wait_patiently

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""What the other ranks have to answer, fail or die too, once one of them has."""
_STACK_SECONDS = 1.0
"""For a rank to say where it is."""
_CLOSE_SECONDS = 5.0
"""For a rank to end by itself."""
_DOING = {
    "start": "the start",
    "rehearse": "the rehearsal",
    "step": "a step",
    "fill": "the publication of weights",
    "bring": "the publication of weights",
    "save": "a checkpoint",
    "load": "the resumption",
}
"""What a request is called in an error."""
_WAITING = ("torch/distributed/", "torch/autograd/")
"""Where the innermost frame of a rank lies that waits for others."""


class _RankProcess(ChildProcess):
    """One rank's process."""

    def __init__(self, rank: int, line: RankLine) -> None:
        super().__init__(line)
        self.rank = rank
        self.line = line


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that ranks answer twice: at once, and when what they began is done."""

    answers: list[Any]
    later: concurrent.futures.Future[list[Any]]


class RankProcesses:
    """N processes that are asked together; started with the first call of `start`."""

    def __init__(
        self, settings: Sequence[Any], hosts: RankHosts, *, timeout_seconds: float
    ) -> None:
        """``settings``: what each rank is told first. ``hosts`` are closed with the ranks."""
        self._settings = settings
        self._hosts = hosts
        self._timeout = timeout_seconds
        self._numbers = itertools.count(2, 2)
        self._gate = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # What is below belongs to the loop of its own.
        self._processes: list[_RankProcess] = []
        self._failure: RunError | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank; none before `start` and after `close`."""
        return tuple(process.pid for process in self._processes)

    async def start(self) -> None:
        """Start the ranks and return once all of them can be asked. Raises RunError."""
        await asyncio.wrap_future(self._submit(self._start()))

    async def ask(self, method: str, *arguments: object) -> list[Any]:
        """Have every rank do something; return their answers by rank.

        Raises what they raised, where all of them did, and RunError otherwise.
        """
        return await asyncio.wrap_future(self._submit(self._ask(method, arguments)))

    def ask_blocking(self, method: str, *arguments: object) -> list[Any]:
        """Do the same from a thread that has no event loop, or may block it."""
        return self._submit(self._ask(method, arguments)).result()

    async def ask_twice(self, method: str, *arguments: object) -> Asked:
        """Do the same for something that goes on after the first answer."""
        return await asyncio.wrap_future(self._submit(self._ask_twice(method, arguments)))

    async def close(self) -> None:
        """End every process, and the thread. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._gate:
            self._is_closed = True
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._end_all(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        self._hosts.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._gate:
            if self._is_closed:
                work.close()
                msg = "the learner was closed"
                raise RunError(msg)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="learner-ranks", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self) -> None:
        """Waits for all to be launched; unblocked by that, or by what `RankHosts.launch` raises."""
        launched = await asyncio.gather(
            *(self._hosts.launch(rank) for rank in range(len(self._settings))),
            return_exceptions=True,
        )
        for rank, line in enumerate(launched):
            if not isinstance(line, BaseException):
                self._processes.append(_RankProcess(rank, line))
        for line in launched:
            if isinstance(line, BaseException):
                raise line
        expected = []
        for process, setting in zip(self._processes, self._settings, strict=True):
            expected.append(process.expect(READY))
            process.send(encode(Request(number=READY, method="begin", arguments=(setting,))))
        await self._answers(expected, "start")

    async def _ask(self, method: str, arguments: tuple[object, ...]) -> list[Any]:
        expected, _ = self._send(method, arguments)
        return await self._answers(expected, method)

    async def _ask_twice(self, method: str, arguments: tuple[object, ...]) -> Asked:
        expected, number = self._send(method, arguments)
        later = [process.expect(number + 1) for process in self._processes]
        answers = await self._answers(expected, method)
        return Asked(answers, self._submit(self._answers(later, method)))

    def _send(
        self, method: str, arguments: tuple[object, ...]
    ) -> tuple[list[asyncio.Future[Any]], int]:
        if self._failure is not None:
            raise self._failure
        number = next(self._numbers)
        frame = encode(Request(number=number, method=method, arguments=arguments))
        expected = [process.expect(number) for process in self._processes]
        for process in self._processes:
            process.send(frame)
        return expected, number

    async def _answers(self, expected: Sequence[asyncio.Future[Any]], what: str) -> list[Any]:
        """Wait for the ranks; unblocked by their answers, by a failure, or by the deadline."""
        waiting = await wait_patiently(expected, self._timeout, stops_at_failure=True)
        failed = any(future.exception() for future in expected if future not in waiting)
        is_late = bool(waiting) and not failed
        if waiting and not is_late:
            _, waiting = await asyncio.wait(waiting, timeout=GRACE_SECONDS)
        errors = [future.exception() if future.done() else None for future in expected]
        if not any(errors) and not waiting:
            return [future.result() for future in expected]
        if all(isinstance(e, RunError) and type(e) is type(errors[0]) for e in errors):
            # All say the same, so they stand where they stood before, and go on.
            assert errors[0] is not None
            raise errors[0]
        raise await self._fail(what, expected, errors, is_late=is_late)

    async def _fail(
        self,
        what: str,
        expected: Sequence[asyncio.Future[Any]],
        errors: Sequence[BaseException | None],
        *,
        is_late: bool,
    ) -> RunError:
        """End all ranks, and return the error that every later request raises too."""
        late = [p for p, future in zip(self._processes, expected, strict=True) if not future.done()]
        where = await self._asked_where(late) if is_late else {}
        dead = [
            p
            for p, e in zip(self._processes, errors, strict=True)
            if isinstance(e, ChildEndedError)
        ]
        await asyncio.gather(*(process.reaped(GRACE_SECONDS) for process in dead))
        if self._failure is None:
            self._failure = self._cause(what, dead, errors, where)
        await asyncio.gather(*(process.end() for process in self._processes))
        return self._failure

    def _cause(
        self,
        what: str,
        dead: Sequence[_RankProcess],
        errors: Sequence[BaseException | None],
        where: Mapping[int, str],
    ) -> RunError:
        """Say which rank was the first cause: what died, else what hangs, else what failed."""
        when = f"during {_DOING[what]}"
        if dead:
            # Who was killed comes before whom that may have ended.
            first, *rest = sorted(dead, key=lambda process: not process.was_killed)
            others = ", ".join(str(process.rank) for process in rest)
            more = f" (and rank {others})" if others else ""
            msg = (
                f"rank {first.rank} of the learner ({first.process.title}){more} {first.ending()} "
                f"{when}; all ranks were stopped. Its last words: {first.last_words}"
            )
            return LearnerFailure(msg) if first.was_killed else RunError(msg)
        if where:
            listed = "; ".join(f"rank {rank} {place}" for rank, place in where.items())
            return LearnerFailure(
                f"{listed}: no answer {when} within learner.parallel.timeout_seconds = "
                f"{self._timeout:g}; all ranks were stopped"
            )
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        rank = min(failed, key=lambda rank: (_is_echo(failed[rank]), rank))
        cause = failed[rank]
        kind = type(cause) if isinstance(cause, RunError) else RunError
        return kind(f"rank {rank} of the learner failed {when}: {cause}; all were stopped")

    async def _asked_where(self, late: Sequence[_RankProcess]) -> dict[int, str]:
        """Return where each late rank is, those alone that do not wait for others if there are."""
        for process in late:
            process.forget_words()
        states = await asyncio.gather(*(process.line.asked_where() for process in late))
        await asyncio.sleep(_STACK_SECONDS)
        found = {
            process.rank: _whereabouts(process, state)
            for process, state in zip(late, states, strict=True)
        }
        hung = {
            rank: place
            for rank, place in found.items()
            if not any(part in place for part in _WAITING)
        }
        return hung or found

    async def _end_all(self) -> None:
        for process in self._processes:
            process.hang_up()
        await asyncio.gather(*(process.reaped(_CLOSE_SECONDS) for process in self._processes))
        await asyncio.gather(*(process.end() for process in self._processes))
        self._processes.clear()
        current = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not current]
        if left:
            await asyncio.wait(left, timeout=_CLOSE_SECONDS)


def _is_echo(error: BaseException) -> bool:
    """Whether a rank failed because another one was gone."""
    return "onnection closed by peer" in str(error) or "gloo" in str(error)


def _whereabouts(process: _RankProcess, state: str) -> str:
    """Say where a late rank is, from the stack that it printed or else the kernel's word."""
    title = process.process.title
    if state in {"T", "t"}:
        return f"({title}) is stopped, as by SIGSTOP"
    frames = [line for line in process.words if line.startswith("File ")]
    if not frames:
        return f"({title}, state {state}) does not say where it is"
    return f"({title}) is at {frames[0].removeprefix('File ')}"
