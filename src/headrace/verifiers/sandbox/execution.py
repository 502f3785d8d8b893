"""What is run in isolation, what came of it, and who runs it.

An execution is of one program with one input. It knows nothing of expected answers: whoever asked
compares, outside. Nothing that the program says about itself is in an `Execution`: how it ended is
the kernel's word, and what it wrote or returned is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Tier(StrEnum):
    """How well what ran was isolated, the strongest first; probed by doing, on every verdict."""

    CELL = "cell"
    """Own namespaces, Landlock, seccomp, rlimits, and a cgroup where one can be written."""
    BUBBLEWRAP = "bubblewrap"
    """bubblewrap's namespaces, with our seccomp and rlimits."""
    LOCK = "lock"
    """Landlock, seccomp, rlimits and a directory of its own; no namespaces."""
    NONE = "none"
    """No isolation; only where the recipe says ``allow_unsafe``."""


class Ending(StrEnum):
    """How an execution ended, as the kernel and the supervisor saw it."""

    EXITED = "exited"
    """By itself; see `Execution.exit_status`."""
    SIGNALED = "signaled"
    """By a signal that it was not the sandbox that sent; see `Execution.signal`."""
    TIMEOUT_CPU = "timeout_cpu"
    TIMEOUT_WALL = "timeout_wall"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    VIOLATION = "violation"
    """It did what the policy kills for."""
    INFRA = "infra"
    """Our own failure; says nothing of the program. ``detail`` says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one execution may use."""

    cpu_seconds: float = 4.0
    """Of all its processes together. A timeout is judged by this."""
    wall_seconds: float = 12.0
    """From dispatch, a looser guard against sleeping."""
    memory_mib: int = 512
    output_bytes: int = 1 << 20
    """Of standard output, of standard error, and of a returned value, each."""
    num_processes: int = 16
    disk_mib: int = 64
    """Files it may write, all below its own directory, which is its working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCall:
    """Call a function that a Python program defines, and bring back what it returns."""

    function: str
    """A name, or ``Class.method``: then the class is instantiated without arguments."""
    arguments: bytes
    """Canonical encoding (`canonical`) of the list of positional arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program and one input."""

    job_id: str
    """Idempotent: the same id is the same work, whoever asks again."""
    language: str = "python"
    """``python`` is served by the warmed interpreter; others by a command, see the config."""
    source: str
    stdin: bytes = b""
    call: PythonCall | None = None
    """Python only; without it the program runs as ``__main__``."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Put into its working directory before it starts: plain names, no folders."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What became of a job."""

    job_id: str
    tier: Tier
    ending: Ending
    exit_status: int | None = None
    """With EXITED."""
    signal: int | None = None
    """With SIGNALED."""
    stdout: bytes = b""
    """At most ``output_bytes``, cut where it was longer."""
    stderr: bytes = b""
    returned: bytes | None = None
    """Canonical encoding of what the call returned; None unless it returned. It is the program's
    own word: decode it with `canonical`, with its caps."""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    detail: str = ""
    """One line for people."""

    @property
    def is_clean(self) -> bool:
        """Whether it ended by itself with status 0. Worth nothing as a verdict on its own."""
        return self.ending is Ending.EXITED and self.exit_status == 0


class Executor(Protocol):
    """Runs jobs in isolation; many calls may wait side by side."""

    async def run(self, job: Job) -> Execution:
        """Return what became of ``job``; never raises for what the program does.

        A failure of the sandbox's own is INFRA, after its own retries. Cancelling the call frees
        its slot and ends the program.
        """
        ...

    async def close(self) -> None:
        """End every process it started and remove what it wrote. Idempotent."""
        ...
