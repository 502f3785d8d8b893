"""What a job's process puts itself into, made ready before it is forked, and where it works.

Owns: the order in which each step still can be done, and that a cage is for an empty directory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.verifiers.sandbox.inside import kernel, landlock, limits, protocol, seccomp
from headrace.verifiers.sandbox.inside.box import Box, Place
from headrace.verifiers.sandbox.inside.descriptors import moved
from headrace.verifiers.sandbox.inside.kernel import Call
from headrace.verifiers.sandbox.inside.protocol import Terms


@dataclass(frozen=True)
class Cage:
    """The calls that shut a process in; the second ones are allowed to who has made the first."""

    inherited: list[Call]
    """What a process has too where the one that forked it has made them: Landlock, identity and
    capabilities, limits, directory, seccomp."""
    own: list[Call]
    """What each job's process needs for itself: a session, no descriptor of another's, its time,
    and what Python does at an interrupt, which who forks it must not do."""


class Cages:
    """Makes them, the same one again while nothing changes."""

    def __init__(
        self, box: Box, user: int, other_processes: int, readable: Sequence[str] | None
    ) -> None:
        """``readable``: what programs may read, and run where they may run any; None: no wall.

        ``other_processes``: those of ``user`` that are no part of a job, which limits count.
        """
        self._box = box
        self._user = user
        self._other_processes = other_processes
        self._readable = readable
        self._filters = {
            may_execute: seccomp.program(may_execute=may_execute) for may_execute in (False, True)
        }
        self._at_interrupt = kernel.signal_action(signal.SIGINT)
        self._ruleset: int | None = None
        self._made: tuple[Terms, Place, Cage] | None = None

    def prepare(self, terms: Terms) -> Cage:
        """Have an empty directory and return the cage of ``terms`` in it. Raises OSError."""
        place = self._box.renew(terms.disk_bytes, may_execute=terms.may_execute_own)
        if self._made is not None and self._made[:2] == (terms, place):
            return self._made[2]
        os.environ["HOME"] = os.environ["TMPDIR"] = place.path
        cage = Cage(
            inherited=self._inherited(terms, place),
            own=[
                kernel.prepared("setsid"),
                kernel.close_all_from(protocol.NUM_DESCRIPTORS),
                *limits.applied(limits.of_time(terms)),
                kernel.set_signal_action(signal.SIGINT, self._at_interrupt),
            ],
        )
        self._made = (terms, place, cage)
        return cage

    def is_untouched(self) -> bool:
        """Whether the directory is as `prepare` left it."""
        return self._box.is_untouched()

    def _inherited(self, terms: Terms, place: Place) -> list[Call]:
        limited = limits.applied(limits.of_size(terms, self._other_processes))
        into = kernel.prepared("chdir", place.path.encode())
        if self._readable is None:
            return [*limited, into]
        # The last one's is known to the cages made of it alone, which are not used any more.
        if self._ruleset is not None:
            os.close(self._ruleset)
            self._ruleset = None
        self._ruleset = moved(landlock.ruleset(_rights(self._readable, place.path, terms)))
        return [
            landlock.restrict(self._ruleset),
            *limits.become(self._user),
            *limited,
            into,
            seccomp.install(self._filters[terms.may_execute]),
        ]


def _rights(readable: Sequence[str], folder: str, terms: Terms) -> list[tuple[str, int]]:
    execute = landlock.EXECUTE if terms.may_execute else 0
    own = landlock.EXECUTE if terms.may_execute_own else 0
    return [
        *((path, landlock.READ | execute) for path in readable),
        ("/dev/null", landlock.READ | landlock.WRITE_FILE),
        (folder, landlock.WRITE | own),
    ]
