"""The process that forks: process 1 of a cell, or in the lock tier the one all orphans come to.

Started as ``python -c "... zygote.start(DESCRIPTOR, FOLDER)"``. Waits for a job on the socket whose
descriptor it is given, forks for it, waits for that process, kills whatever is left, and says how
it ended. Owns: when it answers, no process of the job is alive, and when the socket closes, for
whatever reason, it kills, cleans up and ends; so it never outlives the supervisor. It never sees a
job's content. Interprets nothing: how an end is called is decided outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import site
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.verifiers.sandbox.inside import (
    kernel,
    landlock,
    limits,
    namespaces,
    program,
    protocol,
    seccomp,
)
from headrace.verifiers.sandbox.inside.box import Box, FolderBox, Place, TmpfsBox
from headrace.verifiers.sandbox.inside.kernel import Call
from headrace.verifiers.sandbox.inside.program import Cage
from headrace.verifiers.sandbox.inside.protocol import Done, Terms
from headrace.verifiers.sandbox.inside.removal import empty

_FIRST_FREE = 10
"""Descriptors below this are a job's alone."""
_SELF = 1
"""Processes of the user that a limit on their number counts beside the job's: this one."""

Settings = Mapping[str, Any]


def main(descriptor: int) -> None:
    """Set up the tier that the first message asks for, then serve jobs until the socket closes."""
    control = _keep_high(descriptor)
    first = control.recv(protocol.MAX_MESSAGE)
    if not first:
        return
    settings: Settings = json.loads(first)
    try:
        zygote = _SET_UP[settings["tier"]](settings)
        for name in settings["preload"]:
            importlib.import_module(name)
        zygote.serve(control)
    # The one boundary: whatever it is, the supervisor must be told, and this process must end.
    except BaseException as error:  # noqa: BLE001 - see above
        with contextlib.suppress(OSError):
            control.send(protocol.FAILED + f"{type(error).__name__}: {error}".encode()[:4000])


class Zygote:
    """Forks for one job at a time."""

    def __init__(
        self,
        box: Box,
        kill_all: Callable[[], None],
        user: int,
        other_processes: int,
        *,
        caged: bool,
    ) -> None:
        self._box = box
        self._kill_all = kill_all
        self._user = user
        self._other_processes = other_processes
        self._caged = caged
        self._filters = {
            may_execute: seccomp.program(may_execute=may_execute) for may_execute in (False, True)
        }
        self._readable: list[str] = []
        self._prepared: tuple[Terms, Place] | None = None
        self._ruleset: int | None = None
        self._steps: list[Call] = []

    def allow(self, readable: list[str]) -> None:
        """Let programs read, and run where they may run any, what lies below these paths."""
        self._readable = readable

    def serve(self, control: socket.socket) -> None:
        """Serve jobs. Waits for the next; unblocked by the supervisor, or by its end."""
        _settle()
        control.send(protocol.READY)
        used = _cpu_seconds()
        while True:
            message, _, _, _ = socket.recv_fds(
                control, protocol.MAX_MESSAGE, protocol.NUM_DESCRIPTORS
            )
            if not message:
                break
            terms = Terms.unpack(message)
            if self._prepared is None or self._prepared[0] != terms:
                self._prepare(terms)
            child = kernel.fork()
            if child == 0:
                program.become(self._steps)
            os.closerange(0, protocol.NUM_DESCRIPTORS)
            _wait_for(child, control)
            self._kill_all()
            status, bad_call = _reap(child)
            total = _cpu_seconds()
            done = Done(status, total - used, total, bad_call)
            used = total
            try:
                control.send(done.pack())
            except OSError:
                break
            # Most jobs are like the one before; while the supervisor reads what came of it.
            self._prepare(terms)
        self._kill_all()
        _reap(0)

    def _prepare(self, terms: Terms) -> None:
        """Have an empty directory, and what a process on ``terms`` does before its program."""
        place = self._box.renew(terms.disk_bytes, may_execute=terms.may_execute_own)
        if self._prepared == (terms, place):
            return
        self._prepared = None
        if self._ruleset is not None:
            os.close(self._ruleset)
            self._ruleset = None
        if self._caged:
            self._ruleset = _moved(landlock.ruleset(self._rights(place.path, terms)))
        cage = Cage(
            user=self._user,
            limits=limits.limits_of(terms, self._other_processes),
            ruleset=self._ruleset,
            filter_program=self._filters[terms.may_execute] if self._caged else None,
            folder=place.path,
        )
        self._steps = cage.steps()
        os.environ["HOME"] = os.environ["TMPDIR"] = place.path
        self._prepared = (terms, place)

    def _rights(self, folder: str, terms: Terms) -> list[tuple[str, int]]:
        execute = landlock.EXECUTE if terms.may_execute else 0
        own = landlock.EXECUTE if terms.may_execute_own else 0
        return [
            *((path, landlock.READ | execute) for path in self._readable),
            ("/dev/null", landlock.READ | landlock.WRITE_FILE),
            (folder, landlock.WRITE | own),
        ]


