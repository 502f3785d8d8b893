"""Runs of equal policy versions, as rollouts carry them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from headrace.types import VersionSpan


def version_spans(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Return the runs of equal ``versions``, one a token: `Rollout.policy_versions` undone."""
    spans: list[VersionSpan] = []
    start = 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append(VersionSpan(policy_version=version, start=start, end=end))
        start = end
    return tuple(spans)
