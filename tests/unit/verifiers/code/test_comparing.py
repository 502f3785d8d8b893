"""Right and wrong, by exact type and declared tolerance."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.verifiers.code.comparing import Rule, same_output, same_value, seen
from headrace.verifiers.code.task import Tolerance, View
from headrace.verifiers.sandbox import canonical

EXACT = Tolerance()
CLOSE = Tolerance(absolute=1e-6)


def same(returned: object, expected: object, **options: object) -> bool:
    defaults = {"tolerance": EXACT, "tuple_is_list": False, "nan_is_nan": False}
    return same_value(returned, expected, Rule(**(defaults | options)))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, 1), (1.0, 1), ([1, 2.0], [1, 2]), ("a", "a"), (None, None), (True, True),
        ({"a": [1]}, {"a": [1]}), ({1, 2}, {2, 1}), ((1, (2,)), (1, (2,))), (b"x", b"x"),
        (math.inf, math.inf), (10**400, 10**400), ({1: 2}, {1.0: 2}), ([], []), (0.0, -0.0),
    ],
)  # fmt: skip
def test_equal_values_are_the_same(returned: object, expected: object) -> None:
    assert same(returned, expected)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, 1), (1, True), (0, False), (False, None), ("1", 1), (1, "1"), ([1], (1,)),
        ((1,), [1]), ([1], [1, 2]), ([True], [1]), ({True: 1}, {1: 1}), ({1: True}, {1: 1}),
        ({True}, {1}), (frozenset({1}), {1}), (b"a", "a"), (bytearray(b"a"), b"a"), ("", None),
        (math.nan, math.nan), (0.1 + 0.2, 0.3), (math.inf, -math.inf), (math.inf, 1e308),
        (10**400, 1.0), (1j, 1), ([[]], []), ({"a": 1, "b": 2}, {"a": 1}), ({(True,)}, {(1,)}),
    ],
)  # fmt: skip
def test_other_values_and_other_types_are_not(returned: object, expected: object) -> None:
    assert not same(returned, expected)


def test_numbers_are_compared_by_the_declared_tolerance() -> None:
    assert same(0.1 + 0.2, 0.3, tolerance=CLOSE)
    assert same([1.0000001], [1], tolerance=CLOSE)
    assert not same(1.1, 1, tolerance=CLOSE)
    assert same(1010, 1000, tolerance=Tolerance(relative=0.01))
    assert not same(1011, 1000, tolerance=Tolerance(relative=0.01))
    assert not same(10**400, 1.5, tolerance=CLOSE)
    assert not same([True], [1], tolerance=CLOSE)
    assert not same(math.inf, 5, tolerance=Tolerance(absolute=math.inf))


def test_a_tuple_is_a_list_and_nan_is_nan_only_where_declared() -> None:
    assert same((1, (2, 3)), [1, [2, 3]], tuple_is_list=True)
    assert same([math.nan], [math.nan], nan_is_nan=True)
    assert not same([math.nan], [1.0], nan_is_nan=True)


def test_depth_is_no_failure() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert not same(deep, [deep])


@pytest.mark.parametrize(
    ("written", "expected", "how"),
    [
        (b"5\n", "5", "lines"), (b"5  \r\n6\r\n\n\n", "5\n6", "lines"), (b"", "", "lines"),
        (b"1 2\n3", "1\n2 3\n", "tokens"), (b"5\n", "5\n", "exact"),
        ("é".encode(), "é", "lines"),
    ],
)  # fmt: skip
def test_output_is_the_same_but_for_what_is_declared(
    written: bytes, expected: str, how: str
) -> None:
    assert same_output(written, expected, how, EXACT)


@pytest.mark.parametrize(
    ("written", "expected", "how"),
    [
        (b"5", "6", "lines"), (b" 5", "5", "lines"), (b"5\nextra", "5", "lines"),
        (b"debug\n5", "5", "lines"), (b"5 ", "5", "exact"), (b"1 2", "12", "tokens"),
        (b"\xff", "\ufffd", "lines"), (b"5.0", "5", "lines"), (b"", "5", "lines"),
        (b"5\n\n6", "5\n6", "lines"),
    ],
)  # fmt: skip
def test_other_output_is_wrong(written: bytes, expected: str, how: str) -> None:
    assert not same_output(written, expected, how, EXACT)


def test_numbers_that_are_written_may_be_close_where_declared() -> None:
    assert same_output(b"x 0.33333333 1e0\n", "x 0.333333334 1", "lines", CLOSE)
    assert not same_output(b"x 0.34", "x 0.33", "lines", CLOSE)
    assert not same_output(b"nan", "inf", "lines", CLOSE)
    assert not same_output(b"1 2", "1\n2", "lines", CLOSE)
    assert same_output(b"1 2.0000000001", "1\n2", "tokens", CLOSE)
    assert not same_output(b"0x10", "16", "lines", CLOSE)
    assert not same_output(b"1" * 5000, "1" * 4999 + "2", "lines", CLOSE)


def test_views_are_applied_in_order_and_fail_as_a_wrong_value() -> None:
    assert seen([2, 1, 1], [View(name="set"), View(name="sorted")]) == [1, 2]
    with pytest.raises(ValueError, match=r"sorted\(\) of what was returned raises TypeError"):
        seen([1, "a"], [View(name="sorted")])
    with pytest.raises(ValueError, match=r"int\(\)"):
        seen("9" * 10_000, [View(name="int")])


def test_a_set_of_items_that_were_made_to_collide_is_refused_at_once() -> None:
    modulus = 2**61 - 1
    with pytest.raises(ValueError, match="equal hashes"):
        seen([k * modulus for k in range(50_000)], [View(name="set")])
    assert seen([7] * 50_000, [View(name="set")]) == {7}


built_in = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, math.nan, "", "1"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner)
        | st.dictionaries(st.sampled_from(["1", 1, True, None]), inner, max_size=2)
        | st.sets(st.sampled_from([0, False, 1, True, "1"]), max_size=2)
    ),
    max_leaves=4,
)


@given(built_in, built_in)
def test_what_is_the_same_by_default_is_equal_for_python_and_symmetric(
    one: object, other: object
) -> None:
    assert same(one, other) == same(other, one)
    assert not same(one, other) or one == other


@given(built_in)
def test_a_value_without_nan_is_the_same_as_its_copy(value: object) -> None:
    copy = canonical.decode(canonical.encode(value))
    assert same(copy, value, nan_is_nan=True)
