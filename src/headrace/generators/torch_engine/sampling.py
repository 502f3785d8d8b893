"""Drawing tokens: masks, temperature, filters, and one counter-based uniform per token.

A row's token depends on its own logits, parameters, seed and position, and on nothing else in the
batch: every reduction runs along a row. Sampling is by inverse CDF in two stages (blocks, then
inside one block, both in float64), so that it costs three passes over the logits however large the
vocabulary is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.generators.torch_engine.filters import keep_support
from headrace.kept_support import encode

BLOCK = 256
"""Tokens of a stage-one block: about the root of a large vocabulary."""

GAMMA, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64."""


@dataclass(slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of n rows, as tensors [n]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    wants_raw: Tensor
    """bool: log-probs of the model's own distribution are recorded."""
    wants_support: Tensor
    """bool: the tokens that filters leave are recorded."""
    filters: Tensor
    """bool: some tokens are left out before drawing."""
    truncates: bool
    """Whether any row filters tokens."""
    any_greedy: bool
    """Whether any row has temperature 0."""
    any_scaled: bool
    """Whether any row has a temperature other than 0 and 1."""
    any_raw: bool
    """Whether any row wants raw log-probs."""
    any_support: bool
    """Whether any row wants its support."""

    def at(self, rows: Tensor | slice) -> SamplingRows:
        """Return these ``rows`` alone."""
        return self._with_columns(lambda column: column[rows])

    def to(self, device: torch.device) -> SamplingRows:
        """Return the columns on ``device``."""
        return self._with_columns(lambda column: column.to(device))

    def _with_columns(self, change: Callable[[Tensor], Tensor]) -> SamplingRows:
        return replace(
            self,
            temperature=change(self.temperature),
            top_p=change(self.top_p),
            top_k=change(self.top_k),
            min_p=change(self.min_p),
            filters=change(self.filters),
            wants_raw=change(self.wants_raw),
            wants_support=change(self.wants_support),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token for each of n rows."""

    ids: Tensor
    """[n] int64."""
    logprobs: Tensor
    """[n] fp32, under the distribution drawn from."""
    raw_logprobs: Tensor | None
    """[n] fp32, under the softmax of the logits as they came, where a row wants it; None: none."""
    kept_support: dict[int, bytes]
    """Row -> what masks and filters left to draw from, of the rows that want it."""

    def on_cpu(self) -> Drawn:
        """Return the columns on the CPU; from another device they come in one copy."""
        if self.ids.device.type == "cpu":
            return self
        return unpacked(self, packed(self).cpu())


def packed(drawn: Drawn) -> Tensor:
    """Return the columns of ``drawn`` as one, [2 or 3, n] float64, which holds each exactly."""
    raw = () if drawn.raw_logprobs is None else (drawn.raw_logprobs,)
    return torch.stack([column.double() for column in (drawn.ids, drawn.logprobs, *raw)])


def unpacked(drawn: Drawn, columns: Tensor) -> Drawn:
    """Return ``drawn`` with the columns that `packed` made ``columns`` of."""
    return replace(
        drawn,
        ids=columns[0].long(),
        logprobs=columns[1].float(),
        raw_logprobs=columns[2].float() if len(columns) > 2 else None,  # noqa: PLR2004 - the third
    )


def uniforms(seeds: Tensor, positions: Tensor, device: torch.device) -> Tensor:
    """Return [n] float64 in [0, 1) on ``device``: a hash of ``seeds`` [n] and ``positions`` [n].

    Both are int64 on the CPU. SplitMix64 (Steele, Lea and Flood 2014) at counter ``position`` of
    stream ``seed``, the same bits on every device. On the CPU by numpy, whose calls cost half of
    torch's; to another device both go in one copy.
    """
    if device.type != "cpu":
        return device_uniforms(*torch.stack((seeds, positions)).to(device))
    state = seeds.numpy().astype(np.uint64)
    counter = positions.numpy().astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = state + (counter + np.uint64(1)) * np.uint64(GAMMA)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
        mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def device_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return what `uniforms` does, on the device that both lie on.

    torch multiplies no unsigned numbers; int64 wraps around to the same bits.
    """
    mixed = seeds + (positions + 1) * _signed(GAMMA)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(FIRST_FACTOR)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(SECOND_FACTOR)
    return _shifted(mixed ^ _shifted(mixed, 31), 11).double().mul_(2.0**-53)


def _signed(number: int) -> int:
    """Return the int64 of the same bits as ``number``, which has 64."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """Return int64 ``numbers`` >> ``count`` as of unsigned ones: no sign comes in from the left."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def draw(
    logits: Tensor, rows: SamplingRows, uniform: Tensor, forbidden: Tensor | None = None
) -> Drawn:
    """Draw a token for each row, those where ``forbidden`` [n, V] is True left out.

    ``logits`` [n, V] are overwritten. A greedy row takes the first largest logit; its distribution
    is a point, so its log-prob is 0. A row with a NaN or an infinite logit (-inf is none: it says
    never) has no distribution: its log-prob is NaN and its token stands for nothing.
    """
    logits = logits.float()
    raw = _RawLogprobs(logits, rows, forbidden) if rows.any_raw else None
    if forbidden is not None:
        logits.masked_fill_(forbidden, -torch.inf)
    greedy_ids = logits.argmax(-1) if rows.any_greedy else None
    if rows.any_scaled:
        logits.div_(torch.where(rows.temperature > 0, rows.temperature, 1.0).unsqueeze(1))
    weights = torch.softmax(logits, -1, out=logits)
    # One logit that is not finite makes all of its row NaN, and so the log-prob of whatever is
    # drawn. Nothing asks here whether there is such a row: a device would have to be waited for.
    totals = _block_cdf(weights)[-1][:, -1] if raw else None
    if rows.truncates:
        _filter(weights, rows)
    ids, weight, total = _inverse_cdf(weights, uniform)
    logprobs = (weight.log() - total.log()).float()
    if greedy_ids is not None:
        is_greedy = rows.temperature == 0
        ids = torch.where(is_greedy, greedy_ids, ids)
        # Less itself: 0 where there is a distribution, and still NaN where there is none.
        logprobs = torch.where(is_greedy, logprobs - logprobs, logprobs)
    return Drawn(
        ids=ids,
        logprobs=logprobs,
        raw_logprobs=None if raw is None or totals is None else raw.of(ids, weights, totals),
        kept_support=_supports(weights, rows, ids) if rows.any_support else {},
    )


class _RawLogprobs:
    """What masks and temperature would destroy, kept until the token is known.

    A row with neither needs nothing: the softmax that it is drawn from is that of its logits.
    """

    def __init__(self, logits: Tensor, rows: SamplingRows, forbidden: Tensor | None) -> None:
        changed = (rows.temperature != 0) & (rows.temperature != 1)
        if forbidden is not None:
            changed |= forbidden.any(-1)
        self._changed = (changed & rows.wants_raw).nonzero().flatten()
        self._logprobs = torch.log_softmax(logits[self._changed], -1)

    def of(self, ids: Tensor, weights: Tensor, totals: Tensor) -> Tensor:
        """Return [n] for ``ids`` [n], drawn by ``weights`` [n, V] that made ``totals`` [n]."""
        weight = weights.gather(1, ids.unsqueeze(1)).squeeze(1).double()
        found = (weight.log() - totals.log()).float()
        changed_ids = ids[self._changed].unsqueeze(1)
        found[self._changed] = self._logprobs.gather(1, changed_ids).squeeze(1)
        return found


def _filter(weights: Tensor, rows: SamplingRows) -> None:
    """Set to 0 what top-k, top-p and min-p leave out of ``weights`` [n, V]."""
    has_weights = weights[:, 0] >= 0.0  # which NaN is not, and it stands in all of a row or nowhere
    chosen = (rows.filters & has_weights).nonzero().flatten()
    keep_support(weights, chosen, top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p)


def _supports(weights: Tensor, rows: SamplingRows, ids: Tensor) -> dict[int, bytes]:
    """Return what is left to draw from in each row that wants it; of a greedy one, its token."""
    wanted = rows.wants_support.nonzero().flatten()
    kept = (weights[wanted] > 0).cpu().numpy()
    greedy = (rows.temperature[wanted] == 0).tolist()
    tokens = ids[wanted].tolist()
    return {
        row: encode([token] if is_point else np.flatnonzero(mask))
        for row, mask, is_point, token in zip(wanted.tolist(), kept, greedy, tokens, strict=True)
    }


def _block_cdf(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``weights`` [n, V] as blocks [n, m, BLOCK], their sums [n, m] and the sums' CDF."""
    num_rows, vocabulary = weights.shape
    if vocabulary % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.view(num_rows, -1, BLOCK)
    sums = blocks.sum(-1).double()
    return blocks, sums, sums.cumsum(-1)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pick by unnormalised ``weights`` [n, V]; return ids, their weights and totals, each [n]."""
    blocks, block_sums, block_cdf = _block_cdf(weights)
    total = block_cdf[:, -1]
    target = (uniform * total).unsqueeze(1)
    block = _first_above(block_cdf, target)
    every = torch.arange(len(weights), device=weights.device)
    before = block_cdf[every, block] - block_sums[every, block]
    # Below 0 by a rounding, the target would find a token of weight 0.
    target = (target - before.unsqueeze(1)).clamp_(min=0.0)
    inside = blocks[every, block].double()
    # The block's sum in fp32 may exceed its own CDF by a rounding, hence the clamp below.
    offset = _first_above(inside.cumsum(-1), target)
    ids = (block * BLOCK + offset).clamp_(max=weights.shape[1] - 1)
    return ids, inside[every, offset], total


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Return [n]: the first column of ``cdf`` [n, m] above ``target`` [n, 1], with weight > 0.

    Of a row of NaN any column.
    """
    found = torch.searchsorted(cdf, target, right=True)
    # The last column whose CDF still rises: where to land when rounding carries past the end.
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous(), right=False)
    return torch.minimum(found, last).clamp_(max=cdf.shape[1] - 1).squeeze(1)
