"""What it means that a run has more or fewer generators and verifiers while it goes on.

Owns: what is asked in one request happens whole or not at all, and one request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.errors import ConfigError, HeadraceError, RunError
from headrace.generators.pool import GeneratorPool
from headrace.runtime.scaling import Scale
from headrace.runtime.verdict_deadline import DeadlineVerifier
from headrace.verifiers.component import Resizable
from headrace.waves import PausableGenerator

_LOG = logging.getLogger(__name__)

Roles = tuple[PausableGenerator, DeadlineVerifier]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a request asks for, of roles that can do it."""

    pool: GeneratorPool | None
    num_generators: int
    workers: Mapping[str, Resizable]
    num_workers: int


def scaler_of(roles: Callable[[], Roles | None], tell: Callable[[str], None]) -> Scale:
    """Return what scales a run. ``roles``: None while it starts. ``tell`` hears what was done."""
    turn = asyncio.Lock()

    async def scale(wanted: Mapping[str, int]) -> str:
        """Waits for the request before it, and for roles; both have deadlines of their own."""
        async with turn:
            found = roles()
            if found is None:
                msg = "the run is still starting and has no generators yet; try again"
                raise RunError(msg)
            said = await _made(_change(*found, wanted))
        tell(said)
        return said

    return scale


def _change(
    generator: PausableGenerator, verifier: DeadlineVerifier, wanted: Mapping[str, int]
) -> _Change:
    """Return what is to be done. Raises ConfigError where one of the roles cannot do it."""
    pool = None
    if "generators" in wanted:
        if not isinstance(generator, GeneratorPool):
            msg = (
                "generators: the one generator of this run is in the learner's process; start "
                'runs that are to be scaled with placement.generators = "disaggregated"'
            )
            raise ConfigError(msg)
        pool = generator
    return _Change(
        pool=pool,
        num_generators=wanted.get("generators", 0),
        workers=verifier.workers() if "verifiers" in wanted else {},
        num_workers=wanted.get("verifiers", 0),
    )


async def _made(change: _Change) -> str:
    """Make it and say so. Generators first: their start alone can fail, and is then taken back."""
    said = []
    if change.pool is not None:
        wanted, before = change.pool.num_wanted, change.pool.num_members
        try:
            await change.pool.resize(change.num_generators)
        except HeadraceError:
            with contextlib.suppress(HeadraceError):
                await change.pool.resize(wanted)
            raise
        said.append(f"{change.num_generators} generators, where there were {before}")
    counts = {name: one.num_workers for name, one in change.workers.items()}
    await asyncio.gather(*(one.resize(change.num_workers) for one in change.workers.values()))
    if counts:
        were = ", ".join(f"{count} ({name})" for name, count in counts.items())
        said.append(f"{change.num_workers} verifiers, where there were {were}")
    return "; ".join(said)
