"""What lies between two products, beside the same in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from headrace.generators.torch_engine.cpu.layer_kernels import (
    attention_kernel,
    norm_kernel,
    rotate_kernel,
    silu_kernel,
)
from headrace.generators.torch_engine.cpu.panels import STORAGE
from headrace.kernels.calls import Call, parallel_function
from headrace.models.decoder_config import DecoderConfig
from headrace.models.rope import apply_rope, rope_table

BLOCK = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GAPS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EPSILON, SCALE = np.array([1e-5], dtype=np.float32), np.array([0.18], dtype=np.float32)


def call(kernel: object, *arguments: int | Tensor | np.ndarray[Any, Any], threads: int = 1) -> None:
    """Run ``kernel`` with numbers, and the addresses of tensors, in order."""
    prepared = Call(kernel, 1 + len(arguments))
    for index, argument in enumerate(arguments, start=1):
        if isinstance(argument, Tensor):
            prepared[index] = argument.data_ptr()
        elif isinstance(argument, np.ndarray):
            prepared[index] = argument.ctypes.data
        else:
            prepared[index] = argument
    prepared.run(threads)


def assert_near(found: Tensor, expected: Tensor) -> None:
    gap = GAPS[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=gap, atol=gap)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 9])
@pytest.mark.parametrize("has_delta", [False, True])
def test_a_norm_adds_what_a_layer_found_and_divides_by_the_root_of_the_mean_square(
    dtype: torch.dtype, num_rows: int, *, has_delta: bool
) -> None:
    residual, delta = drawn(num_rows, 48) * 3, drawn(num_rows, 48, seed=1, dtype=dtype)
    weight, out = drawn(48, seed=2, dtype=dtype), torch.zeros(num_rows, 48, dtype=dtype)
    added = residual + delta.float() if has_delta else residual.clone()
    kernel = norm_kernel(48, storage=STORAGE[dtype])
    call(kernel, num_rows, residual, delta if has_delta else 0, weight, out, EPSILON)
    assert torch.equal(residual, added)
    assert_near(out, functional.rms_norm(added, (48,), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_open_as_silu_does(dtype: torch.dtype) -> None:
    inputs = drawn(7, 96, dtype=dtype) * 8
    inputs[0, :6] = torch.tensor([0.0, -0.0, 60.0, -60.0, -100.0, 100.0])
    out = torch.zeros(7, 48, dtype=dtype)
    call(silu_kernel(storage=STORAGE[dtype]), 7, 48, inputs, out)
    gate, up = inputs.float().chunk(2, dim=1)
    assert_near(out, functional.silu(gate) * up)


@given(
    numbers=st.lists(st.floats(-87, 88, width=32), min_size=16, max_size=16),
)
@settings(deadline=None)
def test_the_exponential_in_gates_is_right_to_two_units_in_the_last_place(
    numbers: list[float],
) -> None:
    # silu(-x) * (-1 / x) is 1 / (1 + e^x): what an exponential is there for.
    gate = -torch.tensor([numbers])
    inputs, out = torch.cat((gate, torch.ones(1, 16)), dim=1), torch.zeros(1, 16)
    call(silu_kernel(storage=STORAGE[torch.float32]), 1, 16, inputs, out)
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    torch.testing.assert_close(out.double(), exact, rtol=6e-7, atol=1e-37)


def test_what_is_not_a_number_stays_so() -> None:
    inputs, out = torch.ones(1, 32), torch.zeros(1, 16)
    inputs[0, 3], inputs[0, 20], inputs[0, 5] = math.nan, math.nan, math.inf
    call(silu_kernel(storage=STORAGE[torch.float32]), 1, 16, inputs, out)
    assert out[0, [3, 4]].isnan().all()
    assert out[0, 5] == math.inf
    assert out[0, 6].isfinite()


@dataclass
class Paged:
    """Sequences in a cache whose blocks lie anywhere."""

    lengths: list[int]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        needed = [-(-length // BLOCK) for length in self.lengths]
        order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(3))
        self.table = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int64)
        used = 0
        for row, count in enumerate(needed):
            self.table[row, :count] = order[used : used + count]
            used += count
        blocks = len(order)
        self.keys = torch.zeros(blocks, self.kv_heads, self.head_dim, BLOCK, dtype=self.dtype)
        self.values = torch.zeros(blocks, self.kv_heads, BLOCK, self.head_dim, dtype=self.dtype)

    def fill(self) -> None:
        self.keys.copy_(drawn(*self.keys.shape, seed=4))
        self.values.copy_(drawn(*self.values.shape, seed=5))

    def sequence(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """[kv_heads, length, head_dim] keys and values of one row, in fp32."""
        blocks = self.table[row, : -(-length // BLOCK)]
        keys = self.keys[blocks].float().permute(1, 0, 3, 2).flatten(1, 2)
        values = self.values[blocks].float().permute(1, 0, 2, 3).flatten(1, 2)
        return keys[:, :length], values[:, :length]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_keys_turn_by_position_and_go_where_the_table_says(
    dtype: torch.dtype, *, has_norm: bool
) -> None:
    heads, kv_heads, dim = 4, 2, 32
    paged = Paged([40, 20], kv_heads, dim, dtype)
    config = DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 5,
            "hidden_size": heads * dim,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "max_position_embeddings": 64,
        }
    )
    cos, sin = rope_table(config)
    positions, sequences = torch.tensor([0, 17, 39, 5, 19]), torch.tensor([0, 0, 0, 1, 1])
    inputs = drawn(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = drawn(2, dim, seed=7, dtype=dtype)
    queries = torch.zeros(5, heads, dim)
    kernel = rotate_kernel(dim, has_norm=has_norm, storage=STORAGE[dtype])
    call(
        kernel, 5, heads, kv_heads, inputs, positions, sequences, paged.table, paged.table.shape[1],
        cos, sin, queries, paged.keys, paged.values, SCALE, EPSILON, norms[0], norms[1],
    )  # fmt: skip
    parts = inputs.float().view(5, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    query, key, value = parts
    if has_norm:
        query = functional.rms_norm(query, (dim,), norms[0].float(), 1e-5)
        key = functional.rms_norm(key, (dim,), norms[1].float(), 1e-5)
    turned = apply_rope(query, cos[positions], sin[positions]) * 0.18
    torch.testing.assert_close(queries, turned, rtol=3e-6, atol=3e-6)
    key = apply_rope(key, cos[positions], sin[positions])
    blocks, slots = paged.table[sequences, positions // BLOCK], positions % BLOCK
    assert_near(paged.keys[blocks, :, :, slots], key)
    assert_near(paged.values[blocks, :, slots], value)
    assert int((paged.values != 0).any(-1).sum()) == 5 * kv_heads, "nothing else is touched"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 1, 9, 30])
@pytest.mark.parametrize("head_dim", [32, 96])
def test_every_query_mixes_what_it_may_see_of_its_own_sequence(
    dtype: torch.dtype, repeats: int, window: int | None, head_dim: int
) -> None:
    kv_heads = 2
    paged = Paged([70, 16, 1], kv_heads, head_dim, dtype)
    paged.fill()
    positions, sequences = torch.tensor([69, 0, 31, 15, 32, 0]), torch.tensor([0, 0, 0, 1, 0, 2])
    queries = drawn(6, kv_heads * repeats, head_dim) * 0.3
    found = torch.zeros(6, kv_heads * repeats, head_dim, dtype=dtype)
    kernel = attention_kernel(head_dim, repeats, storage=STORAGE[dtype])
    call(
        kernel, 6, kv_heads, queries, positions, sequences, paged.table, paged.table.shape[1],
        paged.keys, paged.values, found, window or 1 << 40, threads=2,
    )  # fmt: skip
    for row, (position, sequence) in enumerate(
        zip(positions.tolist(), sequences.tolist(), strict=True)
    ):
        keys, values = paged.sequence(sequence, position + 1)
        first = 0 if window is None else max(position + 1 - window, 0)
        query = queries[row].view(kv_heads, repeats, head_dim)
        weights = torch.softmax(query @ keys[:, first:].transpose(1, 2), dim=-1)
        assert_near(found[row], (weights @ values[:, first:]).flatten(0, 1).to(dtype))


def test_scores_far_apart_leave_the_largest_alone() -> None:
    paged = Paged([40], 1, 32, torch.float32)
    paged.fill()
    paged.keys *= 300
    queries, found = drawn(1, 1, 32), torch.zeros(1, 1, 32)
    where = torch.tensor([39]), torch.tensor([0])
    kernel = attention_kernel(32, 1, storage=STORAGE[torch.float32])
    call(
        kernel, 1, 1, queries, *where, paged.table, paged.table.shape[1],
        paged.keys, paged.values, found, 1 << 40,
    )  # fmt: skip
    keys, values = paged.sequence(0, 40)
    assert_near(found[0], torch.softmax(queries[0] @ keys[0].T, dim=-1) @ values[0])


def test_a_query_that_is_not_finite_spoils_its_own_row_alone() -> None:
    paged = Paged([40, 40], 1, 32, torch.float32)
    paged.fill()
    queries, found = drawn(2, 1, 32), torch.zeros(2, 1, 32)
    queries[0, 0, 5] = math.nan
    where = torch.tensor([39, 39]), torch.tensor([0, 1])
    kernel = attention_kernel(32, 1, storage=STORAGE[torch.float32])
    call(
        kernel, 2, 1, queries, *where, paged.table, paged.table.shape[1],
        paged.keys, paged.values, found, 1 << 40,
    )  # fmt: skip
    assert found[0].isnan().any()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("length", [40, 48])
def test_the_lowest_scores_of_all_hide_nothing_and_show_nothing_hidden(length: int) -> None:
    paged = Paged([length], 1, 32, torch.float32)
    paged.fill()
    paged.keys[:, :, 0] = 1.0
    queries, found = torch.zeros(1, 1, 32), torch.zeros(1, 1, 32)
    queries[0, 0, 0] = -1e35
    where = torch.tensor([length - 1]), torch.tensor([0])
    kernel = attention_kernel(32, 1, storage=STORAGE[torch.float32])
    call(
        kernel, 1, 1, queries, *where, paged.table, paged.table.shape[1],
        paged.keys, paged.values, found, 1 << 40,
    )  # fmt: skip
    _, values = paged.sequence(0, length)
    assert_near(found[0], values.mean(1))


def test_scores_that_overflow_spoil_their_own_row_alone() -> None:
    paged = Paged([48] * 3, 1, 32, torch.float32)
    paged.fill()
    paged.keys[paged.table[0, :3], :, 0] = 1e38
    queries, found = drawn(3, 1, 32), torch.full((3, 1, 32), 7.0)
    queries[0], queries[0, 0, 0] = 0.0, -1e38
    where = torch.full((3,), 47), torch.arange(3)
    kernel = attention_kernel(32, 1, storage=STORAGE[torch.float32])
    call(
        kernel, 3, 1, queries, *where, paged.table, paged.table.shape[1],
        paged.keys, paged.values, found, 1 << 40,
    )  # fmt: skip
    assert found[0].isnan().all()
    for row in (1, 2):
        keys, values = paged.sequence(row, 48)
        assert_near(found[row], torch.softmax(queries[row] @ keys[0].T, dim=-1) @ values[0])


def test_a_division_by_zero_spoils_its_own_row_alone() -> None:
    # An error in a kernel would leave its other rows as they were, or wait for Python for ever.
    residual, out = drawn(9, 48), torch.full((9, 48), 7.0)
    residual[3] = 0
    kernel = norm_kernel(48, storage=STORAGE[torch.float32])
    call(kernel, 9, residual, 0, torch.ones(48), out, np.zeros(1, dtype=np.float32))
    assert out[3].isnan().all()
    others = [row for row in range(9) if row != 3]
    assert_near(out[others], functional.rms_norm(residual[others], (48,), eps=0.0))


def test_kernels_run_on_the_threads_of_torch() -> None:
    run = parallel_function()
    assert run is not None, "torch's OpenMP was not found"
    residual, weight, out = drawn(500, 48), torch.ones(48), torch.zeros(500, 48)
    kernel = norm_kernel(48, storage=STORAGE[torch.float32])
    alone = out.clone()
    call(kernel, 500, residual, 0, weight, alone, EPSILON)
    call(kernel, 500, residual, 0, weight, out, EPSILON, threads=2)
    assert torch.equal(out, alone)
