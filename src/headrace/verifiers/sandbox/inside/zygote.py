"""The process that is warmed: it sets up a tier, loads what programs import, and has jobs served.

Started as ``python -c "... zygote.start(DESCRIPTOR, FOLDER)"``. Its jobs come over the socket whose
descriptor it is given; `forker` serves them. Owns: when the socket closes, for whatever reason, it
kills, cleans up and ends; so it never outlives the supervisor. It never sees a job's content.
Interprets nothing: how an end is called is decided outside.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import site
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.verifiers.sandbox.inside import (
    descriptors,
    kernel,
    landlock,
    limits,
    namespaces,
    program,
    protocol,
)
from headrace.verifiers.sandbox.inside.box import FolderBox, TmpfsBox
from headrace.verifiers.sandbox.inside.cage import Cages
from headrace.verifiers.sandbox.inside.forker import CagedForkers, Forker
from headrace.verifiers.sandbox.inside.removal import empty

_SELF = 1
"""Processes of the user that a limit on their number counts beside the job's: who forks them."""

_FIRST_USER = 0x70000000
"""From here on numbers of users are given to nobody by any system's conventions."""

Settings = Mapping[str, Any]


def main(descriptor: int) -> None:
    """Set up the tier that the first message asks for, then serve jobs until the socket closes."""
    control = descriptors.keep_high(descriptor)
    first = control.recv(protocol.MAX_MESSAGE)
    if not first:
        return
    settings: Settings = json.loads(first)
    try:
        forker = _SET_UP[settings["tier"]](settings)
        for name in settings["preload"]:
            importlib.import_module(name)
        _settle()
        control.send(protocol.READY)
        forker.serve(control)
    # The one boundary: whatever it is, the supervisor must be told, and this process must end.
    except BaseException as error:  # noqa: BLE001 - see above
        with contextlib.suppress(OSError):
            control.send(protocol.FAILED + f"{type(error).__name__}: {error}".encode()[:4000])


def _set_up_cell(settings: Settings) -> Forker | CagedForkers:
    """Make the namespaces. With one user alone, this process waits, and process 1 goes on."""
    if landlock.version() == 0:
        msg = "this kernel has no Landlock"
        raise OSError(msg)
    user = namespaces.leave()
    is_outsider = user != os.geteuid()
    if not is_outsider:
        _go_on_as_process_one()
    namespaces.build_root([*_interpreter(), *settings["shown"]])
    socket.sethostname("cell")
    _become_unreachable()
    cages = Cages(TmpfsBox(namespaces.HOME, user), user, _SELF, ["/"])
    return CagedForkers(cages, _kill_namespace) if is_outsider else Forker(cages, _kill_namespace)


def _go_on_as_process_one() -> None:
    child = kernel.fork_first()
    if child:
        # From here on the socket is process 1's alone, so that its end is seen.
        kernel.make([kernel.close_all_from(3)])
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _set_up_bubblewrap(settings: Settings) -> Forker:
    """Bubblewrap made the namespaces, and this is process 1 in them; one job and it ends."""
    user = os.getuid()
    _become_unreachable()
    cages = Cages(FolderBox(settings["folder"], user), user, _SELF, ["/"])
    return Forker(cages, _kill_namespace)


def _set_up_lock(settings: Settings) -> Forker:
    """Keep to the host's namespaces; a Landlock domain of its own says whom a signal reaches."""
    if landlock.version() < landlock.SCOPE_VERSION:
        msg = (
            f"Landlock {landlock.SCOPE_VERSION} (Linux 6.12) is needed to keep signals inside; "
            f"this kernel has {landlock.version()}"
        )
        raise OSError(msg)
    user = _user_of_its_own() if os.geteuid() == 0 else os.geteuid()
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
    readable = [*_interpreter(), *settings["shown"], *namespaces.SYSTEM]
    cages = Cages(FolderBox(settings["folder"], user), user, others, readable)
    return Forker(cages, _kill_reachable)


def _user_of_its_own() -> int:
    """Return a user that nobody else is while this process lives.

    The kernel limits the processes of a user, wherever they are: those of a neighbour would count.
    """
    user = _FIRST_USER + os.getpid()
    return user if namespaces.has_user(user) else namespaces.NOBODY


def _set_up_none(settings: Settings) -> Forker:
    """No wall at all."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    user = os.getuid()
    cages = Cages(FolderBox(settings["folder"], user), user, _num_processes_of(user), None)
    return Forker(cages, _kill_descendants)


_SET_UP: Mapping[str, Callable[[Settings], Forker | CagedForkers]] = {
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
    # The kernel drops a program's signal to process 1 unless that does something at it.
    kernel.make([kernel.set_signal_action(signal.SIGINT, kernel.DEFAULT_ACTION)])
    # Without the packages of the environment Python leaves these out; programs end by exit().
    site.setquit()
    site.sethelper()
    # The same numbers for every program: a verdict does not depend on the cell or its age.
    random.seed(0)
    program.prepare()
    # From now on the lowest numbers are free for what comes with a job.
    descriptors.free_those_of_jobs()
    gc.collect()
    gc.freeze()


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
