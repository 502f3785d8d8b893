"""Matrices in panels: products of every shape, bits of a row, and what is held."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import codegen

from headrace.generators.torch_engine.cpu.panels import (
    Panels,
    QuantizedPanels,
    can_hold,
    can_hold_int8,
)
from headrace.generators.torch_engine.cpu.product_kernels import OUTPUTS
from headrace.kernels import calls
from headrace.kernels.amx import may_use_tiles
from headrace.models.weights import content

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GAPS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@given(
    num_rows=st.integers(1, 300),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([32, 64, 96, 160])),
    parts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    is_wide=st.booleans(),
    has_bias=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_products_are_those_of_plain_matrices_whatever_their_shape(
    num_rows: int,
    inputs: int,
    parts: list[int],
    dtype: torch.dtype,
    *,
    is_wide: bool,
    has_bias: bool,
) -> None:
    if not can_hold(dtype, CPU, inputs):
        assert dtype != torch.float32
        inputs += 1
    weights = [drawn(n, inputs, seed=n, dtype=dtype) for n in parts]
    biases = [drawn(n, seed=n + 1, dtype=dtype) for n in parts] if has_bias else []
    hidden = drawn(num_rows, inputs, seed=7, dtype=dtype)
    out_dtype = torch.float32 if is_wide else dtype
    panels = Panels(dtype, out_dtype)
    panels.load(weights, biases)
    assert panels.holds(weights, biases)
    found = panels.multiply(hidden)
    expected = hidden.double() @ torch.cat(weights).double().T
    if has_bias:
        expected += torch.cat(biases).double()
    assert found.dtype == out_dtype
    assert relative_gap(found, expected) < GAPS[out_dtype]
    given_out = torch.full_like(found, torch.nan)
    assert torch.equal(panels.multiply(hidden, given_out), found)
    assert torch.equal(given_out, found)


def of_any_bits(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of every kind: small ones, infinities, NaN with any payload."""
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    limits, generator = torch.iinfo(whole), torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=whole).view(
        dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [[64, 32, 32], [40], [33, 7, 90], [1], [5, 64]])
@pytest.mark.parametrize("inputs", [4, 20, 96])
def test_contents_are_those_of_every_part_whatever_its_bits(
    parts: list[int], inputs: int, dtype: torch.dtype
) -> None:
    weights = [of_any_bits(n, inputs, seed=n, dtype=dtype) for n in parts]
    biases = [drawn(n, seed=n, dtype=dtype) for n in parts]
    biases[0][0], biases[-1][-1] = math.nan, -0.0
    panels = Panels(dtype, dtype)
    panels.load(weights, biases)
    assert panels.contents() == [content(part) for part in (*weights, *biases)]
    panels.load(weights, [])
    assert panels.contents() == [content(part) for part in weights]


@pytest.mark.parametrize("dtype", DTYPES)
def test_contents_tell_of_any_word_that_is_not_held_as_it_came(dtype: torch.dtype) -> None:
    parts = [of_any_bits(n, 12, seed=n, dtype=dtype) for n in (32, 20)]
    panels = Panels(dtype, dtype)
    panels.load(parts, [])
    expected, words = [content(part) for part in parts], panels._store.panels
    for output in range(52):
        for word in range(panels._store.words):
            # Of outputs side by side in a panel, word by word.
            panel, lane = divmod(output, OUTPUTS)
            place = (panel * panels._store.words + word) * OUTPUTS + lane
            words[place] ^= 1 << (output + word) % 31
            found = panels.contents()
            assert found is not None
            assert [a == b for a, b in zip(found, expected, strict=True)] == [
                output >= 32,
                output < 32,
            ]
            words[place] ^= 1 << (output + word) % 31
    assert panels.contents() == expected


