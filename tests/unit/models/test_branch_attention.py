from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from headrace.models.branch_attention import Branch, Trees
from headrace.models.branch_kernels import MAX_KEYS, WIDEST_HEAD

NUM_SHARED = 20


def planted(
    prompts: Sequence[int], completions: Sequence[tuple[int, int]], shared: int
) -> list[list[Branch]]:
    """Return trees of prompts and (prompt, length) completions, packed as the learner does."""
    trees, start = [], shared
    for length in prompts:
        trees.append([Branch(start, length, 0, 0, shared)])
        start += length
    for owner, length in completions:
        prompt = trees[owner][0]
        trees[owner].append(Branch(start, length, prompt.start, prompt.length, shared))
        start += length
    return [[Branch(0, shared, 0, 0, 0)], *trees] if shared else trees


def num_rows(trees: Sequence[Sequence[Branch]]) -> int:
    return sum(branch.length for tree in trees for branch in tree)


def literal(query: Tensor, key: Tensor, value: Tensor, trees: list[list[Branch]]) -> Tensor:
    """All queries against all keys, of which a query sees what its branch says."""
    sees = torch.zeros(len(query), len(query), dtype=torch.bool)
    for branch in chain.from_iterable(trees):
        for row in range(branch.start, branch.start + branch.length):
            sees[row, : branch.num_shared] = True
            sees[row, branch.prefix_start : branch.prefix_start + branch.prefix_length] = True
            sees[row, branch.start : row + 1] = True
    repeats = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, keys) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, values)


Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]


def states(rows: int, heads: int, kv_heads: int, width: int) -> Inputs:
    source = torch.Generator().manual_seed(0)

    def leaf(count: int) -> Tensor:
        return torch.randn(rows, count, width, generator=source).requires_grad_()

    return leaf(heads), leaf(kv_heads), leaf(kv_heads)


def changed(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    query, key, value = inputs
    return change(query), change(key), change(value)


def gradients(mixed: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    pull = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad(mixed, inputs, pull.to(mixed.dtype)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(1, 1, 16), (4, 4, 32), (9, 3, 64), (5, 1, 48), (2, 2, 256)]
)
@pytest.mark.parametrize("shared", [0, NUM_SHARED])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_outputs_and_gradients_are_those_of_whole_matrices(
    heads: int, kv_heads: int, width: int, shared: int, num_threads: int
) -> None:
    completions = [(0, 5), (0, 1), (2, 33), (2, 16), (2, 3)]  # of the second prompt none
    trees = planted([9, 7, 1], completions, shared)
    inputs = states(num_rows(trees), heads, kv_heads, width)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = Trees(trees).attend(*inputs)
        own = gradients(found, inputs)
    finally:
        torch.set_num_threads(before)
    wide = changed(inputs, lambda x: x.detach().double().requires_grad_())
    expected = literal(*wide, trees)
    for ours, plain in zip([found, *own], [expected, *gradients(expected, wide)], strict=True):
        difference = (ours.detach().double() - plain.detach()).abs().max()
        assert difference <= 5e-6 * plain.detach().abs().max()


def test_the_number_of_threads_changes_no_bit() -> None:
    trees = planted([30, 12], [(owner, 20) for owner in (0, 0, 1, 1, 1)], NUM_SHARED)
    inputs = states(num_rows(trees), 4, 2, 32)
    found, before = [], torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        mixed = Trees(trees).attend(*inputs)
        found.append([mixed, *gradients(mixed, inputs)])
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_scores_of_hundreds_make_no_number_that_is_not_finite() -> None:
    trees = planted([4], [(0, 18)], 0)
    inputs = states(num_rows(trees), 2, 1, 16)
    query, key, value = inputs
    mixed = Trees(trees).attend(50.0 * query, 50.0 * key, value)
    assert all(bool(part.isfinite().all()) for part in [mixed, *gradients(mixed, inputs)])


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    trees = planted([6], [(0, 9)], 0)
    inputs = changed(states(num_rows(trees), 2, 2, 32), lambda x: x.detach().bfloat16())
    found = Trees(trees).attend(*inputs)
    assert found.dtype == torch.bfloat16
    exact = Trees(trees).attend(*changed(inputs, Tensor.float))
    assert torch.equal(found, exact.bfloat16())


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def serves(width: int, length: int, dtype: torch.dtype = torch.float32) -> bool:
    trees = Trees(planted([length], [], 0))
    zeros = torch.zeros(length, 2, width, dtype=dtype)
    return trees.serves(zeros, zeros, zeros)


@pytest.mark.usefixtures("one_thread")
def test_kernels_take_what_there_is_room_for() -> None:
    assert serves(32, 10)
    assert serves(WIDEST_HEAD, MAX_KEYS)
    assert not serves(24, 10)
    assert not serves(WIDEST_HEAD + 16, 10)
    assert not serves(32, MAX_KEYS + 1)
    assert not serves(32, 10, torch.float64)


@pytest.mark.usefixtures("one_thread")
def test_fewer_trees_and_heads_than_threads_are_left_to_torch() -> None:
    torch.set_num_threads(2)
    assert serves(32, 10)
    torch.set_num_threads(3)
    assert not serves(32, 10)
