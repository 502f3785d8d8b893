"""Which rank computes which groups of a minibatch.

Owns: every rollout is computed by exactly one rank, the same on every rank that asks, and shares
have about as many tokens each. Weights are given before, so no division changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.learners.packing import split_group
from headrace.learners.selection import TrainingGroup


def divided(groups: Sequence[TrainingGroup], count: int) -> list[list[TrainingGroup]]:
    """Return ``count`` shares of ``groups``; some are empty where there are fewer rollouts.

    A group with more tokens than one share is split between its rollouts: its prompt is then
    computed by several ranks. The largest part goes to whoever has least (Graham 1969: at most a
    third more than the best division has).
    """
    if count == 1:
        return [list(groups)]
    fair = -(-sum(group.num_tokens for group in groups) // count)
    parts = [part for group in groups for part in split_group(group, fair)]
    shares: list[list[TrainingGroup]] = [[] for _ in range(count)]
    tokens = [0] * count
    for part in sorted(parts, key=lambda part: part.num_tokens, reverse=True):
        least = tokens.index(min(tokens))
        shares[least].append(part)
        tokens[least] += part.num_tokens
    return shares
