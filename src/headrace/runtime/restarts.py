"""A run whose process may be killed: the process that started it starts another one, which resumes.

    begin     forks; the child returns and becomes the run, the parent waits for its end
    the wait  unblocked by that end alone; signals are passed on and do not end it

Owns: only a process that a signal has killed unasked is followed by another, and only so many times
in a row without a new checkpoint between; before the next one begins, nothing of the last one is
left running; the process of the run ends with its parent. Imports nothing that starts a thread,
since it forks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from headrace.child import adopt_orphans, end_with

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 1.0, 30.0
_LEFT_SECONDS = 15.0
"""For what a killed process leaves behind to end by itself, then again once it is killed."""
_TICK_SECONDS = 0.05
_KILLED = 128
"""A shell's exit status of a command that a signal has ended, less its number."""


def begin(directory: Path, *, restarts: int) -> bool:
    """Return, in a process of its own, whether another one of the run in ``directory`` was killed.

    The process that called stays behind and never returns: it exits as the run does. For the main
    thread of a process that has no other.
    """
    adopt_orphans()
    waiting = _Waiting()
    num_killed, step, is_restart = 0, _last_step(directory), False
    while True:
        killed_by = waiting.for_a_child()
        if killed_by is None:
            return is_restart
        _end_what_is_left()
        before, step = step, _last_step(directory)
        num_killed = 1 if step > before else num_killed + 1
        how = f"the process of the run was killed by {killed_by.name}"
        if num_killed > restarts:
            _say(
                f"error: {how}, {num_killed} times in a row without a new checkpoint, and "
                f"--restarts = {restarts}; look at {directory} and go on with --resume"
            )
            sys.exit(1)
        seconds = min(_FIRST_BACKOFF_SECONDS * 2.0 ** (num_killed - 1), _MAX_BACKOFF_SECONDS)
        _say(f"{how}; restart {num_killed} of {restarts} in {seconds:g} s")
        waiting.sleep(seconds)
        is_restart = True


class _Waiting:
    """The parent's side: one child at a time, and what the parent was asked to pass on."""

    def __init__(self) -> None:
        self._child: int | None = None
        self._asked: int | None = None
        """The last signal that asked to stop."""
        self._handlers = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}

    def for_a_child(self) -> signal.Signals | None:
        """Fork. Return None in the child; in the parent what killed it, unless the run has ended.

        Then the parent exits with the same status.
        """
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._become_the_run(parent)
            return None
        self._child = child
        if self._asked is not None:  # while it was forked
            os.kill(child, self._asked)
        _, status = os.waitpid(child, 0)
        self._child = None
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            sys.exit(code)
        if self._asked is not None:
            sys.exit(_KILLED - code)
        return signal.Signals(-code)

    def sleep(self, seconds: float) -> None:
        """Wait for a clock; a signal that asks to stop ends the parent instead."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
            if self._asked is not None:
                sys.exit(_KILLED + self._asked)

    def _become_the_run(self, parent: int) -> None:
        end_with(parent)
        # Of its own group: Ctrl-C reaches the parent alone, which passes it on once.
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)


def _end_what_is_left() -> None:
    """Wait until every process of the last run has ended; kill what does not end by itself.

    They have become this process's children, and whose parent is killed becomes one too.
    """
    if not _all_ended(kill=False) and not _all_ended(kill=True):
        left = ", ".join(map(str, _children()))
        _say(f"error: processes {left} of the run do not end, though they were killed; end them")
        sys.exit(1)


def _all_ended(*, kill: bool) -> bool:
    """Reap children until there are none; False where there still are after `_LEFT_SECONDS`."""
    deadline = time.monotonic() + _LEFT_SECONDS
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            if kill:
                for child in _children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
            time.sleep(_TICK_SECONDS)
    return False


def _children() -> list[int]:
    """Return this process's children; none where the kernel does not list them."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()] if path.is_file() else []


def _last_step(directory: Path) -> int:
    """Return the step of the newest checkpoint; -1 without one."""
    names = (path.name.removeprefix("step-") for path in directory.glob("checkpoints/step-*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
