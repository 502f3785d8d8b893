"""One cell from outside: starts it, gives it one job at a time, and says how each ended.

Owns: how an end is called rests on the kernel's word alone; whatever passes a limit is ended at
once; and a cell in which anything unusual happened is `spent` and never used again. All calls
block: a cell belongs to one thread (`pool`). Waits are bounded: by the job's wall clock, by
`START_SECONDS`, by `_END_SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from dataclasses import dataclass

from headrace.scratch import ScratchFolder
from headrace.verifiers.sandbox import disk, launch
from headrace.verifiers.sandbox.cgroup import MemorySlot
from headrace.verifiers.sandbox.execution import Ending, Execution, Limits, Tier
from headrace.verifiers.sandbox.inside import protocol
from headrace.verifiers.sandbox.inside.protocol import Done
from headrace.verifiers.sandbox.inside.removal import empty
from headrace.verifiers.sandbox.launch import CellSpec
from headrace.verifiers.sandbox.streams import Streams
from headrace.verifiers.sandbox.watch import Size, Watch, descendants, size_of
from headrace.verifiers.sandbox.work import MIB, Work

START_SECONDS = 60.0
"""For the imports of a cell; not part of any job's time."""
_END_SECONDS = 5.0
"""For a cell to kill and clean up after its socket was closed; then it is killed itself."""
_DRAIN_SECONDS = 5.0
"""For the pipes to end once every process that held them is dead."""
_LOOK_SECONDS = 0.05
"""Between two looks at what a long job uses."""
_QUIET_SECONDS = 0.005
"""Before what a job writes is read while it runs. Most have ended by then, and cost one awakening;
what others write waits in the pipes, at the worst with a writer who waits for room in one."""


