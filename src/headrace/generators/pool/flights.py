"""Groups on their way through a pool, and the calls that wait for them.

Owns: a group reaches its call exactly once, whatever was reissued, and only if it is the one that
was asked for. What is known of it when it is given out again, it is gone on from (`saved`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.generators.pool.saved import SavedGroup, those_that_go_on, without_nameless
from headrace.types import GenerationRequest, OnUpdate, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One open `GeneratorPool.generate`."""

    arrivals: asyncio.Queue[RolloutGroup | HeadraceError] = field(default_factory=asyncio.Queue)


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One group that a call waits for."""

    number: int
    """Flights are in the order in which they were asked for."""
    request: GenerationRequest
    """As the caller made it."""
    call: Call
    saved: SavedGroup = field(init=False)
    """What is known of its rollouts."""
    num_issues: int = 0
    """Times that a member was given it."""
    is_aborted: bool = False
    """The caller wants it as it is."""
    is_wanted: bool = True
    """Its call waits for it; a member may have it for a while after that has ended."""
    num_losses: int = 0
    """Members that were lost with it."""
    was_lost: bool = False
    """Whether one was since it was given out."""

    def __post_init__(self) -> None:
        self.saved = SavedGroup(self.request, self.request.begun)

    @property
    def group_id(self) -> str:
        """Of the group; two open calls may have the same one."""
        return self.request.group_id

    @property
    def num_tokens(self) -> int:
        """Tokens that are left to compute at most: what a member is loaded with."""
        sampling = self.request.sampling
        completions = self.request.group_size * sampling.max_tokens - self.saved.num_tokens
        return len(self.request.prompt.token_ids) + completions

    def issue(self, on_update: OnUpdate, version: int | None) -> GenerationRequest:
        """Return what a member is told now: neither the expected answer nor what goes with it.

        It goes on from what is known as far as `those_that_go_on` lets it; the rest is forgotten.
        """
        asked = self.request.begun
        begun = those_that_go_on(self.saved.rollouts(), asked, on_update, version)
        self.saved = SavedGroup(self.request, begun)
        self.num_issues += 1
        self.was_lost = False
        prompt = dataclasses.replace(self.request.prompt, answer=None, metadata={})
        return dataclasses.replace(self.request, prompt=prompt, begun=begun)

    def misfit(self, group: object, newest_version: int) -> str | None:
        """Return in what way ``group`` is no answer to the request; None where it is one."""
        if not isinstance(group, RolloutGroup):
            return f"a {type(group).__name__} in place of a group"
        if group.prompt.prompt_id != self.request.prompt.prompt_id:
            return f"prompt {group.prompt.prompt_id} for {self.request.prompt.prompt_id}"
        indexes = [rollout.rollout_index for rollout in group.rollouts]
        if indexes != list(range(self.request.group_size)):
            return f"rollouts {indexes} for the {self.request.group_size} of group {self.group_id}"
        version = group.newest_version
        if version is not None and version > newest_version:
            return f"tokens of version {version}, where {newest_version} is the newest"
        return None

    def deliver(self, group: RolloutGroup) -> None:
        """Give ``group`` to the call, with the prompt as it was asked for."""
        whole = dataclasses.replace(
            group, prompt=self.request.prompt, sampling=self.request.sampling
        )
        self.call.arrivals.put_nowait(whole)

    def hand_back(self) -> None:
        """Give the group to the call as far as it is known here, to go on some other time."""
        self.deliver(
            RolloutGroup(
                group_id=self.group_id,
                prompt=self.request.prompt,
                rollouts=self._as_known(),
                sampling=self.request.sampling,
            )
        )

    def _as_known(self) -> tuple[Rollout, ...]:
        asked, sampling = self.request.begun, self.request.sampling
        known = without_nameless(self.saved.given(), asked)
        begun = {rollout.rollout_index: rollout for rollout in known}
        raw = () if sampling.raw_logprobs else None
        support = () if sampling.records_support else None
        return tuple(
            begun.get(index)
            or Rollout(
                rollout_index=index,
                completion_ids=(),
                loss_mask=(),
                generator_logprobs=(),
                version_spans=(),
                finish_reason="abort",
                text="",
                raw_logprobs=raw,
                kept_support=support,
            )
            for index in range(self.request.group_size)
        )

    def go_on_from(self, rollouts: Sequence[Rollout]) -> None:
        """Have whoever is next begin with what was sampled."""
        self.saved = SavedGroup(self.request, filter(_holds_something, rollouts))

    def note_loss(self) -> None:
        """Note that whoever had it is lost."""
        self.num_losses += 1
        self.was_lost = True

    def start_over(self) -> None:
        """Have whoever is next begin as it was asked for."""
        self.saved = SavedGroup(self.request, self.request.begun)


def _holds_something(rollout: Rollout) -> bool:
    return bool(rollout.completion_ids) or not rollout.may_go_on


def batches(flights: Iterable[Flight]) -> list[dict[str, Flight]]:
    """Return ``flights`` by group id, in as few parts as have no id twice."""
    parts: list[dict[str, Flight]] = []
    for flight in flights:
        part = next((part for part in parts if flight.group_id not in part), None)
        if part is None:
            part = {}
            parts.append(part)
        part[flight.group_id] = flight
    return parts
