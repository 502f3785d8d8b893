"""Members in the test's own event loop, which die, hang and lie when they are told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from pool_lab import FakeGenerator, FakeReader, FakeStore

from headrace.generators.pool.host import GeneratorHost
from headrace.generators.pool.pool import GeneratorPool
from headrace.generators.pool.proxy import (
    Deliveries,
    Delivery,
    Hosted,
    HostedGenerator,
    MemberLostError,
    Question,
)
from headrace.generators.pool.roster import PoolSettings
from headrace.types import GenerationRequest, RolloutGroup, WeightNotice

PATIENCE_SECONDS = 240.0


class FakeProxy:
    """One incarnation."""

    def __init__(self, lab: PoolLab, member: int, incarnation: int) -> None:
        self.lab, self.member, self.incarnation = lab, member, incarnation
        self.generator: Any = lab.make()
        self.host = GeneratorHost(
            Hosted(generator=self.generator, weights=FakeReader()), incarnation=incarnation
        )
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.was_killed = False
        self.asked: list[GenerationRequest] = []
        self.questions: list[str] = []

    def die(self, why: str = "died") -> None:
        if not self.end.done():
            self.end.set_result(why)

    async def generate(self, requests: Sequence[GenerationRequest]) -> Deliveries:
        self.asked += requests
        self.lab.sent += [(self.member, request) for request in requests]
        async with aclosing(self.host.generate(requests)) as deliveries:
            while True:
                self.lab.before_group(self)
                try:
                    yield self.lab.lie(self, await self._alive(anext(deliveries)))
                except StopAsyncIteration:
                    return

    async def ask(self, question: Question, *arguments: object) -> Any:  # noqa: ANN401 - by question
        self.questions.append(question)
        if question == "update_weights":
            _, told = arguments
            assert isinstance(told, WeightNotice)
            self.lab.told.append((told.policy_version, told.num_readers))
        self.lab.before_question(self, question)
        return await self._alive(self.host.answer(question, *arguments))

    async def _alive(self, work: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever comes
        """Do it unless this dies first; a zombie does it all the same."""
        task = asyncio.ensure_future(self._maybe(work))
        ends = set() if self.lab.are_zombies else {self.end}
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
        raise MemberLostError(self.end.result())

    async def _maybe(self, work: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever comes
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            if isinstance(work, Coroutine):
                work.close()
            raise
        return await work

    async def lost(self) -> str:
        return await asyncio.shield(self.end)

    async def kill(self) -> None:
        self.was_killed = True
        self.die("was killed")


@dataclass
class PoolLab:
    """Makes them, and remembers all of them."""

    are_zombies: bool = False
    """Whether the dead go on answering."""
    refusals: int = 0
    """Starts that fail before one goes well."""
    before_group: Callable[[FakeProxy], None] = lambda _: None
    before_question: Callable[[FakeProxy, str], None] = lambda *_: None
    lie: Callable[[FakeProxy, Delivery], Delivery] = lambda _, delivery: delivery
    proxies: list[FakeProxy] = field(default_factory=list)
    sent: list[tuple[int, GenerationRequest]] = field(default_factory=list)
    """Member and request, in the order in which they were sent."""
    told: list[tuple[int, int]] = field(default_factory=list)
    """Version of each notice, and how many were told of it at the same time."""
    store: FakeStore = field(default_factory=FakeStore)
    make: Callable[[], HostedGenerator] = FakeGenerator
    """What members hold."""

    async def __call__(self, *, member: int, incarnation: int) -> FakeProxy:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            msg = "did not start"
            raise MemberLostError(msg)
        proxy = FakeProxy(self, member, incarnation)
        self.proxies.append(proxy)
        return proxy

    def of(self, member: int) -> FakeProxy:
        """The last incarnation of ``member``."""
        return next(proxy for proxy in reversed(self.proxies) if proxy.member == member)

    def run(self, work: Callable[[GeneratorPool], Awaitable[None]], **settings: Any) -> None:  # noqa: ANN401 - those of a pool
        """Do ``work`` with a pool, and see that it ends and leaves no member alive."""

        async def main() -> None:
            chosen = PoolSettings(**(STANDARD | settings))
            pool = GeneratorPool(self, chosen, self.store)
            try:
                await asyncio.wait_for(work(pool), PATIENCE_SECONDS)
            finally:
                await pool.close()
            assert all(proxy.was_killed for proxy in self.proxies)
            for _ in range(20):
                await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"still at work: {left}"

        asyncio.run(main())


STANDARD: dict[str, Any] = {
    "num_members": 3,
    "max_rollouts": 8,
    "heartbeat_seconds": 0.001,
    "hang_seconds": PATIENCE_SECONDS,
    "backoff_seconds": 0.0,
}


async def collect(
    pool: GeneratorPool, requests: Sequence[GenerationRequest]
) -> dict[str, RolloutGroup]:
    """All groups of a call, each of which must come once."""
    found: dict[str, RolloutGroup] = {}
    async with aclosing(pool.generate(requests)) as groups:
        async for group in groups:
            assert group.group_id not in found
            found[group.group_id] = group
    return found


def kill_at_random(seed: int, *, chance: float, most: int) -> Callable[[FakeProxy], None]:
    """Before any group, and at most so often, its member dies."""
    dice, left = random.Random(seed), [most]  # noqa: S311 - no secret

    def maybe(proxy: FakeProxy) -> None:
        if left[0] and dice.random() < chance:
            left[0] -= 1
            proxy.die(f"fell at {seed}")

    return maybe


async def until(holds: Callable[[], object]) -> None:
    """Wait; the test's own deadline ends it."""
    while not holds():  # noqa: ASYNC110 - what tests look at has no events
        await asyncio.sleep(0)


def of_incarnation(delivery: Delivery, incarnation: int) -> Delivery:
    return replace(delivery, incarnation=incarnation)
