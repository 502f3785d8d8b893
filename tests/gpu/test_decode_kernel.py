from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_lab import SHAPE, slow_paged_decode
from torch import Tensor

from headrace.generators.torch_engine.cuda.table_attention import (
    PagedDecode,
    TableAttention,
    inputs_of,
)
from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.generators.torch_engine.paged_attention import BlockTable, DecodeAttention
from headrace.models.decoder_config import DecoderConfig

# Of how Triton's interpreter uses numpy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LENGTHS = (1, 16, 17, 64, 65, 131)
GAPS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of mixed values of about 1: a rounding or two of the format."""


class Case:
    """Rows of ``lengths`` tokens, the last of which is new, over a cache of random content."""

    def __init__(
        self,
        device: torch.device,
        *,
        lengths: tuple[int, ...] = LENGTHS,
        dtype: torch.dtype = torch.float32,
        head_dim: int = 64,
        repeats: int = 2,
        window: int | None = None,
        block_size: int = 16,
    ) -> None:
        shape: dict[str, Any] = {
            **SHAPE,
            "model_type": "llama" if window is None else "mistral",
            "sliding_window": window,
            "head_dim": head_dim,
            "num_key_value_heads": 2,
            "num_attention_heads": 2 * repeats,
            "num_hidden_layers": 1,
        }
        self.config = DecoderConfig.from_hf(shape)
        self.device, self.window, self.block_size = device, window, block_size
        self.lengths = torch.tensor(lengths)
        self.num_blocks = -(-self.lengths // block_size)
        widest = int(self.num_blocks.max())
        total = len(lengths) * widest
        self.cache = KVCache(self.config, block_size, dtype, device)
        self.cache.ensure(total, total)
        for part in self.cache.read(0, slice(None)):
            part.copy_(self.noise(*part.shape))
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
        self.table = order.view(len(lengths), widest)
        self.query = self.noise(len(lengths), 2 * repeats, head_dim)
        self.key, self.value = (self.noise(len(lengths), 2, head_dim) for _ in range(2))

    def noise(self, *shape: int) -> Tensor:
        seed = sum(shape)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, self.cache.dtype)

    def mixed_by(self, mix: PagedDecode) -> Tensor:
        """Through a `TableAttention`, which stores the new tokens first."""
        positions = self.lengths - 1
        targets = self.table.gather(1, (self.num_blocks - 1).unsqueeze(1)).squeeze(1)
        numbers = torch.stack((positions, positions, targets))
        inputs = inputs_of(numbers, self.table, self.device)
        attention = TableAttention(self.cache, self.config, inputs, mix)
        return attention(0, self.query, self.key, self.value).float()

    def mixed_by_torch(self) -> Tensor:
        table, positions = self.table.to(self.device), (self.lengths - 1).to(self.device)
        num_blocks = self.num_blocks.to(self.device)
        blocks = BlockTable(table, num_blocks, self.block_size)
        targets = table.gather(1, (num_blocks - 1).unsqueeze(1)).squeeze(1)
        attention = DecodeAttention(self.cache, self.config, blocks, positions, targets)
        return attention(0, self.query, self.key, self.value).float()


def assert_alike(case: Case, mix: PagedDecode) -> None:
    found, gap = case.mixed_by(mix), GAPS[case.cache.dtype]
    assert (found - case.mixed_by(slow_paged_decode)).abs().max() <= gap
    # The torch classes round scores to the format, so they are the ones further off.
    assert (found - case.mixed_by_torch()).abs().max() <= 3 * gap


@pytest.mark.parametrize(
    ("dtype", "head_dim", "repeats", "window"),
    [
        (torch.float32, 64, 1, None),
        (torch.float32, 4, 8, 7),  # filled up to the smallest product
        (torch.float32, 256, 2, None),  # of which a tile holds fewer tokens
        (torch.float16, 80, 3, 1),  # filled up to a power of two
        (torch.bfloat16, 64, 17, 64),  # more query heads than the smallest product has rows
        (torch.bfloat16, 128, 7, None),
    ],
    ids=str,
)
def test_the_kernel_mixes_what_the_torch_classes_mix(
    kernel_device: torch.device,
    paged_decode: PagedDecode,
    dtype: torch.dtype,
    head_dim: int,
    repeats: int,
    window: int | None,
) -> None:
    case = Case(kernel_device, dtype=dtype, head_dim=head_dim, repeats=repeats, window=window)
    assert_alike(case, paged_decode)


@pytest.mark.parametrize(("most_splits", "window"), [(1, 100), (3, None), (16, 100)])
def test_long_rows_are_cut_into_splits_beside_short_ones(
    kernel_device: torch.device,
    paged_decode: PagedDecode,
    monkeypatch: pytest.MonkeyPatch,
    most_splits: int,
    window: int | None,
) -> None:
    from headrace.generators.torch_engine.cuda import decode_kernel  # noqa: PLC0415 - needs triton

    monkeypatch.setattr(decode_kernel, "MOST_SPLITS", most_splits)
    assert_alike(Case(kernel_device, lengths=(700, 3, 400), window=window), paged_decode)


@pytest.mark.parametrize("block_size", [1, 128])
def test_blocks_may_be_smaller_and_larger_than_a_tile(
    kernel_device: torch.device, paged_decode: PagedDecode, block_size: int
) -> None:
    assert_alike(Case(kernel_device, block_size=block_size), paged_decode)


def test_what_a_row_does_not_own_cannot_leak_into_it(
    kernel_device: torch.device, paged_decode: PagedDecode
) -> None:
    case = Case(kernel_device, lengths=(5, 40))
    clean = case.mixed_by(paged_decode)
    # Row 0 holds five cells of one block; all else that its line of the table names is not its.
    row = case.table[0].tolist()
    for part in case.cache.read(0, slice(None)):
        part[row[1:]] = torch.nan
        part[row[0], :, 5:] = torch.nan
    assert torch.equal(case.mixed_by(paged_decode), clean)


def test_scores_too_large_for_an_exponential_do_not_overflow(
    kernel_device: torch.device, paged_decode: PagedDecode
) -> None:
    case = Case(kernel_device)
    case.query *= 300.0
    found = case.mixed_by(paged_decode)
    assert found.isfinite().all()
    assert (found - case.mixed_by(slow_paged_decode)).abs().max() <= 1e-3
