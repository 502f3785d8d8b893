"""Runs of equal policy versions, as rollouts carry them, and the versions token by token."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from headrace.types import VersionSpan


def version_spans(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Return the runs of equal ``versions``, one of which each token has."""
    spans: list[VersionSpan] = []
    start = 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append(VersionSpan(policy_version=version, start=start, end=end))
        start = end
    return tuple(spans)


def token_versions(spans: Iterable[VersionSpan]) -> tuple[int, ...]:
    """Return the version of each token that ``spans`` cover: `version_spans` undone."""
    return tuple(span.policy_version for span in spans for _ in range(span.start, span.end))
