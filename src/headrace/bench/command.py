"""Running the product as its users do: a process of its own, watched to its end.

Owns: a process never outlives the call that started it, and one that fails is an error with its
last lines. Does not read what the process left behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from headrace.bench.result import Progress
from headrace.errors import ConfigError, RunError

LIMIT_SECONDS = 3600.0
"""A measurement that takes longer hangs."""

_TICK_SECONDS = 0.02
_TAIL_LINES = 15
_USER_ERROR = 2


def run_headrace(
    arguments: Sequence[str],
    *,
    progress: Progress,
    on_tick: Callable[[int], None] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> float:
    """Run ``headrace ARGUMENTS`` and return its seconds; see `run_module`."""
    return run_module(
        "headrace", arguments, progress=progress, on_tick=on_tick, limit_seconds=limit_seconds
    )


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    progress: Progress,
    on_tick: Callable[[int], None] | None = None,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    python: str = sys.executable,
) -> float:
    """Run ``python -m MODULE ARGUMENTS`` to its end and return the seconds from start to exit.

    Each line it prints goes to ``progress``. ``on_tick`` gets its process id about 50 times a
    second, on a thread of its own. Waits for the end of its output; unblocked by its exit, or by
    killing it after ``limit_seconds``. Raises ConfigError when it says that the user can fix it,
    RunError with its last lines when it fails in any other way.
    """
    command = [python, "-m", module, *arguments]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    began = time.monotonic()
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | dict(environment or {}),
    ) as process:
        try:
            with _watched(process, on_tick, began + limit_seconds):
                _pass_on(process, progress, tail)
                status = process.wait()
        finally:
            process.kill()
    seconds = time.monotonic() - began
    if status != 0:
        raise _failure(" ".join([module, *arguments]), status, seconds, limit_seconds, tail)
    return seconds


def _pass_on(process: subprocess.Popen[str], progress: Progress, tail: deque[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        tail.append(line.rstrip())
        progress(line.rstrip())


@contextlib.contextmanager
def _watched(
    process: subprocess.Popen[str], on_tick: Callable[[int], None] | None, deadline: float
) -> Iterator[None]:
    """Tick until the block ends, and kill the process at ``deadline``."""
    done = threading.Event()

    def watch() -> None:
        """Waits for the next tick; ended by ``done``, or by the deadline."""
        while not done.wait(_TICK_SECONDS):
            if on_tick is not None:
                on_tick(process.pid)
            if time.monotonic() > deadline:
                process.kill()
                return

    thread = threading.Thread(target=watch, name="bench-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _failure(
    command: str, status: int, seconds: float, limit_seconds: float, tail: deque[str]
) -> ConfigError | RunError:
    if status == _USER_ERROR:
        problems = [line.removeprefix("error: ") for line in tail if line.startswith("error: ")]
        return ConfigError(*(problems or tail))
    how = f"ended with status {status}"
    if seconds > limit_seconds:
        how = f"was killed after {limit_seconds:.0f} s"
    return RunError("\n".join([f"`{command}` {how}; its last lines:", *tail]))
