"""Log-probabilities of chosen tokens under softmax(logits / temperature), and entropies.

Owns: the temperature divides logits, never log-probabilities, and softmax is taken in fp32 (in
float64 for float64). `linear_logprobs` is the learner's hot path: it fuses the output layer with
the softmax, and the [N, V] logits never exist. Where tokens were drawn from a part of the
vocabulary (top-p and the like) it sums over that part alone, so that learner and generator mean the
same distribution. Does not pick positions: N holds the tokens whose log-prob is wanted and no
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

VOCABULARY_TILE = 4096
"""Columns of logits held at a time. Tiles of this size stay near the cache between the passes
over them; narrower ones make the matrix products slow."""

_NEVER = float("-inf")
"""The logit of a token outside the support: its exponential is exactly 0, and `torch.exp` is four
times as slow on large finite numbers of which it is 0 too."""
_LOWEST = -1e30
"""In place of `_NEVER` where 0 times it must be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The tokens that each of N tokens was drawn from: S pairs of row and id, in any order.

    Every row has at least the token that was drawn.
    """

    rows: Tensor
    """[S] int64 in [0, N)."""
    ids: Tensor
    """[S] int64 in [0, V)."""


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
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float,
    chunk_tokens: int = 1024,
    support: Support | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `selected_logprobs` of ``hidden @ weight.T`` without ever holding those logits.

    ``hidden``: [N, D]; ``weight``: [V, D]; ``ids``: [N] int64; ``temperature`` > 0. With a
    ``support`` the softmax and the entropy are over its tokens alone. The matrix products run in
    the dtype of ``hidden`` (weight tiles are cast to it), softmax and every sum over tiles in fp32
    or wider; gradients have the dtype of their tensor. Log-probs [N] are differentiable in
    ``hidden`` and ``weight``, once; so is the entropy [N] with ``entropy_gradient``, which costs
    one more pass over every tile, backward. Working memory is two tiles of
    [chunk_tokens, VOCABULARY_TILE], three with a support.
    """
    plan = _Plan(1.0 / temperature, chunk_tokens, support, entropy_gradient)
    outputs: tuple[Tensor, Tensor] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids, plan
    )
    return outputs


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is no tensor to differentiate."""

    scale: float
    chunk_tokens: int
    support: Support | None
    entropy_gradient: bool


def _softmax_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


_Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, None, None]


class _LinearLogprobs(torch.autograd.Function):
    """Saves vectors [N] alone; the backward pass computes each tile of logits again.

    With z = logits / temperature, p = softmax(z), H the entropy, and g and h the incoming gradients
    of log-prob and entropy, dz = g (onehot(id) - p) - h p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives the context no public type
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        logits = _TiledLogits(hidden, weight, ids, plan)
        selected, log_total, maximum, entropy = _forward_statistics(logits)
        ctx.save_for_backward(hidden, weight, ids, log_total + maximum, entropy)
        ctx.plan = plan
        if not plan.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        # Selected minus maximum first: both may be large, and their difference is the small number.
        return selected - maximum - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> _Gradients:  # noqa: ANN401 - as above
        of_logprob, of_entropy = gradients
        if of_logprob is None and of_entropy is None:
            return None, None, None, None
        hidden, weight, ids, normaliser, entropy = ctx.saved_tensors
        logits = _TiledLogits(hidden, weight, ids, ctx.plan)
        incoming = _Incoming(logits, normaliser, of_logprob, of_entropy, entropy)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden, grad_weight = _input_gradients(
            logits, incoming, needs_hidden=needs_hidden, needs_weight=needs_weight
        )
        return grad_hidden, grad_weight, None, None


