"""Drawing tokens: temperature, filters, and one counter-based uniform per token.

A row's token depends on its own logits, parameters, seed and position, and on nothing else in the
batch. Sampling is by inverse CDF in two stages (blocks, then inside one block, both in float64), so
that it costs three passes over the logits however large the vocabulary is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.errors import GeneratorFailure

BLOCK = 256
"""Tokens of a stage-one block: about the root of a large vocabulary."""


@dataclass(slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of n rows, as tensors [n]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    truncates: bool
    """Whether any row filters tokens."""
    any_greedy: bool
    """Whether any row has temperature 0."""
    any_scaled: bool
    """Whether any row has a temperature other than 0 and 1."""

    def at(self, rows: Tensor | slice) -> SamplingRows:
        """Return these ``rows`` alone."""
        return SamplingRows(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            truncates=self.truncates,
            any_greedy=self.any_greedy,
            any_scaled=self.any_scaled,
        )

    def to(self, device: torch.device) -> SamplingRows:
        """Return the columns on ``device``."""
        return SamplingRows(
            temperature=self.temperature.to(device),
            top_p=self.top_p.to(device),
            top_k=self.top_k.to(device),
            min_p=self.min_p.to(device),
            truncates=self.truncates,
            any_greedy=self.any_greedy,
            any_scaled=self.any_scaled,
        )


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [n] float64 in [0, 1): a hash of ``seeds`` [n] and ``positions`` [n], both int64.

    SplitMix64 (Steele, Lea and Flood 2014) at counter ``position`` of stream ``seed``.
    """
    state = seeds.numpy().astype(np.uint64)
    counter = positions.numpy().astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = state + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw(logits: Tensor, rows: SamplingRows, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids [n] and their log-probs [n] under the distribution drawn from.

    ``logits`` [n, V] are overwritten. A greedy row takes the first largest logit; its distribution
    is a point, so its log-prob is 0. Raises GeneratorFailure for logits that are not finite.
    """
    logits = logits.float()
    greedy_ids = logits.argmax(-1) if rows.any_greedy else None
    if rows.any_scaled:
        logits.div_(torch.where(rows.temperature > 0, rows.temperature, 1.0).unsqueeze(1))
    weights = torch.softmax(logits, -1)
    if rows.truncates:
        _keep_support(weights, rows)
    ids, weight, total = _inverse_cdf(weights, uniform)
    logprobs = (weight.log() - total.log()).float()
    if greedy_ids is not None:
        is_greedy = rows.temperature == 0
        ids = torch.where(is_greedy, greedy_ids, ids)
        logprobs = torch.where(is_greedy, 0.0, logprobs)
    return ids, logprobs


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pick by unnormalised ``weights`` [n, V]; return ids, their weights and totals, each [n]."""
    num_rows, vocabulary = weights.shape
    if vocabulary % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.view(num_rows, -1, BLOCK)
    block_sums = blocks.sum(-1).double()
    block_cdf = block_sums.cumsum(-1)
    total = block_cdf[:, -1]
    if not bool(total.isfinite().all()):
        msg = "the model's logits are not finite: its weights hold NaN or overflow"
        raise GeneratorFailure(msg)
    target = (uniform * total).unsqueeze(1)
    block = _first_above(block_cdf, target)
    every = torch.arange(num_rows, device=weights.device)
    before = block_cdf[every, block] - block_sums[every, block]
    # Below 0 by a rounding, the target would find a token of weight 0.
    target = (target - before.unsqueeze(1)).clamp_(min=0.0)
    inside = blocks[every, block].double()
    # The block's sum in fp32 may exceed its own CDF by a rounding, hence the clamp below.
    offset = _first_above(inside.cumsum(-1), target)
    return block * BLOCK + offset, inside[every, offset], total


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Return [n]: the first column of ``cdf`` [n, m] above ``target`` [n, 1], with weight > 0."""
    found = torch.searchsorted(cdf, target, right=True)
    # The last column whose CDF still rises: where to land when rounding carries past the end.
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous(), right=False)
    return torch.minimum(found, last).squeeze(1)


def _keep_support(weights: Tensor, rows: SamplingRows) -> None:
    """Set to 0 what top-k, then top-p, then min-p leave out of ``weights`` [n, V]."""
    filters = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    chosen = filters.nonzero().flatten()
    rows, part = rows.at(chosen), weights[chosen]
    top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]
    ordered, order = torch.sort(part, dim=-1, descending=True, stable=True)
    keep = (torch.arange(part.shape[1], device=part.device) < top_k) | (top_k == 0)
    ordered = torch.where(keep, ordered, 0.0)
    mass = ordered.double().cumsum(-1)
    # A token is kept while the mass before it has not reached top_p; the first one always is.
    keep &= (mass - ordered < top_p * mass[:, -1:]) | (top_p >= 1.0)
    keep &= ordered >= min_p * ordered[:, :1]
    keep[:, 0] = True
    weights[chosen] = part.mul_(torch.zeros_like(keep).scatter_(1, order, keep))