def test_rows_that_end_inside_a_word_of_a_sum_are_compared_instead() -> None:
    panels = Panels(torch.bfloat16, torch.bfloat16)
    panels.load([weight := drawn(3, 6, seed=0, dtype=torch.bfloat16)], [])
    assert panels.contents() is None
    assert panels.holds([weight], [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_stored_in_half_the_bytes_is_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    # Products of two such numbers are exact in fp32, and many lie half way between two of them.
    weight, hidden = drawn(64, 2, seed=0, dtype=dtype), drawn(200, 2, seed=1, dtype=dtype)
    weight[:, 1] = 0
    panels = Panels(dtype, dtype)
    panels.load([weight], [])
    exact = hidden[:, :1].float() * weight[:, 0].float()
    assert torch.equal(panels.multiply(hidden), exact.to(dtype))
    is_tie = exact.view(torch.int32) & 0xFFFF == 0x8000
    assert dtype != torch.bfloat16 or is_tie.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("inputs", [80, 96])
def test_the_bits_of_a_row_depend_on_that_row_alone(
    dtype: torch.dtype, inputs: int, *, is_quantized: bool
) -> None:
    if is_quantized and not can_hold_int8(dtype, CPU, inputs):
        pytest.skip("this processor has no exact products of eight bits")
    panels = (QuantizedPanels if is_quantized else Panels)(dtype, dtype)
    panels.load([drawn(70, inputs, seed=0, dtype=dtype)], [])
    hidden = drawn(61, inputs, seed=1, dtype=dtype)
    together = panels.multiply(hidden)
    for first in range(61):
        for count in (1, 2, 3, 5, 13, 30):
            rows = slice(first, min(first + count, 61))
            assert torch.equal(panels.multiply(hidden[rows]), together[rows])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spoils_its_own_rows_and_outputs_and_no_other(
    wrong: float, dtype: torch.dtype, *, is_quantized: bool
) -> None:
    if is_quantized and not can_hold_int8(dtype, CPU, 64):
        pytest.skip("this processor has no exact products of eight bits")
    weight, hidden = (drawn(n, 64, seed=n, dtype=dtype) for n in (40, 5))
    panels = (QuantizedPanels if is_quantized else Panels)(dtype, dtype)
    panels.load([weight], [])
    expected = panels.multiply(hidden)
    weight[7, 3] = hidden[2, 9] = wrong
    panels.load([weight], [])
    assert panels.holds([weight], [])
    found = panels.multiply(hidden)
    is_spoilt = torch.zeros(5, 40, dtype=torch.bool)
    is_spoilt[2] = is_spoilt[:, 7] = True
    assert torch.equal(found.isfinite(), ~is_spoilt)
    assert torch.equal(found[~is_spoilt], expected[~is_spoilt])


@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 40),
    place=st.integers(0, 10**6),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None)
def test_one_other_bit_anywhere_is_seen(
    outputs: int, inputs: int, place: int, dtype: torch.dtype
) -> None:
    if not can_hold(dtype, CPU, inputs):
        inputs += 1
    weight, bias = drawn(outputs, inputs, seed=2, dtype=dtype), drawn(outputs, seed=3, dtype=dtype)
    panels = Panels(dtype, dtype)
    panels.load([weight], [bias])
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    for tensor in (weight, bias):
        other = tensor.clone()
        other.view(whole).view(-1)[place % tensor.numel()] ^= 1
        pair = ([other], [bias]) if tensor is weight else ([weight], [other])
        assert not panels.holds(*pair)
    assert panels.holds([weight], [bias])
    assert not panels.holds([weight], [])


def test_a_matrix_of_another_shape_is_not_what_is_held() -> None:
    panels = Panels(torch.float32, torch.float32)
    assert not panels.holds([torch.zeros(3, 4)], [])
    panels.load([torch.zeros(4, 3)], [])
    assert not panels.holds([torch.zeros(3, 4)], [])
    assert not panels.holds([torch.zeros(5, 3)], [])


def test_a_load_uses_the_memory_of_the_one_before() -> None:
    panels = Panels(torch.float32, torch.float32)
    panels.load([torch.ones(40, 8)], [])
    address = panels._store.panels.data_ptr()
    panels.load([torch.zeros(40, 8)], [])
    assert panels._store.panels.data_ptr() == address
    assert not panels.multiply(torch.ones(2, 8)).any()


