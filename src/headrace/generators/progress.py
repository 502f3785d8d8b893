"""How far unfinished rollouts have come, told in parts to whoever has others go on with them.

A generator is asked with a mark for each rollout, which says what is known of it already, and tells
the rest. Owns: a part that begins behind a mark goes on from exactly the tokens of that mark; where
those are no more, because the rollout began anew under other weights, the part begins at its first
token. Packed, a token costs nine bytes and no object of Python's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.types import FinishReason, Rollout

IDS, LOGPROBS, MASK = np.dtype("<i4"), np.dtype("<f4"), np.dtype("?")
"""Of a part's columns; log-probs are what engines compute them in."""


class Mark(NamedTuple):
    """How far a rollout is known elsewhere."""

    num_tokens: int
    last_version: int
    """That sampled the last of them; -1 where there is none."""


NOTHING_KNOWN = Mark(num_tokens=0, last_version=-1)

Marks: TypeAlias = Mapping[str, Mapping[int, Mark]]
"""By group id and index of the rollout. What has none is not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPart:
    """The tokens of one rollout from ``start`` on, n of them."""

    rollout_index: int
    start: int
    """The mark it was asked with, or 0: then what was known is to be forgotten."""
    completion_ids: bytes
    """[n] `IDS`."""
    generator_logprobs: bytes
    """[n] `LOGPROBS`."""
    loss_mask: bytes
    """[n] `MASK`."""
    version_runs: tuple[tuple[int, int], ...]
    """Policy version and number of tokens, in order; n tokens in all."""
    raw_logprobs: bytes | None = None
    """[n] `LOGPROBS`, where they are recorded."""
    kept_support: tuple[bytes, ...] | None = None
    """[n] where it is recorded."""
    finish_reason: FinishReason = "abort"
    """``abort``: it has not ended yet."""
    text: str = ""
    """Of the whole completion, once it has ended."""

    @property
    def num_tokens(self) -> int:
        """What it holds."""
        return len(self.loss_mask) // MASK.itemsize

    @property
    def num_bytes(self) -> int:
        """What it weighs, but for a head of a few bytes."""
        columns = (self.completion_ids, self.generator_logprobs, self.loss_mask)
        support = self.kept_support or ()
        return (
            sum(map(len, columns))
            + len(self.raw_logprobs or b"")
            + sum(map(len, support))
            + len(self.text)
        )

    def misfit(self) -> str | None:
        """Return what is wrong with it in itself; None where it is whole."""
        count = self.num_tokens
        lengths = {
            len(self.completion_ids) // IDS.itemsize,
            len(self.generator_logprobs) // LOGPROBS.itemsize,
            sum(run for _, run in self.version_runs),
            count if self.raw_logprobs is None else len(self.raw_logprobs) // LOGPROBS.itemsize,
            count if self.kept_support is None else len(self.kept_support),
        }
        if lengths != {count}:
            return f"columns of {sorted(lengths | {count})} tokens"
        for packed in (self.generator_logprobs, self.raw_logprobs or b""):
            if not np.isfinite(np.frombuffer(packed, LOGPROBS)).all():
                return "log-probs that are not finite"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a generator tells."""

    parts: Mapping[str, tuple[RolloutPart, ...]] = field(default_factory=dict)
    """By group id; nothing of rollouts that are as they were known."""
    seconds: float = 0.0
    """For which it stood still to tell it."""


@runtime_checkable
class TellsProgress(Protocol):
    """A generator in whose process rollouts are, and would end with it."""

    async def progress(self, marks: Marks) -> Progress:
        """Return what is new of the rollouts that have ``marks``, paused or not.

        Nothing of groups that are not open, or open twice, and of rollouts that came to an error.
        Raises GeneratorFailure.
        """
        ...


def packed(
    rollout_index: int,
    start: int,
    *,
    completion_ids: Sequence[int] | NDArray[np.int64],
    generator_logprobs: Sequence[float] | NDArray[np.float32],
    loss_mask: Sequence[bool] | NDArray[np.bool_],
    policy_versions: Sequence[int],
    raw_logprobs: Sequence[float] | NDArray[np.float32] | None = None,
    kept_support: Sequence[bytes] | None = None,
    finish_reason: FinishReason = "abort",
    text: str = "",
) -> RolloutPart:
    """Return the part of the tokens given, which are those from ``start`` on."""
    raw = None if raw_logprobs is None else np.asarray(raw_logprobs, LOGPROBS).tobytes()
    return RolloutPart(
        rollout_index=rollout_index,
        start=start,
        completion_ids=np.asarray(completion_ids, IDS).tobytes(),
        generator_logprobs=np.asarray(generator_logprobs, LOGPROBS).tobytes(),
        loss_mask=np.asarray(loss_mask, MASK).tobytes(),
        version_runs=tuple((v, sum(1 for _ in run)) for v, run in groupby(policy_versions)),
        raw_logprobs=raw,
        kept_support=None if kept_support is None else tuple(kept_support),
        finish_reason=finish_reason,
        text=text,
    )


def packed_bytes(rollout: Rollout) -> int:
    """Return what ``rollout`` would weigh as one part."""
    columns = IDS.itemsize + LOGPROBS.itemsize + MASK.itemsize
    if rollout.raw_logprobs is not None:
        columns += LOGPROBS.itemsize
    support = sum(map(len, rollout.kept_support or ()))
    return len(rollout.completion_ids) * columns + support + len(rollout.text)
