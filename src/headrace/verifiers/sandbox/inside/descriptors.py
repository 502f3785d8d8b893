"""Where the process that forks keeps what is its own: above the numbers that a job's are given."""

from __future__ import annotations

import fcntl
import os
import socket

from headrace.verifiers.sandbox.inside import protocol

_FIRST_FREE = 10
"""Descriptors below this are a job's alone."""


def keep_high(descriptor: int) -> socket.socket:
    """Return the socket at a descriptor above those of a job; all below lead nowhere for now."""
    control = socket.socket(fileno=moved(descriptor))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(_FIRST_FREE):
        if number != null:
            os.dup2(null, number)
    if null >= _FIRST_FREE:
        os.close(null)
    return control


def moved(descriptor: int) -> int:
    """Return another descriptor of the same, above those of a job, in place of this one."""
    found = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(descriptor)
    return found


def free_those_of_jobs() -> None:
    """Close what a job's process has of its own."""
    os.closerange(0, protocol.NUM_DESCRIPTORS)
