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
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headrace.compute import ComputeThread
from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.engine_commands import (
    Control,
    Submission,
    Update,
    copy_of,
    failure_of,
    refuse,
    say,
)
from headrace.generators.progress import Marks, Progress
from headrace.generators.stop_strings import Decode
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.rollout_state import GroupCollector
from headrace.generators.torch_engine.statistics import Statistics
from headrace.types import OnUpdate, WeightUpdate

CLOSED = "the generator was closed"


class EngineTurns:
    """Runs one engine until closed."""

    def __init__(
        self,
        engine: Engine,
        decode: Decode,
        compute: ComputeThread,
        on_update: OnUpdate = "wait",
        stager: ComputeThread | None = None,
    ) -> None:
        """``stager``: where new weights are prepared while rollouts go on; None: nowhere.

        Of one core, so that it has no team of threads; closed by whoever made it.
        """
        self._engine, self._stager = engine, stager
        self._on_update: OnUpdate = on_update
        self._decode = decode
        self._compute = compute
        self._inbox: queue.SimpleQueue[Submission | Update | Control] = queue.SimpleQueue()
        self._in_order: deque[Submission | Update] = deque()
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
        self._stepped_at: float | None = None
        """When the last step ended, if it left work and nothing was paused since."""
        self._stands_since: float | None = None
        """What that was when weights were replaced, until the next step."""
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

    def load(self, update: WeightUpdate) -> Update:
        """Queue ``update``. Raises WeightSyncError once closed."""
        command = Update(update=update)
        if not self._send(command):
            msg = f"version {update.policy_version}: {self._refusal}"
            raise WeightSyncError(msg)
        return command

    def withdraw(self, command: Update) -> list[Future[Any]]:
        """Give ``command`` up, unless it is over or weights are being replaced by it.

        Returns what must end before its tensors are read no more.
        """
        with self._gate:
            command.is_withdrawn = True
            left: list[Future[Any]] = []
            if not (command.done.cancel() or command.done.done()):
                left.append(command.done)
            if command.staging is not None and not command.staging.done():
                left.append(command.staging)
            return left

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

    def progress(self, marks: Marks) -> Future[Progress]:
        """Tell what is new of unfinished groups."""
        return self._control(lambda: self._engine.progress(marks))

    def _control(self, obey: Callable[[], Any]) -> Future[Any]:
        """Raise GeneratorFailure once closed."""
        command = Control(obey=obey)
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

    def _send(self, command: Submission | Update | Control) -> bool:
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
        failure = failure_of(error)
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

    def _read(self, command: Submission | Update | Control) -> None:
        match command:
            case Submission() | Update():
                self._in_order.append(command)
            case Control():
                self._obey(command)

    def _obey(self, command: Control) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        try:
            answer = command.obey()
        except BaseException as error:  # noqa: BLE001 - as in `_step`: whoever asked must hear it
            command.done.set_exception(failure_of(error))
            self._give_up(error)
        else:
            command.done.set_result(answer)

    def _stand_still(self) -> None:
        self._is_paused = True
        self._stepped_at = self._stands_since = None

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
                case Update() as command:
                    self._drop_abandoned()
                    if self._is_staging(command) or self._must_wait(command):
                        return
                    self._load(command)
            self._in_order.popleft()  # only now: a turn that fails answers what stands there

    def _is_staging(self, command: Update) -> bool:
        """Have ``command`` prepared if rollouts go on meanwhile; whether that is still under way.

        Without rollouts, or paused, it is loaded here, with all cores and into memory that is
        there. Unblocked by the end of the preparation, which queues a turn.
        """
        with self._gate:
            may_stage = self._stager is not None and self._may_step() and not command.is_withdrawn
            if command.staging is None and may_stage:
                assert self._stager is not None
                command.staging = self._stager.submit(lambda: self._stage(command))
                command.staging.add_done_callback(self._staged)
        return command.staging is not None and not command.staging.done()

    def _stage(self, command: Update) -> float:
        began = time.monotonic()
        self._engine.stage(replace(command.update, tensors=command.tensors))
        return time.monotonic() - began

    def _staged(self, _staging: Future[float]) -> None:
        with self._gate:
            self._queue_turn()

    def _must_wait(self, command: Update) -> bool:
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
            submission.deliver(failure_of(error))
        else:
            self._owners |= dict.fromkeys(collectors, submission)

    def _step(self) -> None:
        """One engine step; a failure in it ends every open submission, never the turns."""
        self._count_stall()
        try:
            self._drop_abandoned()
            for collector in self._engine.step():
                self._deliver(collector)
        except Exception as error:  # noqa: BLE001 - the one boundary: all would hang
            self._give_up(error)
        self.num_steps += 1
        self._stepped_at = time.monotonic() if self._engine.has_work else None

    def _count_stall(self) -> None:
        if self._stands_since is not None:
            statistics, seconds = self._engine.statistics, time.monotonic() - self._stands_since
            statistics.max_stall_seconds = max(statistics.max_stall_seconds, seconds)
            self._stands_since = None

    def _give_up(self, error: BaseException) -> None:
        """Forget all that was begun; tell every open submission, each with its own exception."""
        self._engine.clear()
        for owner in dict.fromkeys(self._owners.values()):
            owner.deliver(failure_of(error))
        self._owners = {}

    def _drop_abandoned(self) -> None:
        gone = {collector for collector, owner in self._owners.items() if owner.abandoned}
        if gone:
            self._engine.drop(gone)
            self._owners = {c: owner for c, owner in self._owners.items() if c not in gone}

    def _deliver(self, collector: GroupCollector) -> None:
        group = collector.group(self._decode)
        self._owners.pop(collector).deliver(group)

    def _load(self, command: Update) -> None:
        """Load, unless all is over or the publisher gave up."""
        if not command.done.set_running_or_notify_cancel():
            return
        version = command.update.policy_version
        if self._has_to_finish():
            command.done.set_exception(WeightSyncError(self._never(version)))
            return
        began = time.monotonic()
        try:
            self._replace_weights(command)
        except Exception as error:  # noqa: BLE001 - as in `_step`: the publisher must be answered
            failure = WeightSyncError(f"version {version} was not loaded: {say(error)}")
            failure.__cause__ = error
            command.done.set_exception(failure)
        else:
            self._engine.statistics.update_seconds += time.monotonic() - began
            command.done.set_result(None)

    def _replace_weights(self, command: Update) -> None:
        self._stands_since = self._stepped_at
        if command.staging is None:
            self._engine.load(command.update, self._on_update)
            return
        self._engine.statistics.staging_seconds += command.staging.result()
        self._engine.swap(command.update.policy_version, self._on_update)

    def _never(self, version: int) -> str:
        return (
            f"version {version} was not loaded: generator.on_update = wait, and "
            f"{self._engine.num_unfinished} rollouts cannot end while the generator is paused; "
            "resume it first, abort their groups, or set on_update to keep, recompute or restart"
        )

    def _refuse_rest(self, why: GeneratorFailure) -> None:
        """Answer what is still open or was queued before the gate closed; there is no more turn."""
        for owner in dict.fromkeys(self._owners.values()):
            owner.deliver(copy_of(why))
        self._owners = {}
        while not self._inbox.empty():
            refuse(self._inbox.get(), why)
        while self._in_order:
            refuse(self._in_order.popleft(), why)
        self._ended.set()
        with suppress(Exception):  # it may be what failed, and is asked for nothing any more
            self._engine.clear()
