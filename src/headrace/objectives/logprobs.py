"""Log-probabilities of chosen tokens under softmax(logits / temperature), and entropies.

Owns: the temperature divides logits, never log-probabilities, and softmax is taken in fp32 (in
float64 for float64). `linear_logprobs` is the learner's hot path: it fuses the output layer with
the softmax, and the [N, V] logits never exist. Does not pick positions: N holds the tokens whose
log-prob is wanted and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

VOCABULARY_TILE = 4096
"""Columns of logits held at a time. Tiles of this size stay near the cache between the passes
over them; narrower ones make the matrix products slow."""


def selected_logprobs(logits: Tensor, ids: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-prob of ``ids`` [N] under ``logits`` [N, V], and the entropy [N], detached.

    In nats. ``temperature`` > 0 divides the logits.
    """
    scaled = logits.to(_softmax_dtype(logits)) / temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    with torch.no_grad():
        # An impossible token (-inf) adds 0 to the entropy: p = 0, and 0 * -inf must not be NaN.
        entropy = torch.special.entr(logprobs.exp()).sum(dim=-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy


def linear_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, temperature: float, chunk_tokens: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return `selected_logprobs` of ``hidden @ weight.T`` without ever holding those logits.

    ``hidden``: [N, D]; ``weight``: [V, D]; ``ids``: [N] int64; ``temperature`` > 0. The matrix
    products run in the dtype of ``hidden`` (weight tiles are cast to it), softmax and every sum
    over tiles in fp32 or wider; gradients have the dtype of their tensor. Log-probs [N] are
    differentiable in ``hidden`` and ``weight``, once; the entropy [N] is not. Working memory is
    two tiles of [chunk_tokens, VOCABULARY_TILE].
    """
    outputs: tuple[Tensor, Tensor] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids, temperature, chunk_tokens
    )
    return outputs


def _softmax_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


_Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, None, None, None]


class _LinearLogprobs(torch.autograd.Function):
    """Saves only the log-normaliser [N]; the backward pass computes each tile of logits again.

    With z = logits / temperature and g the incoming gradient, dz = g (onehot(id) - softmax(z)).
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives the context no public type
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logits = _TiledLogits(hidden, weight, ids, 1.0 / temperature, chunk_tokens)
        selected, log_total, maximum, entropy = _forward_statistics(logits)
        ctx.save_for_backward(hidden, weight, ids, log_total + maximum)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        # Selected minus maximum first: both may be large, and their difference is the small number.
        return selected - maximum - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> _Gradients:  # noqa: ANN401 - as above
        gradient = gradients[0]
        if gradient is None:
            return None, None, None, None, None
        hidden, weight, ids, normaliser = ctx.saved_tensors
        logits = _TiledLogits(hidden, weight, ids, 1.0 / ctx.temperature, ctx.chunk_tokens)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden, grad_weight = _input_gradients(
            logits, normaliser, gradient, needs_hidden=needs_hidden, needs_weight=needs_weight
        )
        return grad_hidden, grad_weight, None, None, None


class _TiledLogits:
    """The scaled logits, one [rows, columns] tile at a time in one reused buffer."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, scale: float, chunk_tokens: int
    ) -> None:
        self.hidden, self.weight, self.ids, self.scale = hidden, weight, ids, scale
        self.dtype = _softmax_dtype(hidden)
        self._chunk_tokens = chunk_tokens
        self.tile_size = min(chunk_tokens, len(hidden)) * min(VOCABULARY_TILE, len(weight))
        # One allocation for all tiles: fresh pages for each would cost as much as the softmax.
        self._products = hidden.new_empty(self.tile_size)
        self._scaled = self._products.to(self.dtype)

    def columns(self) -> Iterator[slice]:
        """Yield the vocabulary, tile by tile."""
        for start in range(0, len(self.weight), VOCABULARY_TILE):
            yield slice(start, min(start + VOCABULARY_TILE, len(self.weight)))

    def rows(self) -> Iterator[slice]:
        """Yield the tokens, chunk by chunk."""
        for start in range(0, len(self.hidden), self._chunk_tokens):
            yield slice(start, min(start + self._chunk_tokens, len(self.hidden)))

    def tile(self, rows: slice, weight_tile: Tensor) -> Tensor:
        """Return the scaled logits [rows, columns]; valid until the next call, may be changed."""
        shape = (rows.stop - rows.start, len(weight_tile))
        products = self._products[: shape[0] * shape[1]].view(shape)
        torch.mm(self.hidden[rows], weight_tile.T, out=products)
        scaled = self._scaled[: products.numel()].view(shape)
        if scaled.data_ptr() != products.data_ptr():
            scaled.copy_(products)
        # Scaled in fp32, after the product: in bf16 it would round a second time.
        return scaled if self.scale == 1.0 else scaled.mul_(self.scale)

    def chosen(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Return row and column, within the tile, of every id that lies in it."""
        local = self.ids[rows] - columns.start
        inside = ((local >= 0) & (local < columns.stop - columns.start)).nonzero().squeeze(-1)
        return inside, local[inside]


def _forward_statistics(logits: _TiledLogits) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each row, the chosen logit, log sum e^(z - max), max z and the entropy; [N] each.

    The running sums of e^(z - m) and of (z - m) e^(z - m) are moved to the new maximum m with
    every tile (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    shape = (len(logits.hidden),)
    selected, log_total, maxima, entropy = (
        torch.zeros(shape, dtype=logits.dtype, device=logits.hidden.device) for _ in range(4)
    )
    exponentials = selected.new_empty(logits.tile_size)
    for rows in logits.rows():
        maximum = torch.full_like(maxima[rows], torch.finfo(logits.dtype).min)
        total, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for columns in logits.columns():
            weight_tile = logits.weight[columns].to(logits.hidden.dtype)
            tile = logits.tile(rows, weight_tile)
            inside, local = logits.chosen(rows, columns)
            selected[rows].index_copy_(0, inside, tile[inside, local])
            raised = torch.maximum(maximum, tile.amax(dim=1))
            shift = maximum - raised
            exponential = exponentials[: tile.numel()].view(tile.shape)
            torch.exp(tile.sub_(raised.unsqueeze(1)), out=exponential)
            weighted = shift.exp() * (weighted + shift * total)
            weighted += torch.linalg.vecdot(exponential, tile)
            total = shift.exp() * total + exponential.sum(dim=1)
            maximum = raised
        maxima[rows], log_total[rows] = maximum, total.log()
        entropy[rows] = total.log() - weighted / total
    return selected, log_total, maxima, entropy


def _input_gradients(
    logits: _TiledLogits,
    normaliser: Tensor,
    gradient: Tensor,
    *,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients in hidden [N, D] and weight [V, D], None where not needed.

    A tile holds softmax - onehot; the factor -g * scale of each row is left to the small
    operands, which saves a pass over every tile.
    """
    hidden, weight = logits.hidden, logits.weight
    factor = (gradient.to(logits.dtype) * -logits.scale).unsqueeze(1)
    scaled_hidden = (hidden * factor).to(hidden.dtype)
    grad_hidden = torch.zeros_like(hidden, dtype=logits.dtype)
    grad_weight = torch.empty_like(weight) if needs_weight else None
    for columns in logits.columns():
        weight_tile = weight[columns].to(hidden.dtype)
        grad_tile = torch.zeros_like(weight_tile, dtype=logits.dtype)
        for rows in logits.rows():
            tile = logits.tile(rows, weight_tile).sub_(normaliser[rows].unsqueeze(1)).exp_()
            inside, local = logits.chosen(rows, columns)
            # Before the cast: near p = 1 the difference p - 1 has digits that bf16 p has not.
            tile[inside, local] -= 1.0
            residual = tile.to(hidden.dtype)
            if needs_hidden:
                _add_product(grad_hidden[rows], residual, weight_tile)
            if needs_weight:
                _add_product(grad_tile, residual.T, scaled_hidden[rows])
        if grad_weight is not None:
            grad_weight[columns] = grad_tile
    return (grad_hidden * factor).to(hidden.dtype) if needs_hidden else None, grad_weight


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, in one pass where the dtypes allow it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