class CellError(Exception):
    """A cell could not be started; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forced:
    """The end that a job is given."""

    ending: Ending
    detail: str


class Cell:
    """A process that forks for each job, and everything below it."""

    def __init__(self, spec: CellSpec) -> None:
        """Start one and wait until it is ready. Raises CellError."""
        self.tier: Tier = spec.tier
        self.spent = False
        self._left = spec.jobs_per_cell
        self._kills = 0
        self._scratch = ScratchFolder("cell") if spec.needs_folder else None
        self._folder = ""
        if self._scratch is not None:
            self._scratch.path.chmod(0o711)
            self._folder = str(self._scratch.path)
        self._control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._memory = MemorySlot.make()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with inside:
                self._process = launch.start(spec, inside.fileno(), self._folder)
                if self._memory is not None:
                    self._memory.place(self._process.pid)
            self._control.send(launch.first_message(spec, self._folder))
            self._wait_ready()
            self._zygote = self._find_zygote()
            self._base: Size = size_of(self._zygote)
        except (OSError, CellError) as error:
            self.close()
            raise CellError(str(error)) from error

    @property
    def process_id(self) -> int:
        """The process that was started; all others of the cell are below it."""
        assert self._process is not None
        return self._process.pid

    def run(self, work: Work, cancelled: int) -> Execution:
        """Run ``work`` to its end; it ends early once ``cancelled`` is readable."""
        began = time.monotonic()
        self._left -= 1
        if self._memory is not None:
            limits = work.limits
            room = (limits.memory_mib + limits.disk_mib) * MIB + self._base.resident
            self._memory.limit(room)
        with Streams(work.payload, work.stdin, work.limits.output_bytes) as streams:
            try:
                streams.send(self._control, work.terms(self._base.address_space))
                found = self._attend(work.limits, streams, began, cancelled)
                if isinstance(found, Done) and not streams.drain(_DRAIN_SECONDS):
                    found = _infra("the pipes did not end with the processes")
            except (OSError, ValueError) as error:
                found = _infra(f"the cell does not answer: {error}")
            forced = found if isinstance(found, _Forced) else None
            kills, self._kills = self._kills, self._num_kills()
            was_killed = self._kills > kills
            if isinstance(found, Done):
                forced = _judge(found, work.limits, streams, was_killed=was_killed)
            elif forced is not None and forced.ending is Ending.INFRA and was_killed:
                forced = _Forced(ending=Ending.OOM, detail="its memory took the cell with it")
            execution = self._execution(work, streams, found, forced, time.monotonic() - began)
        self.spent = self.spent or self._left == 0 or execution.ending not in _ORDINARY
        return execution

    def close(self) -> None:
        """End every process of the cell and remove what it wrote. Idempotent."""
        self.spent = True
        # Shut down, not only closed: a process that is just being started may hold a copy.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        if self._process is not None:
            self._end(self._process)
        if self._scratch is not None:
            with contextlib.suppress(OSError):
                empty(self._folder)
            self._scratch.remove()
        if self._memory is not None:
            _remove(self._memory)
            self._memory = None

    def _wait_ready(self) -> None:
        self._control.settimeout(START_SECONDS)
        try:
            message = self._control.recv(protocol.MAX_MESSAGE)
        except TimeoutError as error:
            msg = f"it was not ready within {START_SECONDS:g} s"
            raise CellError(msg) from error
        self._control.settimeout(None)
        if message[:1] == protocol.READY:
            return
        if message[:1] == protocol.FAILED:
            raise CellError(message[1:].decode(errors="replace"))
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        msg = f"its process ended during the start (status {self._process.returncode})"
        raise CellError(msg)

    def _find_zygote(self) -> int:
        """Return the process that is warmed: the one that was started, or the last below it."""
        *_, zygote = (self.process_id, *descendants(self.process_id))
        return zygote

    def _forker(self) -> int:
        """Return the process that forks: in cells of root's it is another one, started for it."""
        if self.tier is not Tier.CELL:
            return self._zygote
        return next(descendants(self.process_id), self._zygote)

    def _attend(
        self, limits: Limits, streams: Streams, began: float, cancelled: int
    ) -> Done | _Forced:
        """Wait for the end of a job; what unblocks it is that, a limit, or ``cancelled``."""
        poll = self._poll_after_quiet(limits, streams, cancelled)
        deadline = began + limits.wall_seconds
        next_look = began + _LOOK_SECONDS
        watch = Watch(self._forker, self._base)
        while True:
            now = time.monotonic()
            if now >= deadline:
                return _Forced(
                    ending=Ending.TIMEOUT_WALL, detail=f"more than {limits.wall_seconds:g} s"
                )
            if now >= next_look:
                next_look = now + _LOOK_SECONDS
                forced = _look(watch, limits) or self._look_at_disk(limits)
                if forced is not None:
                    return forced
            for descriptor, _ in poll.poll(1000 * max(0.001, min(deadline, next_look) - now)):
                if descriptor == self._control.fileno():
                    return self._receive()
                if descriptor == cancelled:
                    return _infra("cancelled")
                if not streams.read(descriptor):
                    poll.unregister(descriptor)
                elif streams.overflowed:
                    return _Forced(ending=Ending.OUTPUT_LIMIT, detail=_OUTPUT_DETAIL)

    def _look_at_disk(self, limits: Limits) -> _Forced | None:
        if not self._folder:
            return None
        if disk.exceeds(self._folder, limits.disk_mib * MIB, descendants(self.process_id)):
            detail = f"more than {limits.disk_mib} MiB of files, or {protocol.MAX_FILES} of them"
            return _Forced(ending=Ending.VIOLATION, detail=detail)
        return None

    def _poll_after_quiet(self, limits: Limits, streams: Streams, cancelled: int) -> select.poll:
        """Wait `_QUIET_SECONDS` for the end alone, then return what reports output too."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(cancelled, select.POLLIN)
        if not poll.poll(1000 * min(_QUIET_SECONDS, limits.wall_seconds)):
            streams.register(poll)
        return poll

    def _receive(self) -> Done | _Forced:
        message = self._control.recv(protocol.MAX_MESSAGE)
        if message[:1] == protocol.FAILED:
            return _infra(message[1:].decode(errors="replace"))
        if not message:
            return _infra("the cell died")
        return Done.unpack(message)

    def _execution(
        self,
        work: Work,
        streams: Streams,
        found: Done | _Forced,
        forced: _Forced | None,
        wall_seconds: float,
    ) -> Execution:
        status = found.wait_status if isinstance(found, Done) else 0
        exited = isinstance(found, Done) and forced is None and os.WIFEXITED(status)
        signaled = isinstance(found, Done) and forced is None and not exited
        ending = Ending.EXITED if exited else Ending.SIGNALED
        return Execution(
            job_id=work.job_id,
            tier=self.tier,
            ending=ending if forced is None else forced.ending,
            exit_status=os.WEXITSTATUS(status) if exited else None,
            signal=os.WTERMSIG(status) if signaled else None,
            stdout=streams.stdout,
            stderr=streams.stderr,
            returned=streams.value if exited else None,
            cpu_seconds=found.cpu_seconds if isinstance(found, Done) else 0.0,
            wall_seconds=wall_seconds,
            detail="" if forced is None else forced.detail,
        )

    def _num_kills(self) -> int:
        if self._memory is None:
            return 0
        try:
            return self._memory.num_kills()
        except OSError:
            return 0

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for it to end by itself; else kill what is below it, then it."""
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


