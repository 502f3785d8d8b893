"""What a pool knows of rollouts whose group is not whole, and from which of it others may go on.

Owns: each token is held once, with everything that it carries; a part that does not go on from what
is held is refused; and tokens of weights that were replaced are gone on from only where the recipe
lets rollouts outlive their weights (`those_that_go_on`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from headrace.generators.progress import IDS, LOGPROBS, MASK, NOTHING_KNOWN, Mark, RolloutPart
from headrace.generators.version_spans import version_spans
from headrace.types import GenerationRequest, OnUpdate, Rollout


class MisfitError(Exception):
    """A part is none of the rollout that it is said to be of."""


@dataclass(slots=True, kw_only=True)
class SavedRollout:
    """One rollout: what it was given out with, and the parts that came since."""

    index: int
    given: Rollout | None = None
    parts: list[RolloutPart] = field(default_factory=list)

    @property
    def mark(self) -> Mark:
        """How far it is known."""
        for part in reversed(self.parts):
            if part.num_tokens:
                return Mark(part.start + part.num_tokens, part.version_runs[-1][0])
        if self.given is None or not self.given.version_spans:
            return NOTHING_KNOWN
        last = self.given.version_spans[-1]
        return Mark(num_tokens=last.end, last_version=last.policy_version)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is left to be sampled."""
        if self.parts:
            return self.parts[-1].finish_reason != "abort"
        return self.given is not None and not self.given.may_go_on

    def take(self, part: RolloutPart, *, max_tokens: int, newest_version: int) -> None:
        """Hold ``part`` too. Raises MisfitError."""
        known, what = self.mark.num_tokens, f"rollout {self.index}"
        if problem := part.misfit():
            msg = f"{what} with {problem}"
            raise MisfitError(msg)
        if part.start not in {0, known}:
            msg = f"{what} from token {part.start} on, where {known} are known"
            raise MisfitError(msg)
        if self.has_ended or part.start + part.num_tokens > max_tokens:
            msg = f"{what} beyond its end"
            raise MisfitError(msg)
        if any(version > newest_version for version, _ in part.version_runs):
            msg = f"{what} with versions {part.version_runs}, where {newest_version} is the newest"
            raise MisfitError(msg)
        if part.start == 0:
            self.given = None
            self.parts.clear()
        self.parts.append(part)

    def rollout(self) -> Rollout | None:
        """Return what is known of it; None for nothing. The text of an unfinished one is empty."""
        if not self.parts:
            return self.given
        given, parts = self.given, self.parts
        ids = np.frombuffer(b"".join(part.completion_ids for part in parts), IDS)
        logprobs = np.frombuffer(b"".join(part.generator_logprobs for part in parts), LOGPROBS)
        mask = np.frombuffer(b"".join(part.loss_mask for part in parts), MASK)
        runs = (run for part in parts for run in part.version_runs)
        versions = [version for version, count in runs for _ in range(count)]
        raw = None if parts[-1].raw_logprobs is None else self._raw_logprobs()
        support = None if parts[-1].kept_support is None else self._kept_support()
        return Rollout(
            rollout_index=self.index,
            completion_ids=(*(given.completion_ids if given else ()), *ids.tolist()),
            loss_mask=(*(given.loss_mask if given else ()), *mask.tolist()),
            generator_logprobs=(*(given.generator_logprobs if given else ()), *logprobs.tolist()),
            version_spans=version_spans((*(given.policy_versions if given else ()), *versions)),
            finish_reason=parts[-1].finish_reason,
            text=parts[-1].text,
            raw_logprobs=raw,
            kept_support=support,
        )

    def _raw_logprobs(self) -> tuple[float, ...]:
        given = self.given.raw_logprobs if self.given else None
        packed = b"".join(part.raw_logprobs or b"" for part in self.parts)
        return (*(given or ()), *np.frombuffer(packed, LOGPROBS).tolist())

    def _kept_support(self) -> tuple[bytes, ...]:
        given = self.given.kept_support if self.given else None
        return (*(given or ()), *(one for part in self.parts for one in part.kept_support or ()))


class SavedGroup:
    """The rollouts of one group, as far as they are known here."""

    def __init__(self, request: GenerationRequest, begun: Iterable[Rollout]) -> None:
        """``begun``: what whoever samples it now was given to go on from."""
        self._max_tokens = request.sampling.max_tokens
        self._rollouts = {k: SavedRollout(index=k) for k in range(request.group_size)}
        for rollout in begun:
            self._rollouts[rollout.rollout_index].given = rollout
        self.num_tokens = sum(saved.mark.num_tokens for saved in self._rollouts.values())
        """That are known."""

    def marks(self) -> dict[int, Mark]:
        """Return up to where each rollout is known that has not ended."""
        return {k: saved.mark for k, saved in self._rollouts.items() if not saved.has_ended}

    def take(self, part: RolloutPart, newest_version: int) -> None:
        """Hold ``part``, whose tokens can have no later version. Raises MisfitError."""
        saved = self._rollouts.get(part.rollout_index)
        if saved is None:
            msg = f"rollout {part.rollout_index}, which the group does not have"
            raise MisfitError(msg)
        before = saved.mark.num_tokens
        saved.take(part, max_tokens=self._max_tokens, newest_version=newest_version)
        self.num_tokens += saved.mark.num_tokens - before

    def rollouts(self) -> tuple[Rollout, ...]:
        """Return what is known of each rollout of which something is."""
        found = (saved.rollout() for saved in self._rollouts.values())
        return tuple(rollout for rollout in found if rollout is not None)

    def given(self) -> tuple[Rollout, ...]:
        """Return what the group was given out with."""
        found = (saved.given for saved in self._rollouts.values())
        return tuple(rollout for rollout in found if rollout is not None)


def those_that_go_on(
    saved: Sequence[Rollout],
    asked: Sequence[Rollout],
    on_update: OnUpdate,
    version: int | None,
) -> tuple[Rollout, ...]:
    """Return what a group is gone on with from ``saved``; from ``asked`` where that may not be.

    As an engine would that had them when its weights became ``version``; None: new ones are on
    their way, so that nobody knows which there will be. With ``wait`` a group is of one version.
    With ``restart`` an unfinished rollout is; one that ended has no part in new weights.
    """
    match on_update:
        case "keep" | "recompute":
            return tuple(saved)
        case "wait":
            versions = {span.policy_version for rollout in saved for span in rollout.version_spans}
            return tuple(saved if versions <= {version} else asked)
        case "restart":
            stale = {
                rollout.rollout_index
                for rollout in saved
                if rollout.may_go_on
                and any(span.policy_version != version for span in rollout.version_spans)
            }
            kept = [rollout for rollout in saved if rollout.rollout_index not in stale]
            return (*kept, *(begun for begun in asked if begun.rollout_index in stale))
        case _:
            assert_never(on_update)


def without_nameless(rollouts: Sequence[Rollout], asked: Sequence[Rollout]) -> list[Rollout]:
    """Return ``rollouts`` as a caller may have them: one whose text nobody made, as it was asked.

    Whoever goes on with a rollout needs no text of it, so what is merely saved has none.
    """
    before = {rollout.rollout_index: rollout for rollout in asked}
    found = (
        before.get(rollout.rollout_index)
        if rollout.may_go_on and rollout.completion_ids and not rollout.text
        else rollout
        for rollout in rollouts
    )
    return [rollout for rollout in found if rollout is not None]
