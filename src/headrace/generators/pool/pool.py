"""GeneratorPool: the Generator role over members that live elsewhere, any of which may die.

Owns: no token comes from other weights than the last published ones once `update_from` has
returned, whichever members there are by then. Where a group's member was lost, another one goes on
from what is known of it, and its tokens are the same: they rest on seed, weights and place in the
group alone. Which members there are is the roster's business, which groups are under way the
workload's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from headrace.errors import ConfigError, GeneratorFailure, HeadraceError, WeightSyncError
from headrace.generators.pool.merging import over_members, over_time
from headrace.generators.pool.proxy import GeneratorProxy, Launch, MemberLostError
from headrace.generators.pool.roster import PoolSettings, Roster, RosterEvents
from headrace.generators.pool.saving import saved_metrics
from headrace.generators.pool.telling import Tell
from headrace.generators.pool.workload import WorkCounts, Workload
from headrace.host import memory_shortage
from headrace.roles import WeightStore
from headrace.types import GenerationRequest, RolloutGroup, WeightNotice, WeightUpdate

CLOSED = "the generators were closed"


class GeneratorPool:
    """Samples with several generators. Used from one event loop; starts nothing before weights."""

    def __init__(self, launch: Launch, settings: PoolSettings, store: WeightStore) -> None:
        """``store`` is closed by whoever had it made; members read what it writes."""
        self._settings = settings
        self._store = store
        self._wanted = settings.num_members
        self._roster = Roster(launch, settings)
        self._work = Workload(
            self._roster,
            max_losses=settings.max_restarts + 1,
            save_seconds=settings.save_seconds,
            on_update=settings.on_update,
        )
        self._roster.tell_of(
            RosterEvents(
                admit=self._admit,
                joined=self._work.join,
                lost=self._work.reissue,
                surrendered=self._work.fail,
            )
        )
        self._notice: WeightNotice | None = None
        self._publication = 0
        """Counts notices, whose versions may repeat or, after a learner's restart, go back."""
        self._is_paused = False
        self._changing = asyncio.Lock()
        """Of weights, and of which members there are."""
        self._resizing = asyncio.Lock()
        self._metrics_since = time.monotonic()

    def tell_events(self, tell: Tell) -> None:
        """Have ``tell`` hear of losses, restarts and what is thrown away, in place of the log."""
        self._roster.telling.tell = tell

    @property
    def num_members(self) -> int:
        """Members that serve."""
        return len(self._roster.serving)

    @property
    def num_wanted(self) -> int:
        """Members that there are to be."""
        return self._wanted

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[RolloutGroup, None]:
        """See `Generator`. Waits for members, whose loss has others take over.

        Raises GeneratorFailure once no member is left, or where a group was lost with too many.
        """
        self._require_open()
        if self._notice is None:
            msg = "asked to generate before the first update_weights"
            raise GeneratorFailure(msg)
        call = self._work.admit(requests)
        try:
            for _ in requests:
                item = await call.arrivals.get()
                if isinstance(item, HeadraceError):
                    raise item
                yield item
        finally:
            self._work.take_back(call)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`. For who holds tensors; a weight sync writes them and tells of them."""
        notice = await self._store.write(update, is_whole=True)
        await self.update_from(notice)
        self._store.release(notice.policy_version)

    async def update_from(self, notice: WeightNotice) -> None:
        """Return once every token sampled from now on comes from the weights of ``notice``.

        All members load at the same time; who is lost meanwhile, or comes later, loads them before
        it gets work. Waits for at least one member. Raises WeightSyncError.
        """
        async with self._changing:
            self._require_open()
            self._notice = notice
            self._work.await_version(notice.policy_version)
            self._publication += 1
            if not self._roster.members:
                self._roster.grow(self._wanted)
            told = replace(notice, num_readers=max(1, self.num_members))
            await self._roster.tell_all("update_weights", self._publication, told)
            self._work.settle_version()
            await self._roster.until(lambda: self._has_failed or self.num_members > 0)
            self._require_open()

    async def pause(self) -> None:
        """See `Interruptible`."""
        self._require_open()
        # Before anything is awaited: a member that joins now does so as the pool then is.
        self._is_paused = True
        await self._roster.tell_all("pause")

    async def resume(self) -> None:
        """See `Interruptible`."""
        self._require_open()
        self._is_paused = False
        await self._roster.tell_all("resume")

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `Interruptible`. What no member has yet comes back as it was asked for."""
        self._require_open()
        await self._work.abort(group_ids)

    async def resize(self, num_members: int) -> None:
        """Have so many members; return once those that came take work and those that went are gone.

        Groups of a member that goes are taken back unfinished and go on at the others. Raises
        GeneratorFailure where a new one does not join; then those that did stay. Raises
        ConfigError, with nothing changed, where there is no memory for so many.
        """
        async with self._resizing:
            async with self._changing:
                self._require_open()
                self._require_memory(num_members)
                self._wanted = num_members
                if not self._roster.members:
                    return
                for member in [member for member in self._roster.members if member.is_over]:
                    await self._roster.remove(member)
                surplus = len(self._roster.members) - num_members
                if surplus > 0:
                    await self._shrink(surplus)
            # Weights do not wait for members that start: whoever joins loads those of then.
            if surplus < 0:
                await self._grow(-surplus)

    def metrics(self) -> Mapping[str, float]:
        """See `Generator`. What members count arrives with their signs of life."""
        now = time.monotonic()
        seconds, self._metrics_since = max(now - self._metrics_since, 1e-9), now
        counted = []
        found: dict[str, float] = {}
        for member in self._roster.members:
            beats, member.metrics = member.metrics, []
            counted.append(over_time(beats))
            share = min(member.take_busy_seconds() / seconds, 1.0)
            found[f"generator/member_{member.index}/busy_share"] = share
        counts, self._work.counts = self._work.counts, WorkCounts()
        saved = self._work.saving.take_counts()
        return (
            found
            | over_members(counted)
            | {
                "generator/pool/num_members": float(self.num_members),
                "generator/pool/num_restarts": float(self._roster.take_restarts()),
                "generator/pool/num_reissued_groups": float(counts.num_reissued),
                "generator/pool/num_fenced_answers": float(counts.num_fenced + saved.num_fenced),
                "generator/pool/num_continued_tokens": float(saved.num_continued),
                "generator/pool/num_dropped_tokens": float(saved.num_dropped),
            }
            | saved_metrics(saved, seconds, max(self.num_members, 1))
        )

    async def close(self) -> None:
        """See `Generator`. Ends every member; open calls raise GeneratorFailure."""
        self._work.fail(GeneratorFailure(CLOSED))
        await self._roster.close()
        await self._work.close()

    async def _admit(self, proxy: GeneratorProxy) -> None:
        """Bring a new member to where the pool is. Waits for it; the roster's watch ends the wait.

        Raises MemberLostError where it cannot be brought there.
        """
        publication, is_paused = -1, False
        while (publication, is_paused) != (self._publication, self._is_paused):
            if publication != self._publication:
                wanted, notice = self._publication, self._notice
                try:
                    await proxy.ask("update_weights", wanted, notice)
                    publication = wanted
                except WeightSyncError as error:
                    if wanted == self._publication:
                        raise MemberLostError(str(error)) from error
                    # Others came meanwhile, and what it was to read is there no more.
            else:
                is_paused = self._is_paused
                await proxy.ask("pause" if is_paused else "resume")

    async def _shrink(self, surplus: int) -> None:
        """End members: those that do not serve first, then the latest."""
        order = sorted(self._roster.members, key=lambda m: (m.is_serving, -m.index))
        leaving = order[:surplus]
        for member in leaving:
            member.takes_work = False
        await self._work.abort_at_members([flight for m in leaving for flight in m.flights])
        # What they give back is on its way; what does not come is sampled anew elsewhere.
        with suppress(TimeoutError):
            returned = self._roster.until(lambda: not any(m.flights for m in leaving))
            await asyncio.wait_for(returned, self._settings.hang_seconds)
        for member in leaving:
            await self._roster.remove(member)

    async def _grow(self, count: int) -> None:
        added = self._roster.grow(count)
        await self._roster.until(
            lambda: self._has_failed or all(m.is_serving or m.is_over for m in added)
        )
        self._require_open()
        failed = [member for member in added if member.is_over]
        for member in failed:
            await self._roster.remove(member)
        if failed:
            msg = f"{len(failed)} of {count} new generators did not join; {self._roster.history()}"
            raise GeneratorFailure(msg)

    def _require_memory(self, num_members: int) -> None:
        more = num_members - len(self._roster.members)
        if problem := memory_shortage(more, self._settings.member_bytes):
            msg = f"{more} more generators: {problem}"
            raise ConfigError(msg)

    @property
    def _has_failed(self) -> bool:
        return self._work.failure is not None

    def _require_open(self) -> None:
        if self._work.failure is not None:
            raise GeneratorFailure(str(self._work.failure))
