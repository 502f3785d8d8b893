"""Ends what is left of a run's own Ray once the run is over, however that came to be.

Started as ``python -m headrace.runtime.ray.reaper FOLDER``, in a session of its own, with a pipe
that closes with the run. Ray's own processes end by themselves when the run is killed, but for two
that try for a minute to tell the head of it, which is gone; and the folder stays.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_END_SECONDS = 10.0
"""For Ray's processes to end by themselves; those that have not are killed."""
_REAP_SECONDS = 30.0
"""For the reaper, once the run is over."""
_POLL_SECONDS = 0.1


@contextmanager
def reaped(folder: Path) -> Iterator[None]:
    """Have all that holds files in ``folder`` gone behind the block, and the folder with it."""
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    with subprocess.Popen(  # noqa: S603 - this program's own module
        command, stdin=subprocess.PIPE, start_new_session=True
    ) as reaper:
        assert reaper.stdin is not None
        try:
            yield
        finally:
            reaper.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                reaper.wait(_REAP_SECONDS)


def main(folder: Path) -> None:
    """Waits for the end of the run; unblocked by its closing of the pipe, or by its death."""
    run = os.getppid()  # it has logs of Ray's open, and is not ours to end
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _END_SECONDS
    while holders(folder, run) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for pid in holders(folder, run):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def holders(folder: Path, run: int) -> list[int]:
    """Return the processes of this user, but for ``run``, that have a file in ``folder`` open."""
    processes = [path for path in Path("/proc").glob("[0-9]*") if int(path.name) != run]
    return [int(path.name) for path in processes if _holds(path, folder)]


def _holds(process: Path, folder: Path) -> bool:
    with suppress(OSError):  # it ended meanwhile, or is another user's
        return any(
            descriptor.readlink().is_relative_to(folder)
            for descriptor in (process / "fd").iterdir()
        )
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
