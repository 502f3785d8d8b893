"""The packed sets of token ids: nothing is lost, nothing else is read, and they are small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kept_support import MAX_ID, decode, encode

wide = st.sets(st.integers(0, MAX_ID), max_size=60)
dense = st.tuples(st.integers(0, 10**6), st.sets(st.integers(0, 300), max_size=250)).map(
    lambda drawn: {drawn[0] + offset for offset in drawn[1]}
)


@given(wide | dense)
def test_a_set_is_read_back_as_it_was(ids: set[int]) -> None:
    assert decode(encode(sorted(ids))).tolist() == sorted(ids)


@pytest.mark.parametrize(
    ("ids", "encoded"),
    [
        ([], ""),
        ([0], "00"),
        ([63], "7e"),
        ([64], "8001"),
        ([5, 6, 300], "0a00a502"),
        ([MAX_ID], "feffffff0f"),
        # Ten neighbours: twice 1, plus 1 for bits, then nine of them.
        (list(range(1, 11)), "03ff01"),
    ],
)
def test_the_format_is_the_documented_one(ids: list[int], encoded: str) -> None:
    assert encode(ids).hex() == encoded


@given(wide | dense)
def test_no_set_takes_more_than_gaps_or_bits_would(ids: set[int]) -> None:
    spans = max(ids) - min(ids) if ids else 0
    assert len(encode(sorted(ids))) <= min(5 * len(ids), 5 + (spans + 7) // 8)


def test_a_nucleus_of_most_of_a_vocabulary_takes_a_bit_for_each_token() -> None:
    ids = np.flatnonzero(np.random.default_rng(0).random(49_152) < 0.8)
    assert len(encode(ids)) <= 49_152 // 8 + 2


@pytest.mark.parametrize("ids", [[-1], [3, 3], [4, 2], [1, MAX_ID + 1]])
def test_what_is_no_set_of_ids_in_order_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="must increase strictly from 0"):
        encode(ids)


@pytest.mark.parametrize(
    "encoded", ["80", "0a80", "0a8000", "0300", "03ff0100", "ffffffffff7f", "fe" * 9]
)
def test_bytes_that_no_set_has_are_refused(encoded: str) -> None:
    with pytest.raises(ValueError, match="token ids"):
        decode(bytes.fromhex(encoded))


@given(st.binary(max_size=12))
def test_any_bytes_are_a_set_or_refused(encoded: bytes) -> None:
    try:
        ids = decode(encoded)
    except ValueError:
        return
    assert encode(ids) == encoded
