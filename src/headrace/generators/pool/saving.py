"""Members tell the pool how far their rollouts have come, so that others can go on with them.

    keep_saving    asks one incarnation every so often; ended by its loss

Owns: nothing of an incarnation that is over is saved, and nothing of a group that the member was
given anew meanwhile; members stand still for it at most `MAX_SHARE` of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.generators.pool.flights import Flight
from headrace.generators.pool.member import Member
from headrace.generators.pool.proxy import GeneratorProxy, MemberLostError, Report
from headrace.generators.pool.roster import Roster
from headrace.generators.pool.saved import MisfitError
from headrace.generators.progress import RolloutPart, packed_bytes
from headrace.types import RolloutGroup

MAX_SHARE = 0.02
"""Of its time that a member may stand still to tell how far it is: beyond it, it is asked less."""


@dataclass(slots=True, kw_only=True)
class SavingCounts:
    """What saving took and gave since somebody asked."""

    num_tokens: int = 0
    num_bytes: int = 0
    num_delivered_bytes: int = 0
    """Of whole groups, packed alike."""
    told_seconds: float = 0.0
    """For which members stood still."""
    taken_seconds: float = 0.0
    """In which this process did nothing else."""
    num_continued: int = 0
    """Tokens of lost members that others went on from."""
    num_dropped: int = 0
    """Those that nobody may go on from under the weights of now."""
    num_fenced: int = 0
    """Reports of incarnations that were over."""


class Saving:
    """Used from one event loop."""

    def __init__(self, roster: Roster, seconds: float) -> None:
        """``seconds``: between two reports of a member; 0 has none made."""
        self._roster = roster
        self._seconds = seconds
        self.newest_version = -1
        """No token has a later one."""
        self.counts = SavingCounts()

    def take_counts(self) -> SavingCounts:
        """Return what was counted since the last call."""
        taken, self.counts = self.counts, SavingCounts()
        return taken

    async def keep_saving(self, member: Member, proxy: GeneratorProxy) -> None:
        """Waits for a clock and for reports; ended by the member's loss, which unblocks both."""
        loss, wait = member.loss, self._seconds
        if loss is None or not wait:
            return
        while member.proxy is proxy:
            await asyncio.wait({loss}, timeout=wait)
            if member.proxy is proxy:
                stood_still = await self._ask(member, proxy)
                wait = max(self._seconds, stood_still / MAX_SHARE)

    async def _ask(self, member: Member, proxy: GeneratorProxy) -> float:
        """Ask for one report and save it; return for how long the member stood still for it."""
        asked = {
            group_id: (flight, flight.num_issues)
            for group_id, flight in _without_twins(member.flights).items()
            if flight.is_wanted
        }
        if not asked:
            return 0.0
        marks = {group_id: flight.saved.marks() for group_id, (flight, _) in asked.items()}
        try:
            report = await proxy.ask("progress", marks)
            return self._save(member, proxy, asked, report)
        except MemberLostError as loss:
            self._roster.fence(member, proxy, str(loss))
        except HeadraceError:
            pass  # the calls that wait for its groups hear of it
        return 0.0

    def _save(
        self,
        member: Member,
        proxy: GeneratorProxy,
        asked: Mapping[str, tuple[Flight, int]],
        report: Report,
    ) -> float:
        """Hold what is new. Raises MemberLostError for what is none of the rollouts asked for."""
        if member.proxy is not proxy or report.incarnation != member.incarnation:
            self.counts.num_fenced += 1
            return 0.0
        began = time.perf_counter()
        for group_id, parts in report.progress.parts.items():
            flight, num_issues = asked.get(group_id, (None, 0))
            if flight is None:
                msg = f"it told how far group {group_id} is, which it was not asked for"
                raise MemberLostError(msg)
            # Come meanwhile, given out anew, or wanted no more: what is told is of before, and even
            # its versions may be of a history that was taken back.
            is_held = flight in member.flights and flight.num_issues == num_issues
            if is_held and flight.is_wanted:
                self._hold(flight, parts)
        self.counts.told_seconds += report.progress.seconds
        self.counts.taken_seconds += time.perf_counter() - began
        return report.progress.seconds

    def _hold(self, flight: Flight, parts: Iterable[RolloutPart]) -> None:
        for part in parts:
            try:
                flight.saved.take(part, self.newest_version)
            except MisfitError as misfit:
                msg = f"it told how far group {flight.group_id} is by {misfit}"
                raise MemberLostError(msg) from misfit
            self.counts.num_tokens += part.num_tokens
            self.counts.num_bytes += part.num_bytes

    def note_delivered(self, group: RolloutGroup) -> None:
        """Count what came whole."""
        self.counts.num_delivered_bytes += sum(map(packed_bytes, group.rollouts))


def saved_metrics(counts: SavingCounts, seconds: float, num_members: int) -> dict[str, float]:
    """Return what saving cost of ``seconds`` in which there were ``num_members``."""
    num_bytes = counts.num_bytes + counts.num_delivered_bytes
    return {
        "generator/saved/num_tokens": float(counts.num_tokens),
        "generator/saved/num_bytes": float(counts.num_bytes),
        "generator/saved/byte_share": counts.num_bytes / num_bytes if num_bytes else 0.0,
        "generator/saved/member_time_share": counts.told_seconds / (seconds * num_members),
        "generator/saved/pool_time_share": counts.taken_seconds / seconds,
    }


def _without_twins(flights: Iterable[Flight]) -> dict[str, Flight]:
    """Return ``flights`` by group id, less those of an id that two calls wait for."""
    found: dict[str, Flight] = {}
    twins: set[str] = set()
    for flight in flights:
        if flight.group_id in found:
            twins.add(flight.group_id)
        found[flight.group_id] = flight
    return {name: flight for name, flight in found.items() if name not in twins}
