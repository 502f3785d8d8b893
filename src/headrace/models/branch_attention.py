"""Attention over sequences that branch from others, differentiable, as one kernel each way.

Torch's own way pads sequences, gathers what each branches from and copies heads into place: some
hundred operators a layer and as many passes over memory, for products that are small. The kernels
read rows where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.kernels.calls import Call
from headrace.kernels.vectors import LANES
from headrace.models.branch_kernels import (
    MAX_KEYS,
    WIDEST_HEAD,
    branch_backward_kernel,
    branch_kernel,
)


class Branch(NamedTuple):
    """One sequence of packed tokens, which sees itself causally and other rows whole."""

    start: int
    """Its first row."""
    length: int
    prefix_start: int
    prefix_length: int
    """Of the sequence that it continues; 0 for none."""
    num_shared: int
    """Rows, of those that lie first, that it sees."""

    @property
    def num_keys(self) -> int:
        """Keys that its last token sees."""
        return self.num_shared + self.prefix_length + self.length


class Trees:
    """All sequences of a pass, by what they branch from; see `serves`."""

    def __init__(self, trees: Sequence[Sequence[Branch]]) -> None:
        """Each tree: a sequence and what continues it. Every row is in one sequence."""
        branches = list(chain.from_iterable(trees))
        self.num_sequences, self.num_trees = len(branches), len(trees)
        self.num_shared = max((branch.num_shared for branch in branches), default=0)
        self.num_keys = max((branch.num_keys for branch in branches), default=0)
        self._sequences = np.array(branches, dtype=np.int64)
        self._starts = np.array([*accumulate(map(len, trees), initial=0)], dtype=np.int64)
        self.sequences: int = self._sequences.ctypes.data
        self.starts: int = self._starts.ctypes.data

    def serves(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether kernels take these; [N, heads or kv_heads, head_dim] each.

        Not where threads would have nothing to do: the backward pass is divided by trees and heads.
        """
        size = query.shape[-1]
        fits = size % LANES == 0 and size <= WIDEST_HEAD and 0 < self.num_keys <= MAX_KEYS
        is_divided = self.num_trees * key.shape[1] >= torch.get_num_threads()
        return (fits and is_divided) and all(
            type(states) is Tensor
            and states.device.type == "cpu"
            and states.dtype in {torch.float32, torch.bfloat16}
            for states in (query, key, value)
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [N, heads, head_dim], in the dtype of ``query``; computed in fp32."""
        states = (query.float(), key.float(), value.float())
        mixed: Tensor = _BranchAttention.apply(*states, self)  # type: ignore[no-untyped-call]
        return mixed.to(query.dtype)


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives the context no public type
        query: Tensor,
        key: Tensor,
        value: Tensor,
        trees: Trees,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        num_rows, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        out, statistics = torch.empty_like(query), query.new_empty(2, heads * num_rows)
        scale = np.array([head_dim**-0.5], dtype=np.float32)
        call = Call(branch_kernel(), 13)
        call[1], call[2], call[3] = trees.num_sequences, trees.sequences, kv_heads
        for index, tensor in enumerate((query, key, value, out, statistics), start=4):
            call[index] = tensor.data_ptr()
        call[9], call[10] = num_rows, scale.ctypes.data
        call[11], call[12] = head_dim, heads // kv_heads
        call.run(torch.get_num_threads(), _num_vectors(query, trees, products=2))
        ctx.save_for_backward(query, key, value, statistics)
        ctx.trees, ctx.scale = trees, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401 - as above
        query, key, value, statistics = ctx.saved_tensors
        trees: Trees = ctx.trees
        num_rows, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        gradient = gradient.contiguous()
        found = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        shared = key.new_zeros(2, trees.num_trees, trees.num_shared, kv_heads, head_dim)
        call = Call(branch_backward_kernel(), 19)
        call[1], call[2], call[3] = trees.num_trees, trees.starts, trees.sequences
        call[4], call[10], call[11] = kv_heads, num_rows, ctx.scale.ctypes.data
        for index, tensor in enumerate((query, key, value, gradient, statistics), start=5):
            call[index] = tensor.data_ptr()
        for index, tensor in enumerate((*found, shared), start=12):
            call[index] = tensor.data_ptr()
        call[16], call[17], call[18] = trees.num_shared, head_dim, heads // kv_heads
        call.run(torch.get_num_threads(), _num_vectors(query, trees, products=5))
        if trees.num_shared:
            for total, parts in zip(found[1:], shared, strict=True):
                total[: trees.num_shared] += parts.sum(0)
        return *found, None


def _num_vectors(query: Tensor, trees: Trees, *, products: int) -> int:
    """Return about how many operations on vectors so many products take."""
    return products * query.numel() * trees.num_keys // LANES
