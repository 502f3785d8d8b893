"""How a pool reaches one generator, wherever that lives, and what its process is made from.

Owns the word for the end of it: `MemberLostError` says that this incarnation is of no more use and
its rollouts are another one's to sample, where any other error of headrace's is the generator's own
and would be the same elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from headrace.generators.progress import Progress
from headrace.roles import Generator, Interruptible, WeightReader
from headrace.types import GenerationRequest, RolloutGroup

Question: TypeAlias = Literal["update_weights", "pause", "resume", "abort", "progress", "beat"]
"""What a member can be asked beside rollouts; `GeneratorHost.answer` says with which arguments."""


class MemberLostError(Exception):
    """One incarnation of a member is over: its process ended, hangs, broke or talks garbage."""


class HostedGenerator(Generator, Interruptible, Protocol):
    """What a member serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """What a process holds that is a member."""

    generator: HostedGenerator
    weights: WeightReader


class GeneratorSpec(Protocol):
    """What a generator is built from in its own process. Can be pickled."""

    def build(self) -> Hosted:
        """Return the generator, which holds no weights yet; blocks. Raises HeadraceError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A group on its way to the pool."""

    incarnation: int
    """Of the member that sampled it: nothing of one that is over may count."""
    group: RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life."""

    incarnation: int
    policy_version: int | None
    """Of the weights that it samples from; None before the first."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the generator, since the last beat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a member has sampled of the groups that it was asked about, and not delivered."""

    incarnation: int
    """As of a `Delivery`."""
    progress: Progress


Deliveries: TypeAlias = AsyncGenerator[Delivery, None]


class GeneratorProxy(Protocol):
    """One incarnation of a member. Once over it stays over: what follows it is another proxy."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Deliveries:
        """Yield each group as it arrives, as `Generator.generate` does there.

        What the caller does not wait for is taken back. Raises MemberLostError, and what the
        generator raises.
        """
        ...

    def ask(self, question: Question, *arguments: object) -> Awaitable[Any]:
        """Return the host's answer. Raises MemberLostError, and what the generator raises.

        A question arrives after every request and question before it.
        """
        ...

    async def lost(self) -> str:
        """Wait until no answer will come any more, and say how it ended. Unblocked by `kill`."""
        ...

    async def kill(self) -> None:
        """End it at once, whatever it does, and all it started. Idempotent; raises nothing."""
        ...


class Launch(Protocol):
    """How a member comes to be: as a child process, as an actor elsewhere."""

    async def __call__(self, *, member: int, incarnation: int) -> GeneratorProxy:
        """Return a proxy that can be asked. Raises MemberLostError, leaving nothing behind.

        ``member`` counts from 0; ``incarnation`` is larger than any before it in this run.
        """
        ...
