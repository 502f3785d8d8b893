"""The groups that open `generate` calls wait for, and the tasks that fly their rollouts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from headrace.errors import GeneratorFailure
from headrace.generators.stop_strings import Decode
from headrace.generators.vllm.flight import Flight
from headrace.types import GenerationRequest, RolloutGroup

Fly = Callable[[Flight], Awaitable[None]]


class OpenGroup:
    """One request of one call."""

    def __init__(self, request: GenerationRequest, decode: Decode, fly: Fly) -> None:
        self._request = request
        self._fly = fly
        self._flights = [Flight.of(request, k, decode) for k in range(request.group_size)]
        self._tasks: list[asyncio.Task[None]] = []
        self._num_left = 0
        self._failure: GeneratorFailure | None = None

    def start(self, deliver: Callable[[OpenGroup], None]) -> None:
        """Fly what has not ended; ``deliver`` is called once nothing flies any more."""
        unfinished = [flight for flight in self._flights if flight.finish_reason is None]
        self._num_left = len(unfinished)
        if not unfinished:
            deliver(self)

        def landed(_: asyncio.Task[None]) -> None:
            self._num_left -= 1
            if not self._num_left:
                deliver(self)

        for flight in unfinished:
            task = asyncio.ensure_future(self._fly(flight))
            task.add_done_callback(landed)
            self._tasks.append(task)

    async def take_back(self, failure: GeneratorFailure | None = None) -> None:
        """End whatever flies, with the tokens it has, or with ``failure`` for the whole group."""
        self._failure = failure
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def result(self) -> RolloutGroup:
        """Return the group as it is. Raises GeneratorFailure if one of its rollouts failed."""
        if self._failure is not None:
            raise GeneratorFailure(*self._failure.args)
        for task in self._tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                msg = f"group {self._request.group_id}: {error}"
                raise GeneratorFailure(msg) from error
        return RolloutGroup(
            group_id=self._request.group_id,
            prompt=self._request.prompt,
            rollouts=tuple(flight.to_rollout() for flight in self._flights),
            sampling=self._request.sampling,
        )

    @property
    def group_id(self) -> str:
        """Of the request."""
        return self._request.group_id


class OpenGroups:
    """By group id; two calls may use the same one."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, list[OpenGroup]] = defaultdict(list)

    def add(self, groups: Iterable[OpenGroup]) -> None:
        """Note ``groups`` as open."""
        for group in groups:
            self._by_id[group.group_id].append(group)

    def remove(self, groups: Iterable[OpenGroup]) -> None:
        """Forget ``groups``."""
        for group in groups:
            self._by_id[group.group_id].remove(group)
            if not self._by_id[group.group_id]:
                del self._by_id[group.group_id]

    def find(self, group_ids: Sequence[str]) -> list[OpenGroup]:
        """Return the open groups of these ids. Raises GeneratorFailure that names the unknown."""
        unknown = sorted({group_id for group_id in group_ids if group_id not in self._by_id})
        if unknown:
            msg = f"groups {', '.join(unknown)}: no open call asked for them; nothing was aborted"
            raise GeneratorFailure(msg)
        return [group for group_id in dict.fromkeys(group_ids) for group in self._by_id[group_id]]

    def all(self) -> list[OpenGroup]:
        """Return every open group."""
        return [group for groups in self._by_id.values() for group in groups]
