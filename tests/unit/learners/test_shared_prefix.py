from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.learners.packing import LEAST_SHARED, Microbatch, microbatches
from headrace.learners.selection import TrainingGroup, TrainingRow, plain_rollout
from headrace.learners.shared_prefix import SharedPrefix

COMPLETIONS = ((25, 1, 2, 3), (2, 30, 1, 1), (4, 4, 4, 28))


def packed(shared: int) -> Microbatch:
    """Three prompts that begin with the same ``shared`` tokens; a completion of one feeds none."""
    groups = [
        TrainingGroup(
            prompt_ids=(*range(shared), *(100 + 10 * number + i for i in range(rest))),
            rows=tuple(
                TrainingRow(rollout=plain_rollout(length), advantage=1.0, weight=1.0)
                for length in lengths
            ),
        )
        for number, (rest, lengths) in enumerate(zip((9, 1, 5), COMPLETIONS, strict=True))
    ]
    (batch,) = microbatches(groups, max_tokens=10_000, device=torch.device("cpu"))
    return batch


@pytest.mark.parametrize("shared", [0, LEAST_SHARED + 4])
def test_kernels_mix_what_torch_mixes_of_a_packed_micro_batch(shared: int) -> None:
    batch = packed(shared)
    assert batch.num_shared == shared
    source = torch.Generator().manual_seed(0)
    shapes = [(len(batch.input_ids), heads, 32) for heads in (4, 2, 2)]
    inputs = [torch.randn(*shape, generator=source) for shape in shapes]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert SharedPrefix(batch, [None])._trees.serves(*inputs)
        found = evaluated(batch, inputs)
    finally:
        torch.set_num_threads(before)
    # In float64 it is torch that computes.
    for ours, plain in zip(found, evaluated(batch, [x.double() for x in inputs]), strict=True):
        assert (ours.double() - plain).abs().max() <= 5e-6 * plain.abs().max()


def evaluated(batch: Microbatch, inputs: list[Tensor]) -> list[Tensor]:
    """Return what is mixed, and the gradients of a random mixture of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    mixed = SharedPrefix(batch, [None])(0, *leaves)
    pull = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1)).to(mixed.dtype)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, pull)]


def test_a_window_is_left_to_torch() -> None:
    batch = packed(0)
    inputs = [torch.randn(len(batch.input_ids), 2, 32) for _ in range(3)]
    whole, narrow = SharedPrefix(batch, [None])(0, *inputs), SharedPrefix(batch, [2])(0, *inputs)
    assert not torch.allclose(whole, narrow)
    first = torch.arange(2)
    assert torch.allclose(whole[first], narrow[first], atol=1e-5)
