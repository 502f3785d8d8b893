"""The turns of an engine on a compute thread: only there is it touched, and no failure ends them.

A turn obeys one command or makes one engine step, then queues the next one behind whatever else the
thread has been given meanwhile; without work there are no turns. Commands arrive through an inbox
and are obeyed in order, between two engine steps. With ``on_update = wait`` a weight update closes
admission: what was submitted before it is finished under the old weights, what comes after it
starts under the new ones. Owns the promise that every submission and every update is answered, by
its result or by an error, also when it is closed.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.compute import ComputeThread
from headrace.errors import GeneratorFailure, HeadraceError, WeightSyncError
from headrace.generators.torch_engine.engine import Decode, Engine
from headrace.generators.torch_engine.rollout_state import GroupCollector
from headrace.generators.torch_engine.statistics import Statistics
from headrace.types import GenerationRequest, OnUpdate, RolloutGroup, WeightUpdate

CLOSED = "the generator was closed"


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """The requests of one call, and where their groups go."""

    requests: Sequence[GenerationRequest]
    deliver: Callable[[RolloutGroup | GeneratorFailure], None]
    """Called on the compute thread for each group, or once with the failure that ends the call."""
    abandoned: bool = False
    """Set by the caller, from any thread: nobody waits for the rest."""


@dataclass(slots=True, kw_only=True)
class _Update:
    update: WeightUpdate
    done: Future[None]


class EngineTurns:
    """Runs one engine until closed."""

    def __init__(
        self,
        engine: Engine,
        decode: Decode,
        compute: ComputeThread,
        on_update: OnUpdate = "wait",
    ) -> None:
        self._engine = engine
        self._on_update: OnUpdate = on_update
        self._decode = decode
        self._compute = compute
        self._inbox: queue.SimpleQueue[Submission | _Update] = queue.SimpleQueue()
        self._owners: dict[GroupCollector, Submission] = {}
        self._gate = threading.Lock()
        self._has_turn = False
        """Whether a turn is queued or made. Under the gate, as `_closing` is set."""
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._idle_since = time.monotonic()
        self.num_steps = 0
        """Engine steps so far, by which others see that it lives."""

    def submit(self, submission: Submission) -> None:
        """Queue ``submission``. Raises GeneratorFailure once closed."""
        if not self._send(submission):
            raise GeneratorFailure(CLOSED)

    def load(self, update: WeightUpdate) -> Future[None]:
        """Queue ``update``. Raises WeightSyncError once closed.

        The future can be cancelled until the tensors begin to be read.
        """
        done: Future[None] = Future()
        if not self._send(_Update(update=update, done=done)):
            msg = f"version {update.policy_version}: {CLOSED}"
            raise WeightSyncError(msg)
        return done

    def take_statistics(self) -> Statistics:
        """Return what was counted since the last call."""
        taken, self._engine.statistics = self._engine.statistics, Statistics()
        return taken

    def close(self, timeout_seconds: float) -> None:
        """Fail whatever is open and take no more turns. Idempotent."""
        with self._gate:
            self._closing.set()
            self._queue_turn()
        self._ended.wait(timeout_seconds)

    def _send(self, command: Submission | _Update) -> bool:
        """Return whether it went in. Under the gate, so that nothing comes after the last look."""
        with self._gate:
            if not self._closing.is_set():
                self._inbox.put(command)
                self._queue_turn()
            return not self._closing.is_set()

    def _queue_turn(self) -> None:
        if not self._has_turn and not self._ended.is_set():
            self._has_turn = True
            self._compute.submit(self._turn)

    def _turn(self) -> None:
        if self._closing.is_set():
            self._refuse_rest()
            self._ended.set()
            return
        self._engine.statistics.idle_seconds += max(0.0, time.monotonic() - self._idle_since)
        self._idle_since = math.inf
        self._obey_or_step()
        with self._gate:
            self._has_turn = False
            if self._engine.has_work or not self._inbox.empty() or self._closing.is_set():
                self._queue_turn()
            else:
                self._idle_since = time.monotonic()

    def _obey_or_step(self) -> None:
        try:
            command = self._inbox.get_nowait()
        except queue.Empty:
            self._step()
            return
        match command:
            case Submission():
                self._admit(command)
            case _Update():
                self._apply(command)

    def _admit(self, submission: Submission) -> None:
        try:
            collectors = self._engine.submit(submission.requests)
        except GeneratorFailure as failure:
            submission.deliver(failure)
        except Exception as error:  # noqa: BLE001 - as in `_step`: the caller must be answered
            submission.deliver(_failure(error))
        else:
            self._owners |= dict.fromkeys(collectors, submission)

    def _step(self) -> None:
        """One engine step; a failure in it ends every open submission, never the turns."""
        try:
            self._drop_abandoned()
            for collector in self._engine.step():
                self._deliver(collector)
        except Exception as error:  # noqa: BLE001 - the one boundary: all would hang
            self._engine.abort()
            self._fail_open(error)
        self.num_steps += 1

    def _drop_abandoned(self) -> None:
        gone = {collector for collector, owner in self._owners.items() if owner.abandoned}
        if gone:
            self._engine.drop(gone)
            self._owners = {c: owner for c, owner in self._owners.items() if c not in gone}

    def _deliver(self, collector: GroupCollector) -> None:
        request = collector.request
        finished = sorted(collector.finished, key=lambda rollout: rollout.rollout_index)
        group = RolloutGroup(
            group_id=request.group_id,
            prompt=request.prompt,
            rollouts=tuple(r.to_rollout(self._decode(r.sampled.completion_ids)) for r in finished),
            sampling=request.sampling,
        )
        self._owners.pop(collector).deliver(group)

    def _fail_open(self, error: Exception) -> None:
        """Tell every open submission, each with an exception of its own."""
        for owner in dict.fromkeys(self._owners.values()):
            owner.deliver(_failure(error))
        self._owners = {}

    def _apply(self, command: _Update) -> None:
        """Load, after what runs if that is wished, unless all is over or the publisher gave up."""
        while self._must_finish() and not self._closing.is_set() and not command.done.cancelled():
            self._step()
        if not command.done.set_running_or_notify_cancel():
            return
        version = command.update.policy_version
        if self._closing.is_set():
            command.done.set_exception(WeightSyncError(f"version {version}: {CLOSED}"))
            return
        began = time.monotonic()
        try:
            self._engine.load(command.update, self._on_update)
        except Exception as error:  # noqa: BLE001 - as in `_step`: the publisher must be answered
            failure = WeightSyncError(f"version {version} was not loaded: {_say(error)}")
            failure.__cause__ = error
            command.done.set_exception(failure)
        else:
            self._engine.statistics.update_seconds += time.monotonic() - began
            command.done.set_result(None)

    def _must_finish(self) -> bool:
        return self._on_update == "wait" and self._engine.has_work

    def _refuse_rest(self) -> None:
        """Answer what is still open or was queued before the gate closed."""
        self._engine.abort()
        for owner in dict.fromkeys(self._owners.values()):
            owner.deliver(GeneratorFailure(CLOSED))
        self._owners = {}
        while not self._inbox.empty():
            match self._inbox.get():
                case Submission() as submission:
                    submission.deliver(GeneratorFailure(CLOSED))
                case _Update() as command:
                    if command.done.set_running_or_notify_cancel():
                        command.done.set_exception(WeightSyncError(CLOSED))


def _failure(error: Exception) -> GeneratorFailure:
    failure = GeneratorFailure(f"the torch engine failed: {_say(error)}")
    failure.__cause__ = error
    return failure


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
