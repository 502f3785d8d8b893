"""The turns of an engine on a compute thread: only there is it touched, and no failure ends them.

A turn obeys one command or makes one engine step, then queues the next one behind whatever else the
thread has been given meanwhile; without work, or paused, there are no turns. Commands arrive by an
inbox and are obeyed between two engine steps: pause, resume and abort at once, requests and updates
in order. With ``on_update = wait`` a weight update closes admission: what was submitted before it
is finished under the old weights, what comes after it starts under the new ones. Owns the promise
that every command is answered, by its result or by an error, also when it is closed, when a turn
itself fails, and when the compute thread is closed before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from headrace.compute import ComputeThread
from headrace.errors import GeneratorFailure, HeadraceError, WeightSyncError
from headrace.generators.stop_strings import Decode
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.rollout_state import GroupCollector
from headrace.generators.torch_engine.statistics import Statistics
from headrace.types import GenerationRequest, OnUpdate, RolloutGroup, WeightUpdate

CLOSED = "the generator was closed"


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """The requests of one call that leave something to be sampled, and where their groups go."""

    requests: Sequence[GenerationRequest]
    deliver: Callable[[RolloutGroup | GeneratorFailure], None]
    """Called on the compute thread for each group, or once with the failure that ends the call."""
    abandoned: bool = False
    """Set by the caller, from any thread: nobody waits for the rest."""


@dataclass(slots=True, kw_only=True)
class _Update:
    update: WeightUpdate
    done: Future[None]


@dataclass(slots=True, kw_only=True)
class _Control:
    """Obeyed as soon as it is read, whatever waits."""

    obey: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


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
        self._inbox: queue.SimpleQueue[Submission | _Update | _Control] = queue.SimpleQueue()
        self._in_order: deque[Submission | _Update] = deque()
        """Read and not begun: an update that waits for rollouts to end, and what came after it."""
        self._owners: dict[GroupCollector, Submission] = {}
        self._is_paused = False
        self._gate = threading.Lock()
        self._has_turn = False
        """Whether a turn is queued or made. Under the gate, as `_closing` is set."""
        self._refusal = CLOSED
        """Why nothing goes in any more once it is closing."""
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._resting_since: float | None = time.monotonic()
        """Since when there is no turn, less what was counted; None while there is one."""
        self.num_turns = 0
        """Turns so far, by which others see that it lives."""
        self.num_steps = 0
        """Turns that were engine steps."""

    @property
    def stands_still(self) -> bool:
        """Whether it makes no step because it is paused, and not because it hangs."""
        return self._is_paused and self._resting_since is not None

    def submit(self, submission: Submission) -> None:
        """Queue ``submission``. Raises GeneratorFailure once closed."""
        if not self._send(submission):
            raise GeneratorFailure(self._refusal)

    def load(self, update: WeightUpdate) -> Future[None]:
        """Queue ``update``. Raises WeightSyncError once closed.

        The future can be cancelled until the tensors begin to be read.
        """
        done: Future[None] = Future()
        if not self._send(_Update(update=update, done=done)):
            msg = f"version {update.policy_version}: {self._refusal}"
            raise WeightSyncError(msg)
        return done

    def pause(self) -> Future[None]:
        """Sample nothing from the next step on, until `resume`."""
        return self._control(self._stand_still)

    def resume(self) -> Future[None]:
        """Go on with everything."""
        return self._control(self._go_on)

    def abort(self, group_ids: Collection[str]) -> Future[None]:
        """Deliver the open groups of these names as they are; those that have ended are no more."""
        names = frozenset(group_ids)
        return self._control(lambda: self._hand_back(names))

    def _control(self, obey: Callable[[], None]) -> Future[None]:
        """Raise GeneratorFailure once closed."""
        command = _Control(obey=obey)
        if not self._send(command):
            raise GeneratorFailure(self._refusal)
        return command.done

    def take_statistics(self) -> Statistics:
        """Return what was counted since the last call."""
        with self._gate:
            self._count_rest()
            taken, self._engine.statistics = self._engine.statistics, Statistics()
        return taken

    def _count_rest(self) -> None:
        """Count the time without a turn, up to now. Under the gate."""
        if self._resting_since is None:
            return
        now = time.monotonic()
        seconds, self._resting_since = now - self._resting_since, now
        if self._is_paused:
            self._engine.statistics.paused_seconds += seconds
        else:
            self._engine.statistics.idle_seconds += seconds

    def close(self, timeout_seconds: float) -> None:
        """Fail whatever is open and take no more turns. Idempotent.

        Raises GeneratorFailure where the turn of now has not ended in time: its calls stay open.
        """
        with self._gate:
            self._closing.set()
            self._queue_turn()
        if not self._ended.wait(timeout_seconds):
            msg = (
                f"an engine step that began has not ended {timeout_seconds:.0f} s after the "
                "generator was closed: its thread hangs, and open calls were not answered"
            )
            raise GeneratorFailure(msg)

    def _send(self, command: Submission | _Update | _Control) -> bool:
        """Return whether it went in. Under the gate, so that nothing comes after the last look."""
        with self._gate:
            if not self._closing.is_set():
                self._inbox.put(command)
                self._queue_turn()
                return True
            return False

    def _queue_turn(self) -> None:
        """Under the gate."""
        if self._has_turn or self._ended.is_set():
            return
        try:
            self._compute.submit(self._turn)
        except RuntimeError as error:  # it was closed: no turn is made any more, nor will be
            self._break(error)
            return
        self._has_turn = True
        self._count_rest()
        self._resting_since = None

    def _turn(self) -> None:
        try:
            if self._closing.is_set():
                self._refuse_rest(GeneratorFailure(self._refusal))
            else:
                self._make_turn()
        except BaseException as error:  # noqa: BLE001 - nobody reads it, and all would hang
            with self._gate:
                self._break(error)

    def _break(self, error: BaseException) -> None:
        """Answer everything with ``error``, which ends the turns. Under the gate.

        Only on the compute thread, or where there will be no turn on it.
        """
        failure = _failure(error)
        if not self._closing.is_set():
            self._refusal = f"{failure}; make a new generator"
            self._closing.set()
        self._refuse_rest(failure)

    def _make_turn(self) -> None:
        if not self._inbox.empty():
            self._read(self._inbox.get_nowait())
        elif self._may_step():
            self._step()
        self._begin_next()
        self.num_turns += 1
        with self._gate:
            self._has_turn = False
            if self._may_step() or not self._inbox.empty() or self._closing.is_set():
                self._queue_turn()
            else:
                self._resting_since = time.monotonic()

    def _may_step(self) -> bool:
        return self._engine.has_work and not self._is_paused

    def _read(self, command: Submission | _Update | _Control) -> None:
        match command:
            case Submission() | _Update():
                self._in_order.append(command)
            case _Control():
                self._obey(command)

    def _obey(self, command: _Control) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        try:
            command.obey()
        except BaseException as error:  # noqa: BLE001 - as in `_step`: whoever asked must hear it
            command.done.set_exception(_failure(error))
            self._give_up(error)
        else:
            command.done.set_result(None)

    def _stand_still(self) -> None:
        self._is_paused = True

    def _go_on(self) -> None:
        self._is_paused = False

    def _hand_back(self, names: frozenset[str]) -> None:
        running = {c for c in self._owners if c.request.group_id in names}
        self._engine.abort(running)
        for collector in running:
            self._deliver(collector)
        for queued in self._in_order:
            if isinstance(queued, Submission):
                refused = [self._engine.refuse(r) for r in queued.requests if r.group_id in names]
                groups = [collector.group(self._decode) for collector in refused]
                # All of them or none: what was delivered must not be there to be sampled.
                queued.requests = [r for r in queued.requests if r.group_id not in names]
                for group in groups:
                    queued.deliver(group)

    def _begin_next(self) -> None:
        """Admit and load in order, up to an update that must wait for rollouts to end."""
        while self._in_order and not self._closing.is_set():
            match self._in_order[0]:
                case Submission() as submission:
                    self._admit(submission)
                case _Update() as command:
                    self._drop_abandoned()
                    if self._must_wait(command):
                        return
                    self._load(command)
            self._in_order.popleft()  # only now: a turn that fails answers what stands there

    def _must_wait(self, command: _Update) -> bool:
        """Whether rollouts end first; while paused they never would, so `_load` refuses."""
        return self._has_to_finish() and not self._is_paused and not command.done.cancelled()

    def _has_to_finish(self) -> bool:
        return self._on_update == "wait" and self._engine.has_work

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
            self._give_up(error)
        self.num_steps += 1

    def _give_up(self, error: BaseException) -> None:
        """Forget all that was begun; tell every open submission, each with its own exception."""
        self._engine.clear()
        for owner in dict.fromkeys(self._owners.values()):
            owner.deliver(_failure(error))
        self._owners = {}

    def _drop_abandoned(self) -> None:
        gone = {collector for collector, owner in self._owners.items() if owner.abandoned}
        if gone:
            self._engine.drop(gone)
            self._owners = {c: owner for c, owner in self._owners.items() if c not in gone}

    def _deliver(self, collector: GroupCollector) -> None:
        group = collector.group(self._decode)
        self._owners.pop(collector).deliver(group)

    def _load(self, command: _Update) -> None:
        """Load, unless all is over or the publisher gave up."""
        if not command.done.set_running_or_notify_cancel():
            return
        version = command.update.policy_version
        if self._has_to_finish():
            command.done.set_exception(WeightSyncError(self._never(version)))
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

    def _never(self, version: int) -> str:
        return (
            f"version {version} was not loaded: generator.on_update = wait, and "
            f"{self._engine.num_unfinished} rollouts cannot end while the generator is paused; "
            "resume it first, abort their groups, or set on_update to keep, recompute or restart"
        )

    def _refuse_rest(self, why: GeneratorFailure) -> None:
        """Answer what is still open or was queued before the gate closed; there is no more turn."""
        for owner in dict.fromkeys(self._owners.values()):
            owner.deliver(_copy(why))
        self._owners = {}
        while not self._inbox.empty():
            _refuse(self._inbox.get(), why)
        while self._in_order:
            _refuse(self._in_order.popleft(), why)
        self._ended.set()
        with suppress(Exception):  # it may be what failed, and is asked for nothing any more
            self._engine.clear()


def _refuse(command: Submission | _Update | _Control, why: GeneratorFailure) -> None:
    match command:
        case Submission():
            command.deliver(_copy(why))
        case _Update():
            failure = WeightSyncError(f"version {command.update.policy_version}: {why}")
            failure.__cause__ = why.__cause__
            _fail(command.done, failure)
        case _Control():
            _fail(command.done, _copy(why))


def _fail(done: Future[None], failure: HeadraceError) -> None:
    """Answer with ``failure``, unless there is an answer or nobody waits for one."""
    if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
        done.set_exception(failure)


def _copy(failure: GeneratorFailure) -> GeneratorFailure:
    """Return an exception of its own for each who raises it."""
    copied = GeneratorFailure(str(failure))
    copied.__cause__ = failure.__cause__
    return copied


def _failure(error: BaseException) -> GeneratorFailure:
    failure = GeneratorFailure(f"the torch engine failed: {_say(error)}")
    failure.__cause__ = error
    return failure


def _say(error: BaseException) -> str:
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
