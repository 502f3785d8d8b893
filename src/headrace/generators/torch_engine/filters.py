"""top-k, top-p and min-p: which tokens they leave, found without sorting the vocabulary.

Owns the exact rule, which a row's own weights alone decide. Tokens stand in falling order of
weight, the lower id first where two are equal. top-k keeps the first k; top-p keeps those before
which less than top_p of what top-k left has passed; min-p keeps those at least min_p times as heavy
as the first. The first is always kept.

On a processor the least weight that is kept is found row by row, by partitioning around pivots read
off a small part of the row, which mostly leaves some hundred candidates to sort after one pass.
Elsewhere rows are sorted whole, which an accelerator does fast.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Weights = NDArray[np.float32]

SORTED = 2048
"""So few candidates are sorted rather than partitioned once more."""
SAMPLE = 512
"""Weights that a pivot is chosen from."""
MAX_PASSES = 8
"""Partitions at most; two or three are the rule."""
MARGIN = 1.5
"""A pivot keeps so far from the place it is to find, in standard deviations of the sample: first
below it, then above it, so that what lies between is little."""


def keep_support(
    weights: Tensor, rows: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    """Set to 0 what the filters leave out of ``rows`` [m] int64 of ``weights`` [n, V] fp32.

    ``top_k``, ``top_p``, ``min_p``: [n], off at 0, 1 and 0. Weights are not negative, and finite.
    """
    if weights.device.type != "cpu":
        weights[rows] = sorted_support(weights[rows], top_k[rows], top_p[rows], min_p[rows])
        return
    limits = torch.stack((top_k.double(), top_p, min_p.double())).T
    for row, (most, share, ratio) in zip(rows.tolist(), limits[rows].tolist(), strict=True):
        _keep_row(weights[row], int(most), share, ratio)


def _keep_row(row: Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Set to 0 what the filters leave out of ``row`` [V], which is on the CPU."""
    weights: Weights = row.numpy()
    least, surplus = np.float32(0.0), 0
    left = weights
    if 0 < top_k < len(weights):
        least, surplus = _cut(weights, float(top_k), by_mass=False)
        heavier = weights.take(np.flatnonzero(weights > least))
        left = np.concatenate((heavier, np.full(top_k - len(heavier), least)))
    if top_p < 1.0:
        least_of_k, surplus_of_k = least, surplus
        least, surplus = _cut(left, top_p * float(left.sum(dtype=np.float64)), by_mass=True)
        surplus += surplus_of_k if least == least_of_k else 0
    floor = np.float32(min_p) * weights.max()
    if floor > least:
        least, surplus = floor, 0
    # `threshold_` keeps what is greater than its threshold.
    torch.threshold_(row, float(np.nextafter(least, np.float32(-1.0))), 0.0)
    if surplus and least > 0:
        equal = np.flatnonzero(weights == least)
        weights[equal[len(equal) - surplus :]] = 0.0


def _cut(values: Weights, target: float, *, by_mass: bool) -> tuple[np.float32, int]:
    """Return the least of ``values`` that is kept, and how many equal to it are not.

    In falling order values are kept while what those before them count, their masses or 1 each, has
    not reached ``target``.
    """
    above, upto = 0.0, _total(values, by_mass)  # what counts above `values`, and with them
    margin = MARGIN
    for _ in range(MAX_PASSES):
        if len(values) <= SORTED:
            break
        pivot = _pivot(values, upto - target, margin, by_mass=by_mass)
        higher = values.take(np.flatnonzero(values > pivot))
        with_higher = above + _total(higher, by_mass)
        if with_higher >= target:
            values, upto, margin = higher, with_higher, -MARGIN
            continue
        num_equal = int(np.count_nonzero(values == pivot))
        each = float(pivot) if by_mass else 1.0
        if with_higher + num_equal * each >= target:
            return pivot, num_equal - _steps(with_higher, each, target)
        above, margin = with_higher + num_equal * each, MARGIN
        values = values.take(np.flatnonzero(values < pivot))
    values = np.sort(values)[::-1]
    counted = values.astype(np.float64) if by_mass else np.ones(len(values))
    before = above + np.cumsum(counted) - counted
    num_kept = max(1, int(np.count_nonzero(before < target)))
    least = values[num_kept - 1]
    return least, int(np.count_nonzero(values >= least)) - num_kept


def _total(values: Weights, by_mass: bool) -> float:
    return float(values.sum(dtype=np.float64)) if by_mass else float(len(values))


def _steps(start: float, each: float, target: float) -> int:
    """Return the least n >= 1 for which ``start + n * each`` reaches ``target``."""
    steps = max(1, math.ceil((target - start) / each))
    # The quotient is rounded, the sums are not: a step more or less may be meant.
    steps -= steps > 1 and start + (steps - 1) * each >= target
    return steps + (start + steps * each < target)


def _pivot(values: Weights, below: float, margin: float, *, by_mass: bool) -> np.float32:
    """Return one of ``values`` near the place below which they count ``below`` in all.

    Read off a sample, ``margin`` standard deviations of its rank lower.
    """
    sample = np.sort(values[:: max(1, len(values) // SAMPLE)])
    counted = np.cumsum(sample, dtype=np.float64) if by_mass else np.arange(1.0, len(sample) + 1)
    rank = int(np.searchsorted(counted * (len(values) / len(sample)), below))
    rank -= round(margin * (1.0 + math.sqrt(min(rank, len(sample) - rank))))
    pivot: np.float32 = sample[min(max(rank, 0), len(sample) - 1)]
    return pivot


def sorted_support(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return ``weights`` [m, V] without what the filters [m] leave out, by sorting every row."""
    top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
    ordered, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    keep = (torch.arange(weights.shape[1], device=weights.device) < top_k) | (top_k == 0)
    ordered = torch.where(keep, ordered, 0.0)
    mass = ordered.double().cumsum(-1)
    keep &= (mass - ordered < top_p * mass[:, -1:]) | (top_p >= 1.0)
    keep &= ordered >= min_p * ordered[:, :1]
    keep[:, 0] = True
    return weights * torch.zeros_like(keep).scatter_(1, order, keep)