def _set_up_cell(settings: Settings) -> Zygote:
    """Make the namespaces; the process that made them waits, and process 1 goes on."""
    if landlock.version() == 0:
        msg = "this kernel has no Landlock"
        raise OSError(msg)
    user = namespaces.leave()
    child = os.fork()
    if child:
        # From here on the socket is process 1's alone, so that its end is seen.
        kernel.make([kernel.close_all_from(3)])
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    namespaces.build_root([*_interpreter(), *settings["shown"]])
    socket.sethostname("cell")
    _become_unreachable()
    others = _SELF if user == os.geteuid() else 0
    zygote = Zygote(TmpfsBox(namespaces.HOME, user), _kill_namespace, user, others, caged=True)
    zygote.allow(["/"])
    return zygote


def _set_up_bubblewrap(settings: Settings) -> Zygote:
    """Bubblewrap made the namespaces, and this is process 1 in them; one job and it ends."""
    user = os.getuid()
    _become_unreachable()
    box = FolderBox(settings["folder"], user)
    zygote = Zygote(box, _kill_namespace, user, _SELF, caged=True)
    zygote.allow(["/"])
    return zygote


def _set_up_lock(settings: Settings) -> Zygote:
    """Keep to the host's namespaces; a Landlock domain of its own says whom a signal reaches."""
    if landlock.version() < landlock.SCOPE_VERSION:
        msg = (
            f"Landlock {landlock.SCOPE_VERSION} (Linux 6.12) is needed to keep signals inside; "
            f"this kernel has {landlock.version()}"
        )
        raise OSError(msg)
    user = namespaces.NOBODY if os.geteuid() == 0 else os.geteuid()
    others = _num_processes_of(user)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    _become_unreachable()
    scope = landlock.scope_ruleset()
    kernel.make([landlock.restrict(scope)])
    os.close(scope)
    if _reaches(os.getppid()):
        # Nothing may ever be killed from here: it would be the host's processes.
        msg = "Landlock did not keep signals inside"
        raise OSError(msg)
    box = FolderBox(settings["folder"], user)
    zygote = Zygote(box, _kill_reachable, user, others, caged=True)
    zygote.allow([*_interpreter(), *settings["shown"], *namespaces.SYSTEM])
    return zygote


def _set_up_none(settings: Settings) -> Zygote:
    """No wall at all."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    user = os.getuid()
    box = FolderBox(settings["folder"], user)
    return Zygote(box, _kill_descendants, user, _num_processes_of(user), caged=False)


_SET_UP: Mapping[str, Callable[[Settings], Zygote]] = {
    "cell": _set_up_cell,
    "bubblewrap": _set_up_bubblewrap,
    "lock": _set_up_lock,
    "none": _set_up_none,
}


def _interpreter() -> list[str]:
    """Return what this interpreter loads modules from, which programs import more of."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    found = [sys.base_prefix, sys.base_exec_prefix, *packages]
    return list(dict.fromkeys(os.path.realpath(path) for path in found))


def _become_unreachable() -> None:
    """No process of the same user may look into this one, and none below gains anything by exec."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    try:
        kernel.drop_bounding_set()
    except PermissionError:
        # Without the capability to do so there is nothing to bound either: no_new_privs holds.
        return


def _settle() -> None:
    """Make this process what every job's process begins as."""
    limits.limit_always()
    # Without the packages of the environment Python leaves these out; programs end by exit().
    site.setquit()
    site.sethelper()
    # The same numbers for every program: a verdict does not depend on the cell or its age.
    random.seed(0)
    program.prepare()
    # From now on the lowest numbers are free for what comes with a job.
    os.closerange(0, protocol.NUM_DESCRIPTORS)
    gc.collect()
    gc.freeze()


def _keep_high(descriptor: int) -> socket.socket:
    """Return the socket at a descriptor above those of a job; all below lead nowhere for now."""
    control = socket.socket(fileno=_moved(descriptor))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(_FIRST_FREE):
        if number != null:
            os.dup2(null, number)
    if null >= _FIRST_FREE:
        os.close(null)
    return control


def _moved(descriptor: int) -> int:
    """Return another descriptor of the same, above those of a job, in place of this one."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(descriptor)
    return moved


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


def _reap(child: int) -> tuple[int, bool]:
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


def _kill_namespace() -> None:
    """Kill every process of this namespace but this one, at once."""
    if os.getpid() != 1:
        msg = "not process 1: it would kill the host's"
        raise AssertionError(msg)
    _kill_reachable()


def _kill_reachable() -> None:
    """Kill every process that a signal of this one reaches: its namespace's, or its domain's."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def _kill_descendants() -> None:
    """Kill what the kernel says is below this process, until there is nothing."""
    while children := _children_of(os.getpid()):
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                continue


def _children_of(pid: int) -> list[int]:
    """Return the living children of a process. Those below them come up when these die."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:  # a thread that ended since it was listed
            continue
    return [child for child in found if " Z " not in _stat(child)]


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "


def _reaches(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True


def _num_processes_of(user: int) -> int:
    """Return the threads that ``user`` has now; the kernel's limit counts them too."""
    found = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if place.stat().st_uid == user:
                found += len(list((place / "task").iterdir()))
        except OSError:
            continue
    return found


def start(descriptor: int, folder: str) -> None:
    """Run `main`; then remove what it left in ``folder``, if it had one."""
    # What is loaded is used by reference: a program finds no module of this package.
    for name in [name for name in sys.modules if name.partition(".")[0] == "headrace"]:
        del sys.modules[name]
    try:
        # The kernel's last resort, when memory runs out, is this process and what it forks.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        main(descriptor)
    finally:
        if folder:
            empty(folder)
        # Without the interpreter's teardown: nothing of it can be seen.
        os._exit(0)
