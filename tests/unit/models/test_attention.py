from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.models.attention import (
    MAX_HELD_KEYS,
    MAX_PADDING,
    AttentionMask,
    PackedCausal,
    Padding,
    alike_runs,
    attend,
    positions_of,
    visible,
)


def literal(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """One sequence [T, heads, D], one head and one query at a time."""
    length, heads, width = query.shape
    share = heads // key.shape[1]
    out = torch.zeros_like(query)
    for head in range(heads):
        for i in range(length):
            first = 0 if window is None else max(0, i - window + 1)
            keys = key[first : i + 1, head // share]
            weights = torch.softmax(keys @ query[i, head] / math.sqrt(width), 0)
            out[i, head] = weights @ value[first : i + 1, head // share]
    return out


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 5, 7, 30]), min_size=1, max_size=6),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3]),
)
def test_packed_sequences_are_each_attended_alone(
    lengths: list[int], kv_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    query, key = torch.randn(total, 4, 8), torch.randn(total, kv_heads, 8)
    value = torch.randn(total, kv_heads, 8)
    packed = PackedCausal(lengths, [window])(0, query, key, value)
    rows = [part.split(lengths) for part in (query, key, value)]
    expected = torch.cat([literal(*one, window) for one in zip(*rows, strict=True)])
    assert torch.allclose(packed, expected, atol=1e-5)


def test_a_sequence_does_not_see_what_changes_in_another() -> None:
    lengths = [3, 5, 2]
    torch.manual_seed(0)
    states = torch.randn(3, 10, 2, 4)
    attention = PackedCausal(lengths, [None])
    before = attention(0, *states)
    states[:, :3] = 100.0
    after = attention(0, *states)
    assert torch.equal(before[3:], after[3:])
    assert not torch.equal(before[:3], after[:3])


def test_each_layer_has_its_own_window() -> None:
    states = torch.randn(3, 6, 2, 4)
    attention = PackedCausal([6], [None, 2])
    assert not torch.allclose(attention(0, *states), attention(1, *states))
    assert torch.allclose(attention(1, *states), literal(*states, 2), atol=1e-5)


@pytest.mark.parametrize("lengths", [(3, 1, 4), (2, 2), (5,)])
def test_padding_there_and_back_is_the_identity_and_its_gradient_too(
    lengths: tuple[int, ...],
) -> None:
    padding = Padding(lengths, offset=2, device=torch.device("cpu"))
    packed = torch.randn(sum(lengths) + 2, 3, requires_grad=True)
    padded = padding.pad(packed)
    assert padded.shape == (len(lengths), max(lengths), 3)
    unpadded = padding.unpad(padded)
    assert torch.equal(unpadded, packed[2:])
    unpadded.sum().backward()
    assert packed.grad is not None
    assert torch.equal(
        packed.grad, torch.tensor([0.0] * 2 + [1.0] * sum(lengths))[:, None] * torch.ones(3)
    )


@given(st.lists(st.integers(1, 2000), max_size=60), st.booleans())
def test_runs_cover_every_length_and_are_mostly_real_tokens(
    lengths: list[int], is_sorted: bool
) -> None:
    lengths = sorted(lengths) if is_sorted else lengths
    runs = alike_runs(lengths)
    assert [index for run in runs for index in range(run.start, run.stop)] == [*range(len(lengths))]
    for run in runs:
        part = lengths[run]
        assert max(part) * len(part) <= MAX_PADDING * sum(part)


def test_one_long_sequence_does_not_make_the_others_as_long() -> None:
    assert alike_runs([1500, *[167] * 63]) == [slice(0, 2), slice(2, 64)]
    assert alike_runs([188] * 64) == [slice(0, 64)]


def test_a_mask_is_made_once_for_all_layers() -> None:
    mask = AttentionMask(torch.ones(2, 3, 3).tril().bool())
    assert mask.additive(3, torch.float32) is mask.additive(3, torch.float32)
    assert mask.additive(3, torch.float32).shape == (2, 1, 9, 3)


def test_a_mask_by_row_hides_keys_of_that_row_alone() -> None:
    query, key = torch.randn(2, 1, 4, 8), torch.randn(2, 3, 2, 8)
    mask = AttentionMask(torch.tensor([[[True, False, True]], [[True, True, True]]]))
    out = attend(query, key, key, mask)
    assert torch.allclose(out[:1], attend(query[:1], key[:1, [0, 2]], key[:1, [0, 2]], None))
    assert torch.allclose(out[1:], attend(query[1:], key[1:], key[1:], None))


def test_what_is_visible_and_where_tokens_stand() -> None:
    places = torch.arange(4)
    assert visible(places, places, None).tolist() == torch.ones(4, 4).tril().bool().tolist()
    assert visible(places, places, 2).sum(1).tolist() == [1, 2, 2, 2]
    assert positions_of([2, 3]).tolist() == [0, 1, 0, 1, 2]
    assert positions_of([]).tolist() == []


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("num_keys", [5, MAX_HELD_KEYS, MAX_HELD_KEYS + 1])
def test_held_weights_give_torchs_attention_and_its_gradients(
    dtype: torch.dtype, close: float, num_keys: int
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 7, 4, 8), *(torch.randn(2, num_keys, 2, 8) for _ in range(2))]
    sees = torch.rand(2, 7, num_keys) < 0.5
    sees[..., 0] = True
    found, expected = (
        gradients_of(tensors, functools.partial(function, sees=sees), dtype)
        for function in (attended, attended_literally)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= close * other.abs().max()


def gradients_of(
    tensors: Sequence[Tensor], function: Callable[..., Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return what ``function`` makes of ``tensors`` in ``dtype``, and the gradients of a sum."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
    made = function(*leaves)
    torch.sum(made * torch.linspace(-1, 1, made.numel(), dtype=dtype).view(made.shape)).backward()
    return [
        made.detach().double(),
        *(leaf.grad.double() for leaf in leaves if leaf.grad is not None),
    ]


def attended(query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    return attend(query, key, value, AttentionMask(sees))


def attended_literally(query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    """Head by head, in float64."""
    repeats = query.shape[2] // key.shape[2]
    heads = []
    for head in range(query.shape[2]):
        keys, values = (part[:, :, head // repeats].double() for part in (key, value))
        scores = query[:, :, head].double() @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~sees, -torch.inf).softmax(dim=-1) @ values)
    return torch.stack(heads, dim=2).to(query.dtype)


def test_under_autocast_attention_of_few_keys_is_made_in_its_dtype() -> None:
    query, key = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    mask = AttentionMask(torch.ones(1, 3, 3, dtype=torch.bool).tril())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attend(query, key, key, mask)
    assert mixed.dtype == torch.bfloat16
    assert (mixed - attend(query, key, key, mask)).abs().max() < 0.05


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 0.02), (torch.float16, 0.005)])
@pytest.mark.parametrize("size", [5.0, 20.0, 60.0])
def test_scores_of_any_size_are_as_exact_as_the_weights_that_are_held(
    dtype: torch.dtype, close: float, size: float, *, is_autocast: bool
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 9, 4, 64), *(torch.randn(2, 30, 2, 64) for _ in range(2))]
    query, key, value = (
        (tensor * factor).to(dtype).to(torch.float32 if is_autocast else dtype)
        for tensor, factor in zip(tensors, (size, size, 1.0), strict=True)
    )
    sees = torch.ones(2, 9, 30, dtype=torch.bool).tril(21)
    with torch.autocast("cpu", dtype=dtype, enabled=is_autocast):
        found = attended(query, key, value, sees)
    expected = attended_literally(query.double(), key.double(), value.double(), sees)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= close * expected.abs().max()
