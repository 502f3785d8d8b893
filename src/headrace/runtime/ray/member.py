"""A generator as a Ray actor on whichever machine has room, and how its pool reaches it.

Owns: requests begin in the order in which the pool made them, though Ray promises none; an actor's
death reaches whoever waits for it as `MemberLostError`; killing one leaves nothing of it behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from headrace.errors import HeadraceError
from headrace.generators.pool.host import GeneratorHost
from headrace.generators.pool.proxy import (
    Deliveries,
    Delivery,
    GeneratorSpec,
    MemberLostError,
    Question,
)
from headrace.runtime.ray.calls import answer_of, kill_actor, one_line, start_actor
from headrace.runtime.ray.object_store import ObjectStoreCarrier, ObjectStoreFetcher, Ref
from headrace.runtime.ray.room import Room
from headrace.types import GenerationRequest, WeightNotice


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """What an actor builds its generator from. One pickle: the spec's reader has this fetcher."""

    generator: GeneratorSpec
    fetcher: ObjectStoreFetcher


@ray.remote(max_restarts=0, max_task_retries=0)
class GeneratorActor:
    """Serves one generator. All calls run in its event loop."""

    def __init__(self) -> None:
        self._host: GeneratorHost | None = None
        self._fetcher: ObjectStoreFetcher | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._next = 0
        self._came = asyncio.Condition()

    async def start(self, spec: ActorSpec, incarnation: int) -> None:
        """Build the generator."""
        torch.set_num_threads(1)  # the compute thread has the cores
        self._host = GeneratorHost(spec.generator.build(), incarnation=incarnation)
        self._fetcher = spec.fetcher

    async def generate(
        self, number: int, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[Delivery]:
        """Yield groups as they become whole, until there are no more or `abandon` is asked."""
        host = await self._turn(number)
        queue: asyncio.Queue[Delivery | None] = asyncio.Queue()
        call = asyncio.create_task(_fill(queue, host, requests))
        self._calls[number] = call
        try:
            while (delivery := await queue.get()) is not None:
                yield delivery
            if not call.cancelled():
                await call
        finally:
            del self._calls[number]
            call.cancel()

    async def abandon(self, number: int, call: int) -> None:
        """Take back what the ``generate`` with the number ``call`` still samples."""
        await self._turn(number)
        if task := self._calls.get(call):
            task.cancel()

    async def answer(
        self, number: int, question: Question, arguments: Sequence[object], refs: Mapping[str, Ref]
    ) -> Any:  # noqa: ANN401 - by question
        """Do what is asked. ``refs``: of the weights that a notice among ``arguments`` names."""
        host = await self._turn(number)
        if refs:
            assert self._fetcher is not None
            self._fetcher.learn(refs)
        return await host.answer(question, *arguments)

    async def watch(self) -> None:
        """Never end: what ends is the wait for it, with the actor."""
        await asyncio.Event().wait()

    async def _turn(self, number: int) -> GeneratorHost:
        """Wait until every call with a lower number has begun; unblocked by their arrival."""
        async with self._came:
            await self._came.wait_for(lambda: self._next == number)
            self._next += 1
            self._came.notify_all()
        assert self._host is not None, "start comes first"
        return self._host


async def _fill(
    queue: asyncio.Queue[Delivery | None],
    host: GeneratorHost,
    requests: Sequence[GenerationRequest],
) -> None:
    """Put every group into ``queue``, and None behind the last, however it ends."""
    try:
        async with contextlib.aclosing(host.generate(requests)) as deliveries:
            async for delivery in deliveries:
                queue.put_nowait(delivery)
    finally:
        queue.put_nowait(None)


class ActorProxy:
    """One incarnation of a member. Used from one event loop."""

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 - Ray's
        carrier: ObjectStoreCarrier,
        give_back: Callable[[], None],
    ) -> None:
        """``give_back`` leaves the actor's place to another one."""
        self._actor = actor
        self._carrier = carrier
        self._give_back: Callable[[], None] | None = give_back
        self._numbers = itertools.count()
        self._watched: Any = actor.watch.remote()

    async def generate(self, requests: Sequence[GenerationRequest]) -> Deliveries:
        """See `GeneratorProxy`. Waits for groups; unblocked by them and by the actor's death."""
        number = next(self._numbers)
        options = self._actor.generate.options(num_returns="streaming")
        stream = options.remote(number, tuple(requests))
        is_over = False
        try:
            async for ref in stream:
                with _errors_unwrapped():
                    delivery = await ref
                yield delivery
            is_over = True
        except RayError as error:
            is_over = True
            raise _unwrapped(error) from None
        finally:
            if not is_over:
                self._actor.abandon.remote(next(self._numbers), number)

    async def ask(self, question: Question, *arguments: object) -> Any:  # noqa: ANN401 - by question
        """See `GeneratorProxy`. Waits for the answer; unblocked by it and by the actor's death."""
        refs = self._refs(arguments)
        answer = self._actor.answer.remote(next(self._numbers), question, arguments, refs)
        with _errors_unwrapped():
            return await answer

    def _refs(self, arguments: Sequence[object]) -> Mapping[str, Ref]:
        """Return what travels with notices among ``arguments``."""
        notices = [argument for argument in arguments if isinstance(argument, WeightNotice)]
        return dict(item for notice in notices for item in self._carrier.refs(notice).items())

    async def lost(self) -> str:
        """See `GeneratorProxy`."""
        try:
            await self._watched
        except RayError as error:
            return one_line(error)
        return "its actor ended"

    async def kill(self) -> None:
        """See `GeneratorProxy`."""
        await kill_actor(self._actor)
        if self._give_back is not None:
            self._give_back()
            self._give_back = None


@contextlib.contextmanager
def _errors_unwrapped() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        raise _unwrapped(error) from None


def _unwrapped(error: RayError) -> Exception:
    """Return what an actor raised; where Ray speaks for itself the member is lost."""
    said = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(said, HeadraceError | MemberLostError):
        return said
    return MemberLostError(one_line(error))


class ActorLauncher:
    """Starts members where the cluster has room for them."""

    def __init__(
        self,
        spec: ActorSpec,
        room: Room,
        carrier: ObjectStoreCarrier,
        *,
        deadline_seconds: float,
    ) -> None:
        """``carrier``: what puts weights into Ray's store.

        ``deadline_seconds``: longest start of an actor, the wait for its room included.
        """
        self._spec, self._room, self._carrier = spec, room, carrier
        self._deadline = deadline_seconds

    async def __call__(self, *, member: int, incarnation: int) -> ActorProxy:
        """See `Launch`. Waits for the actor; unblocked by its first answer or the deadline."""
        place = self._room.take()
        actor = start_actor(GeneratorActor, **self._room.options(place))
        try:
            started = actor.start.remote(self._spec, incarnation)
            with _errors_unwrapped():
                await asyncio.wait_for(answer_of(started), self._deadline)
        except BaseException as error:
            await kill_actor(actor)
            self._room.give_back(place)
            why = _why_not_started(error, self._deadline)
            if why is None:
                raise
            msg = f"generator {member} did not start: {why}"
            raise MemberLostError(msg) from error
        return ActorProxy(actor, self._carrier, lambda: self._room.give_back(place))


def _why_not_started(error: BaseException, deadline: float) -> str | None:
    """Say what was wrong with the start; None where that was not it."""
    match error:
        case TimeoutError():
            return (
                f"its actor was not ready within {deadline:g} s; the cluster had no room for it, "
                "or its machine is slow"
            )
        case MemberLostError() | HeadraceError():
            return str(error)
        case _:
            return None
