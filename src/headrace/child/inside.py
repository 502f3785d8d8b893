"""What a process does first that was started to answer requests over its pipes.

Owns: nothing that is printed gets into the channel, and the process ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes away from 0 and 1: input becomes empty, and prints go to standard error."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def die_with_parent(requests: BinaryIO) -> None:
    """Ask the kernel for SIGKILL when the parent ends, so that what never returns ends too.

    ``requests`` is the channel from the parent: one that ended before, while this process was still
    importing, has closed it, and this process ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = select.poll()
    channel.register(requests, 0)  # only its end is asked for, which is always told
    if channel.poll(0):
        os._exit(1)


def end_with(parent: int) -> None:
    """Do the same in a fork of ``parent``, which has no channel to it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Ask for what Linux alone knows; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
