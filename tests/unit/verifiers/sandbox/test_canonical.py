from __future__ import annotations

import math
import struct
from enum import IntEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.verifiers.sandbox.canonical import (
    DecodeError,
    EncodeError,
    Value,
    decode,
    encode,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
)
KEYS = st.recursive(
    SCALARS,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    SCALARS | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_a_value_comes_back_with_its_types_and_one_encoding(value: Value) -> None:
    data = encode(value)
    back = decode(data)
    assert encode(back) == data
    assert type(back) is type(value)
    assert repr(back) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    return st.sampled_from(
        [data[:-1], data + b"N", data[1:], data.replace(b"\0", b"\xff"), data.replace(b"T", b"i")]
    )


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | VALUES.map(encode).flatmap(damaged))
def test_no_bytes_do_anything_but_decode_to_their_own_value_or_be_refused(data: bytes) -> None:
    try:
        value = decode(data)
    except DecodeError:
        return
    assert encode(value) == data


@pytest.mark.parametrize("value", [0, -1, 127, 128, -128, -129, "\ud800", -0.0, math.inf])
def test_a_value_at_an_edge_comes_back(value: Value) -> None:
    assert repr(decode(encode(value))) == repr(value)


def test_a_number_of_five_thousand_digits_comes_back() -> None:
    assert decode(encode([10**5000, -(10**5000)])) == [10**5000, -(10**5000)]


def test_true_is_not_one_and_a_tuple_is_no_list() -> None:
    assert decode(encode(value=True)) is True
    assert encode(value=True) != encode(1)
    assert encode(1) != encode(1.0)
    assert encode((1,)) != encode([1])


def test_a_dict_keeps_its_order_and_a_set_has_none() -> None:
    assert list(decode(encode({"b": 1, "a": 2}))) == ["b", "a"]
    assert encode({"x", "y", "z"}) == encode({"z", "y", "x"})


class EqualsEverything(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Letters(str):
    __slots__ = ()


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value", [EqualsEverything(3), Letters("a"), Colour.RED, object(), print, [1, {2: Letters()}]]
)
def test_a_subclass_or_anything_else_is_refused(value: Value) -> None:
    with pytest.raises(EncodeError, match="not exactly one of the built-in types"):
        encode(value)


def test_a_value_that_contains_itself_or_doubles_is_refused_at_once() -> None:
    loop: list[Value] = []
    loop.append(loop)
    doubling: list[Value] = []
    for _ in range(90):
        doubling = [doubling, doubling]
    with pytest.raises(EncodeError, match="contains itself"):
        encode(loop)
    with pytest.raises(EncodeError, match="too large"):
        encode(doubling)


def test_depth_is_capped_on_both_sides() -> None:
    deep: Value = 0
    for _ in range(101):
        deep = [deep]
    with pytest.raises(EncodeError, match="too deeply"):
        encode(deep)
    with pytest.raises(DecodeError, match="too deeply"):
        decode(encode(deep, max_depth=200))
    with pytest.raises(DecodeError, match="too deeply"):
        decode(b"l\0\0\0\1" * 100_000 + b"N")


def test_size_is_capped_on_both_sides() -> None:
    with pytest.raises(EncodeError, match="too large"):
        encode("a" * 100, max_bytes=50)
    with pytest.raises(DecodeError, match="at most 50"):
        decode(encode("a" * 100), max_bytes=50)


LENGTH = struct.Struct(">I").pack


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too early"),
        (b"?", "no tag"),
        (b"NN", "follow"),
        (b"s" + LENGTH(2**32 - 1), "too early"),
        (b"l" + LENGTH(2**32 - 1), "elements in 0 bytes"),
        (b"s" + LENGTH(1) + b"\xff", "UTF-8"),
        (b"i" + LENGTH(2) + b"\0\1", "more bytes than it needs"),
        (b"i" + LENGTH(0), "more bytes than it needs"),
        (b"f" + struct.pack(">Q", 0x7FF8000000000001), "NaN"),
        (b"S" + LENGTH(2) + b"TF", "not in order"),
        (b"S" + LENGTH(2) + b"TT", "comes twice"),
        (b"S" + LENGTH(1) + b"l" + LENGTH(0), "no hash"),
        (b"d" + LENGTH(2) + b"TNTN", "comes twice"),
        (b"S" + LENGTH(2) + b"T" + encode(1), "comes twice"),
    ],
)
def test_what_is_no_encoding_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode(data)


def test_keys_made_to_collide_are_refused_before_they_cost_anything() -> None:
    modulus = 2**61 - 1
    collide = {k * modulus for k in range(65)}
    with pytest.raises(DecodeError, match="equal hashes"):
        decode(encode(collide))
    with pytest.raises(DecodeError, match="equal hashes"):
        decode(encode(dict.fromkeys(collide)))
    assert decode(encode(set(range(10_000)))) == set(range(10_000))
