from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.models.weights import same_bits
from headrace.weight_sync import delta

DTYPES = {
    np.uint16: (torch.bfloat16, torch.float16),
    np.uint32: (torch.float32,),
    np.uint64: (torch.float64,),
    np.uint8: (torch.int8,),
}
"""Bits of any kind, and the dtypes that they are bits of: every NaN, every zero."""


@st.composite
def versions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tensors of one kind, of which few or many numbers differ, by little or by much."""
    word = draw(st.sampled_from(sorted(DTYPES, key=str)))
    dtype = draw(st.sampled_from(DTYPES[word]))
    shape = draw(npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=700))
    old = draw(npst.arrays(word, shape, fill=st.nothing() if np.prod(shape) < 30 else None))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
    largest = draw(st.sampled_from([1, 127, 128, 129, np.iinfo(word).max]))
    steps = random.integers(0, largest, shape, dtype=word, endpoint=True)
    signs = random.integers(0, 1, shape, endpoint=True).astype(bool)
    new = np.where(random.random(shape) < share, np.where(signs, old + steps, old - steps), old)
    return tuple(torch.from_numpy(a.copy()).view(dtype) for a in (old, new.astype(word)))


@settings(max_examples=100, deadline=None)
@given(st.lists(versions(), min_size=1, max_size=3))
def test_what_is_made_of_the_changes_is_the_new_version_bit_for_bit(
    pairs: list[tuple[Tensor, Tensor]],
) -> None:
    old = {f"w/{i}": pair[0] for i, pair in enumerate(pairs)}
    new = {f"w/{i}": pair[1] for i, pair in enumerate(pairs)}
    changes = delta.encode(old, new)
    held = {name: tensor.clone() for name, tensor in old.items()}
    delta.apply(changes, held)
    assert all(same_bits(held[name], new[name]) for name in new)
    # Never larger than what it stands for.
    assert _bytes(changes) <= _bytes(new)


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("gap", [1, 2, 254, 255, 256, 509, 510, 511, 1021])
def test_gaps_of_every_length_are_found_again(gap: int) -> None:
    old = torch.zeros(3000)
    new = old.clone()
    new[gap - 1 :: gap] = 1.0
    changes = delta.encode({"w": old}, {"w": new})
    delta.apply(changes, {"w": old})
    assert torch.equal(old, new)


def test_the_sign_of_zero_and_the_payload_of_a_nan_are_changes() -> None:
    old = torch.tensor([0x0000, 0x7FC0, 0x7FC0, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    words = torch.tensor([-0x8000, 0x7FC1, 0x7FC0, 0x3F80], dtype=torch.int16)
    changes = delta.encode({"w": old}, {"w": words.view(torch.bfloat16)})
    delta.apply(changes, {"w": old})
    assert torch.equal(old.view(torch.int16), words)


def test_nothing_changed_is_nothing_sent() -> None:
    tensors = {"a": torch.full((9,), torch.nan), "none": torch.empty(0)}
    assert delta.encode(tensors, {name: tensor.clone() for name, tensor in tensors.items()}) == {}


def test_two_bytes_are_sent_of_each_of_a_few_small_changes() -> None:
    random = torch.Generator().manual_seed(0)
    old = torch.randn(100_000, generator=random).to(torch.bfloat16)
    new = old.clone()
    chosen = torch.randperm(len(old), generator=random)[:2000]
    new.view(torch.int16)[chosen] += 1
    assert _bytes(delta.encode({"w": old}, {"w": new})) == pytest.approx(4000, rel=0.02)


def test_many_changes_are_named_by_a_bit_each() -> None:
    old = torch.zeros(8000, dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[::3] += 1
    changes = delta.encode({"w": old}, {"w": new})
    assert set(changes) == {"w/mask", "w/steps"}
    assert _bytes(changes) == 1000 + 2667


def test_a_change_that_does_not_fit_is_refused_by_name() -> None:
    changes = delta.encode({"w": torch.zeros(900)}, {"w": torch.ones(900)})
    with pytest.raises(WeightSyncError, match="the change of w does not fit"):
        delta.apply(changes, {"w": torch.zeros(800)})
    with pytest.raises(WeightSyncError, match="a change of w, which is no weight"):
        delta.apply(changes, {"v": torch.zeros(900)})
    few = delta.encode({"w": torch.zeros(900)}, {"w": torch.eye(30).view(-1)})
    with pytest.raises(WeightSyncError, match="does not fit"):
        delta.apply(few, {"w": torch.zeros(800)})
