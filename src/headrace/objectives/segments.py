"""Which rollout each token is of: sums, means and extremes over rollouts of flat packed tensors.

Owns: a cell outside ``loss_mask`` has no part in any of them, whatever it holds, and no gradient.
A rollout without trained tokens has sum and mean 0. Rollouts are told apart by index and never by
position, so they may be interleaved and uneven; the tokens of one must be in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The rollouts that N packed tokens belong to."""

    index: Tensor
    """[N] int64 in [0, count): the rollout of each token."""
    count: int
    """R, the number of rollouts."""
    loss_mask: Tensor
    """[N] bool."""

    def restricted(self, kept: Tensor) -> Segments:
        """Return the same rollouts with only the ``kept`` [N] of their trained tokens."""
        return Segments(index=self.index, count=self.count, loss_mask=self.loss_mask & kept)

    @property
    def lengths(self) -> Tensor:
        """[R] int64 trained tokens of each rollout."""
        return self.sum(torch.ones_like(self.index))

    def sum(self, values: Tensor) -> Tensor:
        """Return [R] the sum over the trained tokens of each rollout; ``values``: [N]."""
        selected = torch.where(self.loss_mask, values, values.new_zeros(()))
        return values.new_zeros(self.count).index_add(0, self.index, selected)

    def mean(self, values: Tensor) -> Tensor:
        """Return [R] the mean over the trained tokens of each rollout; ``values``: [N]."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def any(self, flags: Tensor) -> Tensor:
        """Return [R] bool: whether ``flags`` [N] holds for some trained token."""
        return self.sum(flags.to(torch.int64)) > 0

    def spread(self, per_rollout: Tensor) -> Tensor:
        """Return [N]: to each token what its rollout has in ``per_rollout`` [R]."""
        return per_rollout[self.index]


def suffix_sums(terms: Tensor, factors: Tensor, segments: Segments) -> Tensor:
    """Return x [N] with x_t = terms_t + factors_t * x_(t+1) over the trained tokens of a rollout.

    x is 0 after the last one and in cells outside the mask, which are skipped: the token after t is
    the next trained one. ``terms``, ``factors``: [N]. Loops over positions, not over tokens.
    """
    tokens, columns = _positions(segments)
    found = torch.zeros_like(terms)
    running = terms.new_zeros(segments.count)
    for here in _columns_backwards(tokens, columns):
        rollouts = segments.index[here]
        running[rollouts] = terms[here] + factors[here] * running[rollouts]
        found[here] = running[rollouts]
    return found


def next_values(values: Tensor, after: Tensor, segments: Segments) -> Tensor:
    """Return [N] the value of the next trained token of the same rollout.

    ``after`` [R] stands for the one behind the last token. Cells outside the mask are 0.
    """
    tokens, columns = _positions(segments)
    found = torch.zeros_like(values)
    running = after.clone()
    for here in _columns_backwards(tokens, columns):
        rollouts = segments.index[here]
        found[here] = running[rollouts]
        running[rollouts] = values[here]
    return found


def _positions(segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the trained tokens, rollout by rollout, and the place of each in its rollout."""
    trained = segments.loss_mask.nonzero().squeeze(-1)
    tokens = trained[torch.argsort(segments.index[trained], stable=True)]
    lengths = segments.lengths
    starts = lengths.cumsum(0) - lengths
    places = torch.arange(len(tokens), device=tokens.device) - starts[segments.index[tokens]]
    return tokens, places


def _columns_backwards(tokens: Tensor, places: Tensor) -> Iterator[Tensor]:
    """Yield the tokens at the last place, then those before it, down to the first ones."""
    order = torch.argsort(places, stable=True)
    counts = torch.bincount(places).tolist()
    yield from reversed(torch.split(tokens[order], counts))
