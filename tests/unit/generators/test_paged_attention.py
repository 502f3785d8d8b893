"""Reading the cache block by block gives what reading every row's own sequence gives."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.generators.torch_engine.paged_attention import BlockTable, DecodeAttention

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

    from headrace.models.decoder_config import DecoderConfig

SIZE = 4
NUM_BLOCKS = 24


def literal(cache: KVCache, query: Tensor, blocks: list[int], length: int) -> Tensor:
    """[heads, head_dim] of one row: softmax over its own sequence of ``length`` tokens."""
    keys, values = (
        part[blocks].transpose(0, 1).flatten(1, 2)[:, :length].double()
        for part in (cache._keys[0], cache._values[0])
    )
    repeats = len(query) // len(keys)
    out = []
    for head, row in enumerate(query.double()):
        scores = keys[head // repeats] @ row / len(row) ** 0.5
        out.append(scores.softmax(0) @ values[head // repeats])
    return torch.stack(out)


def attend(config: DecoderConfig, rows: list[list[int]], lengths: list[int], seed: int) -> None:
    """Compare one decode step over ``rows`` of block numbers with the literal version."""
    torch.manual_seed(seed)
    cache = KVCache(config, SIZE, torch.float32, torch.device("cpu"))
    cache.ensure(NUM_BLOCKS, NUM_BLOCKS)
    for tensor in (cache._keys[0], cache._values[0]):
        tensor.normal_()
    width = max(map(len, rows))
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    counts = torch.tensor([len(row) for row in rows])
    attention = DecodeAttention(
        cache,
        config,
        BlockTable(table, counts, SIZE),
        torch.tensor(lengths) - 1,
        torch.tensor([row[-1] for row in rows]),
    )
    query = torch.randn(len(rows), config.num_heads, config.head_dim)
    key, value = torch.randn(2, len(rows), config.num_kv_heads, config.head_dim)
    found = attention(0, query, key, value)
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        expected = literal(cache, query[at], row, length)
        torch.testing.assert_close(found[at].double(), expected, atol=1e-5, rtol=1e-5)


def drawn_rows(source: random.Random) -> list[list[int]]:
    """Rows that read common blocks anywhere but at their end, each block once in a row."""
    last = list(range(NUM_BLOCKS - 8, NUM_BLOCKS))
    rows = []
    for at in range(source.randint(1, 8)):
        beginning = source.sample(
            range(source.choice([3, 6, NUM_BLOCKS - 8])), source.randint(0, 3)
        )
        rows.append([*beginning, last[at]])
        if rows[:-1] and source.random() < 0.5:
            rows[-1] = [*source.choice(rows[:-1])[:-1], last[at]]
    return rows


@pytest.mark.parametrize("seed", range(200))
def test_any_table_of_blocks_is_read_as_row_by_row(lab: Lab, seed: int) -> None:
    source = random.Random(seed)  # noqa: S311 - test data
    rows = drawn_rows(source)
    lengths = [len(row) * SIZE - source.randrange(SIZE) for row in rows]
    attend(lab.config(), rows, lengths, seed)


def test_two_rows_may_read_one_block_after_others_that_differ(lab: Lab) -> None:
    # The same tokens were computed twice, and the second copy got another row's next block.
    attend(lab.config(), [[0, 1, 2, 3], [0, 4, 2, 5]], [16, 14], seed=0)


def test_rows_that_share_their_last_common_block_may_differ_before_it(lab: Lab) -> None:
    rows = [[0, 1, 9, 10], [0, 2, 9, 11], [0, 1, 12], [0, 2, 13]]
    attend(lab.config(), rows, [16, 16, 12, 12], seed=0)
