"""The output layer among ranks that compute the same rollouts: each takes some of the tokens.

Every rank has the whole output weight and the hidden states of all tokens. Owns: what comes out is
the same on all of them, the gradient of the hidden states is whole, and that of the output weight
is a part, which `RankLayout.take_gradients` adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.objectives.logprobs import Support, linear_logprobs


@dataclass(frozen=True, slots=True)
class SplitHead:
    """`linear_logprobs` by the ranks of a group, each for its part of the tokens."""

    group: dist.ProcessGroup

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        support: Support | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [N] of all tokens; arguments are `linear_logprobs`'s."""
        count, rank = self.group.size(), self.group.rank()
        width = -(-len(ids) // count)
        own = slice(min(rank * width, len(ids)), min((rank + 1) * width, len(ids)))
        spread: Tensor = _Spread.apply(hidden, self.group)  # type: ignore[no-untyped-call]
        logprobs, entropy = linear_logprobs(
            spread[own],
            weight,
            ids[own],
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            support=None if support is None else _restricted(support, own),
            entropy_gradient=entropy_gradient,
        )
        both: Tensor = _Joined.apply(torch.stack((logprobs, entropy)), width, self.group)  # type: ignore[no-untyped-call]
        logprobs, entropy = both[:, : len(ids)]
        return logprobs, entropy if entropy_gradient else entropy.detach()


def share_lookup(embedding: nn.Embedding, count: int) -> None:
    """Let the gradient of the rows that ``embedding`` looks up count once among ``count`` ranks.

    For an embedding that is the output weight too: all ranks look up the same tokens, and the
    gradients of the two uses are added up over them together.
    """

    def scale(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        scaled: Tensor = _Scaled.apply(output, 1.0 / count)  # type: ignore[no-untyped-call]
        return scaled

    embedding.register_forward_hook(scale)


def _restricted(support: Support, rows: slice) -> Support:
    inside = (support.rows >= rows.start) & (support.rows < rows.stop)
    return Support(rows=support.rows[inside] - rows.start, ids=support.ids[inside])


class _Spread(torch.autograd.Function):
    """The same hidden states on every rank; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401 - torch gives the context no public type
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - as above
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None


class _Joined(torch.autograd.Function):
    """Columns [K, width or fewer] of each rank, side by side; each gets the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401 - as above
        ctx.columns = slice(group.rank() * width, group.rank() * width + own.shape[1])
        padded = own.new_zeros(len(own), width)
        padded[:, : own.shape[1]] = own
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - as above
        return gradient[:, ctx.columns], None, None


class _Scaled(torch.autograd.Function):
    """Changes the gradient alone."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:  # noqa: ANN401 - as above
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - as above
        return gradient * ctx.factor, None
