"""What an engine is told between two steps, and how each of it is answered.

Owns the promise that an answer is an exception of its own for each who raises it, and that nobody
is answered twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import GeneratorFailure, HeadraceError, WeightSyncError
from headrace.types import GenerationRequest, RolloutGroup, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

WITHDRAWN = "the update was withdrawn"


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """The requests of one call that leave something to be sampled, and where their groups go."""

    requests: Sequence[GenerationRequest]
    deliver: Callable[[RolloutGroup | GeneratorFailure], None]
    """Called on the compute thread for each group, or once with the failure that ends the call."""
    abandoned: bool = False
    """Set by the caller, from any thread: nobody waits for the rest."""


@dataclass(slots=True, kw_only=True, eq=False)
class Update:
    """Weights that were sent, and what became of them."""

    update: WeightUpdate
    done: Future[None] = field(default_factory=Future)
    staging: Future[float] | None = None
    """Their preparation beside the weights at work, once it has begun; the seconds it took."""
    is_withdrawn: bool = False
    """Set by the caller, from any thread: nobody wants them any more."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, until they are withdrawn: then whoever reads them ends by an exception."""
        return _UntilWithdrawn(self)


class _UntilWithdrawn(Mapping[str, "Tensor"]):
    def __init__(self, command: Update) -> None:
        self._command = command

    def __getitem__(self, name: str) -> Tensor:
        if self._command.is_withdrawn:
            raise WeightSyncError(WITHDRAWN)
        return self._command.update.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._command.update.tensors)

    def __len__(self) -> int:
        return len(self._command.update.tensors)


@dataclass(slots=True, kw_only=True)
class Control:
    """Obeyed as soon as it is read, whatever waits."""

    obey: Callable[[], Any]
    """What it returns is the answer."""
    done: Future[Any] = field(default_factory=Future)


def refuse(command: Submission | Update | Control, why: GeneratorFailure) -> None:
    """Answer ``command`` with ``why``, which is the end of everything."""
    match command:
        case Submission():
            command.deliver(copy_of(why))
        case Update():
            if command.staging is not None:
                command.is_withdrawn = True
                wait([command.staging])  # a matrix more at most; it needs nothing of this thread
            failure = WeightSyncError(f"version {command.update.policy_version}: {why}")
            failure.__cause__ = why.__cause__
            fail(command.done, failure)
        case Control():
            fail(command.done, copy_of(why))


def fail(done: Future[Any], failure: HeadraceError) -> None:
    """Answer with ``failure``, unless there is an answer or nobody waits for one."""
    if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
        done.set_exception(failure)


def copy_of(failure: GeneratorFailure) -> GeneratorFailure:
    """Return an exception of its own for each who raises it."""
    copied = GeneratorFailure(str(failure))
    copied.__cause__ = failure.__cause__
    return copied


def failure_of(error: BaseException) -> GeneratorFailure:
    """Return what callers are told of ``error``."""
    failure = GeneratorFailure(f"the torch engine failed: {say(error)}")
    failure.__cause__ = error
    return failure


def say(error: BaseException) -> str:
    """Return ``error`` in a line."""
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