def test_tiles_are_used_where_linux_says_that_the_processor_has_them() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text("utf-8").split() if cpuinfo.exists() else []
    has_tiles = {"amx_tile", "amx_bf16"}.issubset(flags)
    if "NUMBA_CPU_FEATURES" in os.environ:  # as if on another processor
        assert has_tiles or not may_use_tiles()
    else:
        assert may_use_tiles() == has_tiles


WITHOUT_TILES = """
import numpy, sys, torch
from headrace.generators.torch_engine.cpu.panels import Panels
from headrace.kernels.amx import may_use_tiles
assert not may_use_tiles()
numbers = torch.from_numpy(numpy.load(sys.argv[1]))
weight, hidden = numbers[:70].bfloat16(), numbers[70:].bfloat16()
panels = Panels(torch.bfloat16, torch.float32)
panels.load([weight], [])
numpy.save(sys.argv[1], panels.multiply(hidden).numpy())
"""


def test_tiles_and_vectors_make_the_same_sums_but_for_their_order(tmp_path: Path) -> None:
    if not may_use_tiles():
        pytest.skip("this processor has no tiles")
    numbers, path = drawn(131, 96, seed=0), tmp_path / "numbers.npy"
    np.save(path, numbers.numpy())
    features = f"{codegen.get_host_cpu_features()},-amx-tile,-amx-bf16"
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": features.replace("+amx-tile,", "").replace("+amx-bf16,", ""),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", WITHOUT_TILES, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    panels = Panels(torch.bfloat16, torch.float32)
    panels.load([numbers[:70].bfloat16()], [])
    found = panels.multiply(numbers[70:].bfloat16())
    assert relative_gap(found, torch.from_numpy(np.load(path)).double()) < 1e-6


OTHER_PROCESSOR = """
import torch
from headrace.generators.torch_engine.cpu import product_kernels
from headrace.kernels import vectors
from headrace.generators.torch_engine.cpu.panels import Panels, can_hold_int8
assert not vectors.has_feature("avx512f"), "the features asked for were not taken"
assert not can_hold_int8(torch.bfloat16, torch.device("cpu"), 64)
assert (product_kernels.WIDTH, product_kernels.TALLEST) == (1, 6)
for dtype, gap in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
    weight, hidden = torch.randn(40, 64).to(dtype), torch.randn(19, 64).to(dtype)
    panels = Panels(dtype, dtype)
    panels.load([weight], [])
    assert panels.holds([weight], [])
    expected = hidden.double() @ weight.double().T
    assert (panels.multiply(hidden).double() - expected).norm() < gap * expected.norm()
"""


def test_kernels_serve_processors_with_fewer_instructions_too(tmp_path: Path) -> None:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("compiles for processors of the x86 family")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+avx,+fma,+f16c,+sse2,+sse4.1,+sse4.2",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", OTHER_PROCESSOR]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def steps_of_another_thread(num_threads: int) -> int:
    """Return how often this thread comes by while another one computes a large product."""
    panels = Panels(torch.float32, torch.float32)
    panels.load([torch.ones(2048, 2048)], [])
    hidden = torch.ones(2048, 2048)
    before, began, done = torch.get_num_threads(), threading.Event(), threading.Event()

    def compute() -> None:
        torch.set_num_threads(num_threads)
        began.set()
        panels.multiply(hidden)
        done.set()

    worker = threading.Thread(target=compute)
    worker.start()
    began.wait()
    count = 0
    while not done.is_set():
        count += 1
    worker.join()
    torch.set_num_threads(before)
    return count


@pytest.mark.parametrize("num_threads", [1, 2])
def test_other_threads_run_python_while_a_large_product_is_computed(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = steps_of_another_thread(num_threads)
    monkeypatch.setattr(calls, "MUCH_WORK", 1 << 60)
    assert shared > 2 * steps_of_another_thread(num_threads), "the interpreter was held"
