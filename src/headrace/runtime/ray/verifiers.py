"""Verifiers on every machine of a cluster, as actors that any of the run's groups may go to.

Owns: a group is scored once more elsewhere when the machine that has it dies, falls silent or says
that its own scoring is broken; no group waits without a deadline. A group stays whole: what its
rollouts are paid is decided in one place, by the verifier that a run without Ray has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.config import VerifierConfig
from headrace.errors import HeadraceError, VerifierFailure
from headrace.runtime.ray.calls import answer_of, one_line, start_actor
from headrace.runtime.ray.cluster import Cluster
from headrace.types import RolloutGroup, Verdict
from headrace.verifiers import build_verifier

_LOG = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
"""A machine that has a group this long without an answer is asked whether it is still there."""
SILENCE_SECONDS = 10.0
"""Longest wait for its word that it is."""
REST_SECONDS = 2.0
"""Rest of a machine that failed; doubled by each further failure up to `LONGEST_REST`."""
LONGEST_REST = 60.0
PATIENCE_SECONDS = 300.0
"""A run in which no machine has scored a group for so long ends."""
_MAX_RESTARTS = 3
"""Times that Ray starts the actor of a machine again."""
_CLOSE_SECONDS = 10.0


@ray.remote(num_cpus=0, max_restarts=_MAX_RESTARTS, max_task_retries=0)
class VerifierActor:
    """One machine's verifier."""

    def __init__(self, config: VerifierConfig, window: int) -> None:
        self._verifier = build_verifier(config, window=window)

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """See `Verifier`."""
        return await self._verifier.score(group)

    async def metrics(self) -> Mapping[str, float]:
        """See `Verifier`; also the sign of life."""
        return dict(self._verifier.metrics())

    async def close(self) -> None:
        """See `Verifier`."""
        await self._verifier.close()


class _LostError(Exception):
    """A machine did not score what it was given."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Place:
    """One machine's verifier, as the run sees it."""

    host: str
    actor: Any
    num_open: int = 0
    """Groups that it has."""
    num_failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    """By this process's monotonic clock."""
    asked: list[Any] = field(default_factory=list)
    """For its metrics; not answered yet."""

    def fail(self) -> None:
        """Leave it alone for a while."""
        rest = min(REST_SECONDS * 2**self.num_failures, LONGEST_REST)
        self.num_failures += 1
        self.rests_until = time.monotonic() + rest


class ClusterVerifier:
    """The Verifier role in front of one actor on each machine."""

    def __init__(self, config: VerifierConfig, cluster: Cluster, *, window: int) -> None:
        """``window``: as of `build_verifier`; each machine has its share of it."""
        share = max(1, window // len(cluster.nodes))
        self._places = [
            _Place(
                host=node.host,
                actor=start_actor(
                    *(VerifierActor, config, share),
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
                ),
            )
            for node in cluster.nodes
        ]
        self._num_moved = 0

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """See `Verifier`. Waits for a machine; unblocked by one's answer or by the deadline."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            place = await self._free_place()
            place.num_open += 1
            try:
                verdicts = await self._ask(place, group)
            except _LostError as error:
                place.fail()
                self._num_moved += 1
                _LOG.warning("group %s is scored elsewhere: %s", group.group_id, error)
                if time.monotonic() > deadline:
                    msg = f"no machine scored group {group.group_id}; the last: {error}"
                    raise VerifierFailure(msg) from error
            else:
                place.num_failures = 0
                return verdicts
            finally:
                place.num_open -= 1

    async def _free_place(self) -> _Place:
        """Return the least loaded machine that does not rest, else the first that will not."""
        now = time.monotonic()
        awake = [place for place in self._places if place.rests_until <= now]
        if awake:
            return min(awake, key=lambda place: place.num_open)
        first = min(self._places, key=lambda place: place.rests_until)
        await asyncio.sleep(first.rests_until - now)
        return first

    async def _ask(self, place: _Place, group: RolloutGroup) -> tuple[Verdict, ...]:
        """Waits for verdicts; unblocked by them, by the actor's death, or by its silence.

        Raises _LostError.
        """
        ref = place.actor.score.remote(group)
        answer: asyncio.Future[Any] = asyncio.ensure_future(answer_of(ref))
        try:
            while not (await asyncio.wait({answer}, timeout=BEAT_SECONDS))[0]:
                await self._require_life(place)
            verdicts: tuple[Verdict, ...] = answer.result()
        except RayError as error:
            said = error.cause if isinstance(error, RayTaskError) else error
            msg = f"{place.host}: {one_line(said if isinstance(said, HeadraceError) else error)}"
            raise _LostError(msg) from error
        finally:
            if not answer.done():
                answer.cancel()
                ray.cancel(ref)
        return verdicts

    async def _require_life(self, place: _Place) -> None:
        try:
            beat = place.actor.metrics.remote()
            await asyncio.wait_for(answer_of(beat), SILENCE_SECONDS)
        except (RayError, TimeoutError) as error:
            msg = f"{place.host}: no sign of life within {SILENCE_SECONDS:g} s"
            raise _LostError(msg) from error

    def metrics(self) -> Mapping[str, float]:
        """Return what the machines said since the last call of the time before it.

        Counts are added up; of everything else the largest is told, which is the worst machine's.
        """
        found: dict[str, float] = {"verifier/cluster/num_moved_groups": float(self._num_moved)}
        for place in self._places:
            for said in self._said(place):
                for name, value in said.items():
                    counts = "/num_" in name
                    found[name] = (
                        found.get(name, 0.0) + value
                        if counts
                        else max(found.get(name, value), value)
                    )
            place.asked.append(place.actor.metrics.remote())
        return found

    def _said(self, place: _Place) -> Sequence[Mapping[str, float]]:
        """Return the answers that have come, and forget those that will not."""
        if not place.asked:
            return ()
        done, waiting = ray.wait(place.asked, num_returns=len(place.asked), timeout=0)
        place.asked = waiting[-1:]
        said = []
        for ref in done:
            with contextlib.suppress(RayError):
                said.append(ray.get(ref))
        return said

    async def close(self) -> None:
        """See `Verifier`. Waits for what they started to end; unblocked by that or a deadline."""
        closing = [answer_of(place.actor.close.remote()) for place in self._places]
        # Of those whose machine is gone nothing is left to end.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), _CLOSE_SECONDS)
        for place in self._places:
            with contextlib.suppress(RayError, ValueError):
                await asyncio.to_thread(ray.kill, place.actor)
        self._places = []
