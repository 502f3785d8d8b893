"""Where the ranks of a learner run: how one is launched, and how all of them meet.

Everything else about ranks is the same wherever they are. Owns: those of one life meet at a place
that no other life knows, so that one that outlives it, on a machine that was cut off, never joins
later ones.
"""

from __future__ import annotations

import sys
from typing import Protocol

from headrace.child.process import LocalProcess, ProcessLine, launch
from headrace.scratch import ScratchFolder

MODULE = "headrace.learners.parallel.rank"
"""What a rank's process runs."""


class RankLine(ProcessLine, Protocol):
    """A rank's process."""

    async def asked_where(self) -> str:
        """Have it print its stack; return the kernel's letter for what it does, ``?`` for none."""
        ...


class RankHosts(Protocol):
    """The machines of one life of a learner."""

    num_threads: int
    """Of each rank."""
    are_here: bool
    """Whether all ranks are on this machine, and can write into memory of this process."""

    async def launch(self, rank: int) -> RankLine:
        """Start the process of ``rank``; it waits for its first request.

        Raises LearnerFailure where no machine takes it.
        """
        ...

    def meeting(self) -> str:
        """Return where the ranks find each other: ``file:///PATH`` or ``tcp://HOST:PORT``."""
        ...

    def device(self, kind: str, rank: int) -> str:
        """Return the device of type ``kind`` that ``rank`` computes on, by its own numbers."""
        ...

    def close(self) -> None:
        """Have nobody meet here any more. Idempotent."""
        ...


class LocalHosts:
    """This machine, whose ranks talk over its loopback interface."""

    are_here = True

    def __init__(self, *, num_threads: int) -> None:
        """``num_threads``: of each rank."""
        self.num_threads = num_threads
        self._folder = ScratchFolder("ranks")

    async def launch(self, rank: int) -> LocalProcess:
        """See `RankHosts`."""
        del rank
        return await launch(MODULE, {"GLOO_SOCKET_IFNAME": "lo" if _is_linux() else "lo0"})

    def meeting(self) -> str:
        """See `RankHosts`."""
        return f"file://{self._folder.path / 'store'}"

    def device(self, kind: str, rank: int) -> str:
        """See `RankHosts`. Each has a device of its own."""
        return f"{kind}:{rank}" if kind == "cuda" else kind

    def close(self) -> None:
        """See `RankHosts`."""
        self._folder.remove()


def _is_linux() -> bool:
    return sys.platform == "linux"
