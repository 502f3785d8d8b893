"""The roles as Protocols. The controller knows these and nothing behind them.

At most four methods each. Every call may be awaited from the controller's event loop; blocking
work belongs in the role's own thread or process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.types import (
    EvaluationRecord,
    GenerationRequest,
    RolloutGroup,
    RunEvent,
    StepRecord,
    StepResult,
    Verdict,
    WeightNotice,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Generator(Protocol):
    """Samples rollouts."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """Yield each group as soon as its last rollout ends, in order of completion.

        All ``requests`` are admitted together, in order, before the first token is sampled.
        Raises GeneratorFailure, in particular before the first `update_weights`.
        """
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Return once every token sampled from now on comes from ``update``.

        Raises WeightSyncError when the loaded weights do not have the published checksum.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return what is worth knowing of the time since the last call, by metric name."""
        ...

    async def close(self) -> None:
        """Release threads and memory. Idempotent."""
        ...


class Interruptible(Protocol):
    """What every generator is as well: its rollouts can stand still, be taken back and go on.

    A rollout that was taken back goes on when it comes in as `GenerationRequest.begun`, at the same
    generator or at another one.
    """

    async def pause(self) -> None:
        """Return once no token is being sampled. Requests are still accepted, and wait. Idempotent.

        An update of the weights while paused follows ``on_update``, except that ``wait`` with
        unfinished rollouts raises WeightSyncError: they would never end.
        """
        ...

    async def resume(self) -> None:
        """Go on where `pause` stopped. Idempotent."""
        ...

    async def abort(self, group_ids: Sequence[str]) -> None:
        """Have the open `generate` calls yield these groups now, as they are, paused or not.

        Unfinished rollouts have finish reason ``abort`` and keep tokens, log-probs and version
        spans. A group that ended and was not yielded yet is no error. Raises GeneratorFailure
        that names the groups of no open call; then nothing is aborted.
        """
        ...


class Verifier(Protocol):
    """Scores rollouts. A call that is cancelled frees what it holds."""

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """Return one verdict for each rollout, in order.

        A failure of the verifier's own is a Verdict with ``reward=None``; raises VerifierFailure
        only when such failures are so many that the run must stop.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return what is worth knowing of the time since the last call, by metric name."""
        ...

    async def close(self) -> None:
        """End every process it started. Idempotent."""
        ...


class Learner(Protocol):
    """Updates the policy."""

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """Make the optimizer updates for one batch of scored groups.

        Raises DivergedError or NoSignalError when several steps in a row changed nothing.
        """
        ...

    async def save(self, directory: Path) -> Awaitable[None] | None:
        """Write model, optimizer and counters into an existing empty ``directory``.

        What is written is what they are at the call. Where it returns something, that ends when
        all is written, and steps may be made meanwhile. Raises CheckpointError, as that does.
        """
        ...

    async def load(self, directory: Path) -> int:
        """Restore what `save` wrote and return its policy version. Raises CheckpointError."""
        ...

    async def close(self) -> None:
        """Release threads and memory. Idempotent."""
        ...


class WeightSync(Protocol):
    """Brings the learner's weights to every generator."""

    async def publish(self, policy_version: int) -> Awaitable[None]:
        """Take the weights as they are, which must be of ``policy_version``.

        From then on the learner may step: nothing that it changes is read any more. What is
        returned is to be awaited, and ends once every generator samples from that version; no other
        publication may begin before. Both raise WeightSyncError.
        """
        ...


class NoticeReceiver(Protocol):
    """A generator, or several, in other processes: takes weights by notice."""

    async def update_from(self, notice: WeightNotice) -> None:
        """Return once every token sampled from now on comes from what ``notice`` publishes.

        Raises WeightSyncError where that could not be read or has another checksum.
        """
        ...


class WeightStore(Protocol):
    """The learner's end of a weight sync between processes: writes what readers then open."""

    async def write(self, update: WeightUpdate, *, is_whole: bool = False) -> WeightNotice:
        """Write ``update`` where readers find it; its tensors may change once this returns.

        ``is_whole``: do not rest on earlier versions, because some reader lost them; so the last
        version may be asked for again, whose tensors may have changed since. The last two notices
        can be opened, and older ones until they are released. Raises WeightSyncError, which names
        the place, where there is no room.
        """
        ...

    def release(self, policy_version: int) -> None:
        """Take note that no reader will open a notice older than ``policy_version`` any more."""
        ...

    def close(self) -> None:
        """Give back all memory and files. Idempotent."""
        ...


class WeightRoom(Protocol):
    """A store that gives out memory, so that what is published is computed where it is read."""

    def take(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return tensors without content, for the next `WeightStore.write` of this very mapping.

        What was taken before and not written is given back. Raises WeightSyncError, which names
        the place, where there is no room.
        """
        ...


class WeightReader(Protocol):
    """The generator's end, in another process: made from its pickle there, before any use."""

    def open(self, notice: WeightNotice) -> AbstractContextManager[WeightUpdate]:
        """Return what ``notice`` publishes, without copying it where that can be; blocks.

        The tensors are valid until the context ends. Raises WeightSyncError when they are gone,
        were replaced, or cannot be made from what this process holds; a notice that was written
        with ``is_whole`` may still be opened then.
        """
        ...

    def close(self) -> None:
        """Let go of what is kept between two notices. Idempotent."""
        ...


class Monitor(Protocol):
    """Sees what happens and tells someone. Must never change it."""

    def on_step(self, record: StepRecord) -> None:
        """A training step ended."""
        ...

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """A held-out evaluation ended."""
        ...

    def on_event(self, event: RunEvent) -> None:
        """Something else happened."""
        ...

    def close(self) -> None:
        """Flush and release. Idempotent."""
        ...
