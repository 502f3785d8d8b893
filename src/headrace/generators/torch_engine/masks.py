"""Which tokens a rollout may not sample, as one row of the vocabulary for each distinct mask.

Masks are shared: rollouts hold the index of a row, and rows are made when rollouts are admitted and
kept only while one of them runs. Index 0 forbids nothing and has no row, so that where nobody masks
a step costs one look at two columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from headrace.types import SamplingParams

Mask: TypeAlias = tuple[tuple[int, ...] | None, frozenset[int]]
"""The allowed ids (None: all) and the banned ones."""

NO_MASK: Mask = (None, frozenset())


class TokenMasks:
    """The masks of the running rollouts."""

    def __init__(self) -> None:
        self._masks: list[Mask] = [NO_MASK]
        self._rows: dict[Mask, Tensor] = {}
        self._table: Tensor | None = None

    def __len__(self) -> int:
        """Return how many masks are held that forbid something."""
        return len(self._masks) - 1

    def assign(self, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
        """Return the index of each one's mask before ``min_tokens`` and after it, both [n].

        From here on only these masks are kept.
        """
        index: dict[Mask, int] = {NO_MASK: 0}
        # Rollouts of one group, and mostly of one run, have one params object.
        distinct = {id(param): param for param in params}
        places = {
            key: tuple(index.setdefault(mask, len(index)) for mask in _masks_of(param))
            for key, param in distinct.items()
        }
        self._masks, self._table = list(index), None
        self._rows = {mask: row for mask, row in self._rows.items() if mask in index}
        columns = torch.tensor([places[id(param)] for param in params], dtype=torch.int64)
        early, late = columns.view(len(params), 2).unbind(1)
        return early, late

    def forbidden(self, index: Tensor, vocab_size: int, device: torch.device) -> Tensor | None:
        """Return [n, V] bool, True where the masks of ``index`` [n] forbid; None if none does."""
        if not bool(index.any()):
            return None
        if self._table is None:
            for mask in self._masks:
                if mask not in self._rows:
                    self._rows[mask] = _row(mask, vocab_size).to(device)
            self._table = torch.stack([self._rows[mask] for mask in self._masks])
        return self._table[index.to(device)]


def _masks_of(params: SamplingParams) -> tuple[Mask, Mask]:
    allowed = params.allowed_token_ids
    return (allowed, params.early_banned), (allowed, frozenset(params.banned_token_ids))


def _row(mask: Mask, vocab_size: int) -> Tensor:
    """Return [V] bool. Ids that the vocabulary lacks can be stop ids of another model's."""
    allowed, banned = mask
    row = torch.zeros(vocab_size, dtype=torch.bool)
    if allowed is not None:
        row.fill_(value=True)
        row[torch.tensor(allowed)] = False
    row[torch.tensor([token for token in banned if token < vocab_size], dtype=torch.int64)] = True
    return row
