"""Forks for one job after another, waits, kills what is left, and says how each ended.

Owns: when it answers, no process of the job is alive, and nothing that came with it is open here.
It never sees a job's content. There are two kinds. A `Forker` is free, and each job's process shuts
itself in. A `CagedForkers` forks process 1 of a namespace, which shuts itself in once for all jobs
on the same terms and then forks for them; it starts another where the terms or the directory must
be others, since only who is free can mount. That process has its programs' user and rights, and is
safe from them because it is process 1: the kernel drops every signal of theirs to it.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import NoReturn

from headrace.verifiers.sandbox.inside import descriptors, kernel, program, protocol
from headrace.verifiers.sandbox.inside.cage import Cage, Cages
from headrace.verifiers.sandbox.inside.kernel import Call
from headrace.verifiers.sandbox.inside.protocol import Done, Terms

_MUST_BE_ANOTHER = 75
"""Status of a process 1 that ends because the next job needs another one."""


class Jobs:
    """What comes over the socket, one after the other."""

    def __init__(
        self, control: socket.socket, wait_for: Callable[[int], None], kill_all: Callable[[], None]
    ) -> None:
        """``wait_for`` returns once a child has ended, or nobody asks for its end any more."""
        self._control = control
        self._wait_for = wait_for
        self._kill_all = kill_all
        self._used = _cpu_seconds()

    def next_terms(self) -> Terms | None:
        """Wait for a job and return its terms; unblocked by the supervisor's end too: then None."""
        return _terms_of(self._control.recv(protocol.MAX_MESSAGE, socket.MSG_PEEK))

    def run_next(self, steps: Sequence[Call]) -> None:
        """Run the job whose terms were returned. Raises OSError when nobody asks for its end."""
        socket.recv_fds(self._control, protocol.MAX_MESSAGE, protocol.NUM_DESCRIPTORS)
        child = kernel.fork()
        if child == 0:
            program.become(steps)
        descriptors.free_those_of_jobs()
        self._wait_for(child)
        self._kill_all()
        status, bad_call = reap(child)
        total = _cpu_seconds()
        done = Done(status, total - self._used, bad_call)
        self._used = total
        self._control.send(done.pack())


class Forker:
    """Whoever it is that calls `serve`; its jobs shut themselves in."""

    def __init__(self, cages: Cages, kill_all: Callable[[], None]) -> None:
        self._cages = cages
        self._kill_all = kill_all

    def serve(self, control: socket.socket) -> None:
        """Serve jobs. Waits for the next; unblocked by the supervisor, or by its end."""
        jobs = Jobs(control, lambda child: _wait_for(child, control), self._kill_all)
        ready_for: Terms | None = None
        steps: list[Call] = []
        try:
            while (terms := jobs.next_terms()) is not None:
                if terms != ready_for:
                    steps = self._steps(terms)
                jobs.run_next(steps)
                # Most jobs are like the one before; while the supervisor reads what came of it.
                steps, ready_for = self._steps(terms), terms
        finally:
            self._kill_all()
            reap(0)

    def _steps(self, terms: Terms) -> list[Call]:
        cage = self._cages.prepare(terms)
        return [*cage.inherited, *cage.own]


class CagedForkers:
    """Starts process 1, one after the other, as a user that is not its own."""

    def __init__(self, cages: Cages, kill_all: Callable[[], None]) -> None:
        self._cages = cages
        self._kill_all = kill_all

    def serve(self, control: socket.socket) -> None:
        """Have jobs served. Waits for what `_outlive` waits for."""
        terms = _terms_of(control.recv(protocol.MAX_MESSAGE, socket.MSG_PEEK))
        while terms is not None:
            cage = self._cages.prepare(terms)
            first = kernel.fork_first()
            if first == 0:
                self._serve_caged(control, terms, cage)
            terms = _outlive(first, control, terms)

    def _serve_caged(self, control: socket.socket, terms: Terms, cage: Cage) -> NoReturn:
        """Serve jobs on ``terms`` while their directory stays untouched."""
        kernel.make(cage.inherited)
        # Forgotten at a change of identity, so only now.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        jobs = Jobs(control, _wait_alone_for, self._kill_all)
        while (asked := jobs.next_terms()) is not None:
            if asked != terms:
                os._exit(_MUST_BE_ANOTHER)
            jobs.run_next(cage.own)
            if not self._cages.is_untouched():
                os._exit(_MUST_BE_ANOTHER)
        os._exit(0)


def _outlive(first: int, control: socket.socket, terms: Terms) -> Terms | None:
    """Wait until process 1 has ended; return the terms for another, None if there is no use for it.

    Unblocked by the supervisor's end too; then process 1 is killed, and with it all others.
    Raises OSError when it did not end by itself.
    """
    process = os.pidfd_open(first)
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        # Only its end: messages are for process 1.
        poll.register(control, 0)
        if any(descriptor == control.fileno() for descriptor, _ in poll.poll()):
            os.kill(first, signal.SIGKILL)
    finally:
        os.close(process)
    _, status = os.waitpid(first, 0)
    try:
        asked = control.recv(protocol.MAX_MESSAGE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        asked = None
    if asked == b"" or status == 0:
        return None
    if os.waitstatus_to_exitcode(status) != _MUST_BE_ANOTHER:
        msg = f"the process that forks ended with status {os.waitstatus_to_exitcode(status)}"
        raise OSError(msg)
    return terms if asked is None else _terms_of(asked)


def _terms_of(message: bytes) -> Terms | None:
    return Terms.unpack(message) if message else None


def _wait_for(child: int, control: socket.socket) -> None:
    """Wait until ``child`` has ended; unblocked early by a word of the supervisor, or its end."""
    process = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(control, select.POLLIN)
        poll.poll()
    finally:
        os.close(process)


def _wait_alone_for(child: int) -> None:
    """Wait until ``child`` has ended; whoever looks after this process kills it at another end."""
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


def reap(child: int) -> tuple[int, bool]:
    """Wait for every process that is left; return ``child``'s wait status, and of bad calls."""
    found, bad_call = 0, False
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return found, bad_call
        if pid == child:
            found = status
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
            bad_call = True


def _cpu_seconds() -> float:
    """Return what all processes that were waited for have used, and those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