class _TiledLogits:
    """The scaled logits, one [rows, columns] tile at a time in one reused buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, ids: Tensor, plan: _Plan) -> None:
        self.hidden, self.weight, self.ids, self.scale = hidden, weight, ids, plan.scale
        self.dtype = _softmax_dtype(hidden)
        self._chunk_tokens = plan.chunk_tokens
        self.tile_size = min(plan.chunk_tokens, len(hidden)) * min(VOCABULARY_TILE, len(weight))
        # One allocation for all tiles: fresh pages for each would cost as much as the softmax.
        self._products = hidden.new_empty(self.tile_size)
        self._scaled = self._products.to(self.dtype)
        self._kept = None if plan.support is None else _KeptTiles(plan.support, self)

    @property
    def is_partial(self) -> bool:
        """Whether a support leaves out tokens, whose logit is `_NEVER`."""
        return self._kept is not None

    def columns(self) -> Iterator[slice]:
        """Yield the vocabulary, tile by tile."""
        for start in range(0, len(self.weight), VOCABULARY_TILE):
            yield slice(start, min(start + VOCABULARY_TILE, len(self.weight)))

    def rows(self) -> Iterator[slice]:
        """Yield the tokens, chunk by chunk."""
        for start in range(0, len(self.hidden), self._chunk_tokens):
            yield slice(start, min(start + self._chunk_tokens, len(self.hidden)))

    def tile(self, rows: slice, columns: slice, weight_tile: Tensor) -> Tensor:
        """Return the scaled logits [rows, columns]; valid until the next call, may be changed."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        products = self._products[: shape[0] * shape[1]].view(shape)
        torch.mm(self.hidden[rows], weight_tile.T, out=products)
        scaled = self._scaled[: products.numel()].view(shape)
        if scaled.data_ptr() != products.data_ptr():
            scaled.copy_(products)
        # Scaled in fp32, after the product: in bf16 it would round a second time.
        if self.scale != 1.0:
            scaled.mul_(self.scale)
        return scaled if self._kept is None else self._kept.mask(scaled, rows, columns)

    def place(self, rows: Tensor | int, columns: Tensor | int) -> Tensor | int:
        """Return the number of the tile that a logit lies in."""
        num_chunks = -(-len(self.hidden) // self._chunk_tokens)
        return columns // VOCABULARY_TILE * num_chunks + rows // self._chunk_tokens

    def chosen(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Return row and column, within the tile, of every id that lies in it."""
        local = self.ids[rows] - columns.start
        inside = ((local >= 0) & (local < columns.stop - columns.start)).nonzero().squeeze(-1)
        return inside, local[inside]


class _KeptTiles:
    """A support, sorted by the tile that each pair lies in."""

    def __init__(self, support: Support, logits: _TiledLogits) -> None:
        places = torch.as_tensor(logits.place(support.rows, support.ids))
        ordered = torch.argsort(places, stable=True)
        self._rows, self._ids = support.rows[ordered], support.ids[ordered]
        last = logits.place(max(len(logits.hidden) - 1, 0), len(logits.weight) - 1)
        counts = torch.bincount(places, minlength=int(last) + 1)
        # One transfer to the host; every tile's part is known from then on.
        self._ends = counts.cumsum(0).tolist()
        self._place = logits.place
        self._shifts = logits.hidden.new_full((logits.tile_size,), _NEVER, dtype=logits.dtype)

    def mask(self, tile: Tensor, rows: slice, columns: slice) -> Tensor:
        """Give every token of ``tile`` that is not kept the logit `_NEVER`, in place."""
        place = int(self._place(rows.start, columns.start))
        part = slice(self._ends[place - 1] if place else 0, self._ends[place])
        kept = (self._rows[part] - rows.start, self._ids[part] - columns.start)
        shifts = self._shifts[: tile.numel()].view(tile.shape)
        # One addition over the tile: it keeps what 0 is added to.
        shifts[kept] = 0.0
        tile.add_(shifts)
        shifts[kept] = _NEVER
        return tile


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
            tile = logits.tile(rows, columns, weight_tile)
            inside, local = logits.chosen(rows, columns)
            selected[rows].index_copy_(0, inside, tile[inside, local])
            raised = torch.maximum(maximum, tile.amax(dim=1))
            shift = maximum - raised
            exponential = exponentials[: tile.numel()].view(tile.shape)
            torch.exp(tile.sub_(raised.unsqueeze(1)), out=exponential)
            if logits.is_partial:
                tile.clamp_(min=_LOWEST)
            weighted = shift.exp() * (weighted + shift * total)
            weighted += torch.linalg.vecdot(exponential, tile)
            total = shift.exp() * total + exponential.sum(dim=1)
            maximum = raised
        maxima[rows], log_total[rows] = maximum, total.log()
        entropy[rows] = total.log() - weighted / total
    return selected, log_total, maxima, entropy


class _Incoming:
    """Turns tiles of logits into -dz, up to a factor of each row.

    Without a gradient of the entropy that is softmax - onehot, and the factor holds g: it is left
    to the small operands, which saves a pass over every tile. With one it is
    p (g + h H) - h (-p log p) - g onehot, and the factor is the scale alone.
    """

    def __init__(
        self,
        logits: _TiledLogits,
        normaliser: Tensor,
        of_logprob: Tensor | None,
        of_entropy: Tensor | None,
        entropy: Tensor,
    ) -> None:
        self._normaliser, self._logits = normaliser, logits
        zero = torch.zeros_like(normaliser)
        direct = zero if of_logprob is None else of_logprob.to(logits.dtype)
        self._of_entropy = None if of_entropy is None else of_entropy.to(logits.dtype)
        if self._of_entropy is None:
            self.factor = (direct * -logits.scale).unsqueeze(1)
            self._direct = torch.ones_like(zero)
        else:
            self.factor = torch.full_like(zero, -logits.scale).unsqueeze(1)
            self._direct, self._both = direct, direct + self._of_entropy * entropy

    def residual(self, rows: slice, columns: slice, weight_tile: Tensor) -> Tensor:
        """Return [rows, columns] in the softmax's dtype; valid until the next tile."""
        tile = self._logits.tile(rows, columns, weight_tile)
        tile = tile.sub_(self._normaliser[rows].unsqueeze(1)).exp_()
        if self._of_entropy is not None:
            # entr(p) = -p log p is 0 at p = 0, where the product would be 0 * -inf.
            drawn = torch.special.entr(tile).mul_(self._of_entropy[rows].unsqueeze(1))
            tile.mul_(self._both[rows].unsqueeze(1)).sub_(drawn)
        inside, local = self._logits.chosen(rows, columns)
        tile[inside, local] -= self._direct[rows][inside]
        return tile


def _input_gradients(
    logits: _TiledLogits, incoming: _Incoming, *, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients in hidden [N, D] and weight [V, D], None where not needed."""
    hidden, weight, factor = logits.hidden, logits.weight, incoming.factor
    scaled_hidden = (hidden * factor).to(hidden.dtype)
    grad_hidden = torch.zeros_like(hidden, dtype=logits.dtype)
    grad_weight = torch.empty_like(weight) if needs_weight else None
    for columns in logits.columns():
        weight_tile = weight[columns].to(hidden.dtype)
        grad_tile = torch.zeros_like(weight_tile, dtype=logits.dtype)
        for rows in logits.rows():
            # Before the cast: near p = 1 the difference p - 1 has digits that bf16 p has not.
            residual = incoming.residual(rows, columns, weight_tile).to(hidden.dtype)
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
