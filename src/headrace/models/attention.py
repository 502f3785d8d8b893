"""Attention over packed sequences: what the prefill, the reference and the learner have in common.

Sequences lie one after another in a packed ``[N, ...]``. Attention itself runs on a padded
``[B, L, ...]``, since that is what torch's kernels take; everything else in the decoder never sees
a padded token. Sequences are padded together in runs of similar length, so that one long sequence
does not make all others as long. Grouped queries are folded into the query axis, so keys are never
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

MAX_PADDING = 2.0
"""Cells of a padded run for each real token, at most."""

MAX_HELD_KEYS = 256
"""Up to so many keys, the weights of attention are held for the backward pass on a processor."""


def alike_runs(lengths: Sequence[int]) -> list[slice]:
    """Cut ``lengths``, best sorted, into runs that may be padded together; see `MAX_PADDING`."""
    runs: list[slice] = []
    start = longest = total = 0
    for index, length in enumerate(lengths):
        padded = max(longest, length) * (index + 1 - start)
        if index > start and padded > MAX_PADDING * (total + length):
            runs.append(slice(start, index))
            start, longest, total = index, 0, 0
        longest, total = max(longest, length), total + length
    return [*runs, slice(start, len(lengths))] if lengths else runs


class AttentionMask:
    """Which keys each query sees. One tensor for all layers: each one's backward keeps its mask."""

    def __init__(self, sees: Tensor) -> None:
        """``sees`` is boolean, [B or 1, T, S]; every query must see a key."""
        self._sees = sees
        self._additive: dict[tuple[int, torch.dtype], Tensor] = {}

    def additive(self, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return [B or 1, 1, repeats * T, S]: 0 where a query sees a key, -inf elsewhere."""
        key = (repeats, dtype)
        if key not in self._additive:
            mask = torch.zeros(self._sees.shape, dtype=dtype, device=self._sees.device)
            mask.masked_fill_(~self._sees, -torch.inf)
            self._additive[key] = mask.unsqueeze(1).repeat(1, 1, repeats, 1)
        return self._additive[key]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask | None) -> Tensor:
    """Return [B, T, H, D] for ``query`` of that shape and ``key``, ``value`` [B, S, K, D].

    Query head h reads key head h // (H / K).
    """
    rows, length, heads, width = query.shape
    kv_heads = key.shape[2]
    repeats = heads // kv_heads
    folded = query.reshape(rows, length, kv_heads, repeats, width).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, repeats * length, width)
    additive = None if mask is None else mask.additive(repeats, query.dtype)
    mixed = _mixed(folded, key.transpose(1, 2), value.transpose(1, 2), additive)
    unfolded = mixed.view(rows, kv_heads, repeats, length, width).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(rows, length, heads, width)


def _mixed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return [B, K, T, D] for ``query`` of that shape and ``key``, ``value`` [B, K, S, D]."""
    is_short = query.device.type == "cpu" and key.shape[2] <= MAX_HELD_KEYS
    if not is_short or mask is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    if torch.is_autocast_enabled("cpu"):
        # As it does for torch's own; it does not know this one.
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast("cpu", enabled=False):  # or its scores would be rounded as well
        mixed: Tensor = _HeldAttention.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
    return mixed


class _HeldAttention(torch.autograd.Function):
    """Attention whose weights are held instead of computed again, for sequences that are short.

    Torch's own makes blocks of hundreds of queries and keys, and on a processor its backward pass
    in bf16 takes ten times what these five products of whole sequences take.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives the context no public type
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
    ) -> Tensor:
        queries, keys, values = (part.flatten(0, 1) for part in (query, key, value))
        scale = query.shape[-1] ** -0.5
        # In fp32 up to the weights, which are rounded once: scores of some hundreds would be off
        # by whole units in bf16, and those before scaling may be more than fp16 holds.
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = torch.bmm(queries.to(wide), keys.to(wide).transpose(1, 2))
        scores = scores.view(*query.shape[:3], key.shape[2])
        weights = scores.mul_(scale).add_(mask).softmax(dim=-1).to(query.dtype).flatten(0, 1)
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.scale, ctx.shape = scale, query.shape
        return torch.bmm(weights, values).view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401 - as above
        queries, keys, values, weights = ctx.saved_tensors
        rows, kv_heads = ctx.shape[:2]
        of_mixed = gradient.flatten(0, 1)
        of_weights = torch.bmm(of_mixed, values.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)  # noqa: SLF001 - autograd's own
        of_scores.mul_(ctx.scale)
        found = (
            torch.bmm(of_scores, keys),
            torch.bmm(of_scores.transpose(1, 2), queries),
            torch.bmm(weights.transpose(1, 2), of_mixed),
        )
        of_query, of_key, of_value = (part.view(rows, kv_heads, *part.shape[1:]) for part in found)
        return of_query, of_key, of_value, None


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Return [..., T, S], True where a query [..., T] may see a key [..., S] by position alone."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)


class Padding:
    """Moves packed rows [N, ...] into a padded [B, L, ...] and back. Differentiable both ways.

    A padding cell has no gradient: it holds another row's values, and what is kept never reads it.
    """

    def __init__(self, lengths: Sequence[int], *, offset: int = 0, device: torch.device) -> None:
        """Sequence b has ``lengths[b]`` rows; the first one starts at packed row ``offset``."""
        self.lengths = tuple(lengths)
        self.shape = (len(self.lengths), max(self.lengths, default=0))
        sizes = torch.tensor(self.lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes + offset
        columns = torch.arange(self.shape[1])
        is_real = columns < sizes.unsqueeze(1)
        # A padding cell repeats the first row of all; nothing that is kept ever reads it.
        rows = torch.where(is_real, starts.unsqueeze(1) + columns, offset)
        self._gather = rows.flatten().to(device)
        self._scatter = is_real.flatten().nonzero().flatten().to(device)
        self._span = slice(offset, offset + sum(self.lengths))
        self._is_full = len(set(self.lengths)) <= 1

    def pad(self, packed: Tensor) -> Tensor:
        """Return [B, L, ...] of ``packed`` [N, ...]; padding cells hold some finite row."""
        if self._is_full:
            return packed[self._span].reshape(*self.shape, *packed.shape[1:])
        padded: Tensor = _MoveRows.apply(packed, self._gather, self._scatter, self._span)  # type: ignore[no-untyped-call]
        return padded.reshape(*self.shape, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Return the real rows of ``padded`` [B, L, ...] as [sum(lengths), ...]."""
        flat = padded.flatten(0, 1)
        if self._is_full:
            return flat
        real: Tensor = _MoveRows.apply(flat, self._scatter, None, self._scatter)  # type: ignore[no-untyped-call]
        return real


class _MoveRows(torch.autograd.Function):
    """``rows.index_select(0, index)`` for an ``index`` that names every kept row once.

    Autograd's own backward adds row by row, since it cannot know that; this one copies. The
    gradient of the rows at ``target`` is that of the output, or of its rows at ``source``; all
    other rows have none.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives the context no public type
        rows: Tensor,
        index: Tensor,
        source: Tensor | None,
        target: Tensor | slice,
    ) -> Tensor:
        ctx.shape, ctx.source, ctx.target = rows.shape, source, target
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401 - as above
        moved = gradient if ctx.source is None else gradient.index_select(0, ctx.source)
        gradient_of_rows = gradient.new_zeros(ctx.shape)
        gradient_of_rows[ctx.target] = moved
        return gradient_of_rows, None, None, None


class PackedCausal:
    """An `Attention`: every sequence sees itself causally and nothing else."""

    def __init__(
        self,
        lengths: Sequence[int],
        windows: Sequence[int | None],
        device: torch.device | None = None,
    ) -> None:
        """``lengths`` of the packed sequences in order; ``windows`` by layer, as in the config."""
        device = device or torch.device("cpu")
        self.runs = alike_runs(lengths)
        self.paddings = [
            Padding(lengths[run], offset=sum(lengths[: run.start]), device=device)
            for run in self.runs
        ]
        self._windows = tuple(windows)
        # Right padding under a causal mask: no real query ever sees a padding cell.
        self._masks = [
            {window: _causal(padding.shape[1], window, device) for window in set(self._windows)}
            for padding in self.paddings
        ]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attention`."""
        window = self._windows[layer]
        parts = [
            padding.unpad(
                attend(padding.pad(query), padding.pad(key), padding.pad(value), masks[window])
            )
            for padding, masks in zip(self.paddings, self._masks, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _causal(length: int, window: int | None, device: torch.device) -> AttentionMask:
    columns = torch.arange(length, device=device)
    return AttentionMask(visible(columns, columns, window).unsqueeze(0))


def positions_of(lengths: Sequence[int]) -> Tensor:
    """Return [N]: 0, 1, ... within each packed sequence."""
    return torch.cat([torch.arange(length) for length in (*lengths, 0)])
