from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.models import weights as module
from headrace.models.weights import checksum, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 4), "b": (3, 5), "c": (7,), "d": (), "e": (0, 2)}
    shapes["f"] = (5, 128)  # whole strides of the kernel, in every type
    return {
        name: torch.randint(-9, 9, shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_weights_have_the_same_checksum_however_they_lie_in_memory(
    dtype: torch.dtype,
) -> None:
    plain = weights(dtype)
    moved = {}
    for name, tensor in reversed(plain.items()):
        shifted = torch.empty(tensor.numel() + 1, dtype=dtype)
        shifted[1:] = tensor.flatten()
        moved[name] = shifted[1:].view(tensor.shape)
    assert checksum(moved.items()) == checksum(plain.items())
    assert 0 <= checksum(plain.items()) < 2**61


def test_a_transposed_view_counts_by_its_values() -> None:
    plain = weights()
    strided = {**plain, "a": plain["a"].t().contiguous().t()}
    assert checksum(strided.items()) == checksum(plain.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mistake_changes_the_checksum(dtype: torch.dtype) -> None:
    plain = weights(dtype)
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    mistakes = {
        "left out": {name: plain[name] for name in "abcd"},
        "renamed": {("z" if name == "a" else name): t for name, t in plain.items()},
        "cast": {**plain, "b": plain["b"].to(other)},
        "reshaped": {**plain, "b": plain["b"].reshape(5, 3)},
        "transposed": {**plain, "a": plain["a"].t()},
        "rows in another order": {**plain, "b": plain["b"].flip(0)},
        "a vector turned round": {**plain, "c": plain["c"].flip(0)},
        "one value": {**plain, "d": plain["d"] + 1},
    }
    for what, tensors in mistakes.items():
        assert checksum(tensors.items()) != checksum(plain.items()), what


@given(st.integers(0, 15), st.floats(width=32, allow_nan=False))
def test_any_one_changed_value_is_seen(index: int, value: float) -> None:
    plain = weights()
    changed = {**plain, "a": plain["a"].clone()}
    changed["a"].view(-1)[index] = value
    same_bits = torch.equal(
        changed["a"].view(torch.int32), plain["a"].view(torch.int32)
    )  # -0.0 is another bit pattern
    assert (checksum(changed.items()) == checksum(plain.items())) == same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_two_changed_signs_are_seen(dtype: torch.dtype) -> None:
    plain = {"a": torch.arange(1, 17).view(4, 4).to(dtype)}
    for first in range(16):
        for second in range(first):
            changed = plain["a"].clone()
            changed.view(-1)[[first, second]] *= -1
            assert checksum({"a": changed}.items()) != checksum(plain.items()), (first, second)


@given(
    num_rows=st.integers(1, 300),
    strides=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
@settings(deadline=None)
def test_the_kernel_and_plain_operators_find_the_same_number(
    num_rows: int, strides: int, dtype: torch.dtype, seed: int
) -> None:
    words = torch.randint(
        -(2**63), 2**63 - 1, (num_rows, 16 * strides), generator=torch.Generator().manual_seed(seed)
    )
    tensor = words.view(dtype)
    assert module._is_in_strides(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_is_in_strides", lambda _: False)
        expected = checksum([("a", tensor)])
    assert checksum([("a", tensor)]) == expected


def test_two_exchanged_tensors_are_seen() -> None:
    first, second = torch.ones(3, 3), torch.full((3, 3), 2.0)
    exchanged = {"a": second, "b": first}
    assert checksum({"a": first, "b": second}.items()) != checksum(exchanged.items())


def test_bits_are_compared_and_not_numbers() -> None:
    one = torch.tensor([0.0, torch.nan, 1.0])
    assert same_bits(one, one.clone())
    assert not same_bits(one, torch.tensor([-0.0, torch.nan, 1.0]))
    assert not same_bits(one, torch.tensor([0.0, torch.nan, 1.0 + 2**-23]))
    columns = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert same_bits(columns.t(), columns.t().contiguous())
