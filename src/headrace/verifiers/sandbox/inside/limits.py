"""What one process of a program may use, and the rights it has left: none.

Owns: limits are set on both sides, soft and hard, so a program cannot raise them; time alone has
its hard limit a second later, for programs that handle the warning.
"""

from __future__ import annotations

import math
import os
import resource
import signal

from headrace.verifiers.sandbox.inside import kernel
from headrace.verifiers.sandbox.inside.protocol import Terms

STACK_BYTES = 64 << 20
"""Of the first thread: deep recursion is common in honest programs."""
_NUM_FILES = 256
_NUM_SIGNALS = 128


def limit(terms: Terms, other_processes: int) -> None:
    """Limit this process and what comes of it.

    ``other_processes``: those of this user that are no part of the job and count all the same.
    """
    seconds = max(1, math.ceil(terms.cpu_seconds))
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: _both(terms.file_bytes),
        resource.RLIMIT_NPROC: _both(terms.num_processes + other_processes),
        resource.RLIMIT_NOFILE: _both(_NUM_FILES),
        resource.RLIMIT_SIGPENDING: _both(_NUM_SIGNALS),
        resource.RLIMIT_DATA: _both(terms.data_bytes),
        resource.RLIMIT_CORE: _both(0),
        resource.RLIMIT_MEMLOCK: _both(0),
        resource.RLIMIT_MSGQUEUE: _both(0),
        resource.RLIMIT_RTPRIO: _both(0),
        resource.RLIMIT_NICE: _both(0),
    }
    if terms.address_space:
        limits[resource.RLIMIT_AS] = _both(terms.address_space)
    for what, (soft, hard) in limits.items():
        _, most = resource.getrlimit(what)
        if most == resource.RLIM_INFINITY:
            resource.setrlimit(what, (soft, hard))
        else:
            resource.setrlimit(what, (min(soft, most), min(hard, most)))


def raise_stack() -> None:
    """Let the first thread's stack grow: before any job, since later ones inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    most = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (most, hard))


def become(user: int) -> None:
    """Become ``user`` for good, in no group, without a capability. Raises OSError."""
    if os.getuid() != user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()


def default_signals() -> None:
    """Undo what this interpreter set for itself, as a program that starts would find it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _both(value: int) -> tuple[int, int]:
    return value, value