_ORDINARY = {Ending.EXITED, Ending.SIGNALED}
_OUTPUT_DETAIL = "it wrote more than it may"


def _judge(done: Done, limits: Limits, streams: Streams, *, was_killed: bool) -> _Forced | None:
    """Return what a job's end is called where that is more than its exit or its signal."""
    ended_by = os.WTERMSIG(done.wait_status) if os.WIFSIGNALED(done.wait_status) else 0
    # The signal at the kernel's own limit comes later, and a program can send it to itself.
    if done.cpu_seconds > limits.cpu_seconds:
        detail = f"{done.cpu_seconds:.2f} s of CPU time, {limits.cpu_seconds:g} allowed"
        return _Forced(ending=Ending.TIMEOUT_CPU, detail=detail)
    if ended_by == signal.SIGSYS or done.bad_call:
        return _Forced(ending=Ending.VIOLATION, detail="a system call that the policy kills for")
    if was_killed or (streams.says_memory_error and done.wait_status != 0):
        return _Forced(ending=Ending.OOM, detail=f"more than {limits.memory_mib} MiB")
    if streams.overflowed:
        return _Forced(ending=Ending.OUTPUT_LIMIT, detail=_OUTPUT_DETAIL)
    return None


def _look(watch: Watch, limits: Limits) -> _Forced | None:
    usage = watch.look(limits.memory_mib * MIB)
    if usage.cpu_seconds > limits.cpu_seconds:
        detail = f"more than {limits.cpu_seconds:g} s of CPU time"
        return _Forced(ending=Ending.TIMEOUT_CPU, detail=detail)
    if usage.resident > limits.memory_mib * MIB:
        return _Forced(ending=Ending.OOM, detail=f"more than {limits.memory_mib} MiB")
    # The kernel refuses them where it counts this user's; it does not count root's.
    if usage.num_processes > limits.num_processes:
        detail = f"more than {limits.num_processes} processes"
        return _Forced(ending=Ending.VIOLATION, detail=detail)
    return None


def _infra(detail: str) -> _Forced:
    return _Forced(ending=Ending.INFRA, detail=detail)


def _remove(memory: MemorySlot) -> None:
    """Remove a cgroup; the kernel may take a moment to let go of the last process."""
    for _ in range(50):
        try:
            memory.remove()
        except OSError:
            time.sleep(0.01)
        else:
            return
