"""Asserts become data: what is called with what, and what must come back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.verifiers.code import checks as checks_module
from headrace.verifiers.code.checks import read_checks
from headrace.verifiers.code.task import CallTest, Reference, Tolerance, View, literal

HUMANEVAL = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate([1.0, 2.0], 0.3) == True
    assert candidate("a" * 3) == "aaa"
    # a comment
    assert True, "This prints if this assert fails 1 (good for debugging!)"
    for x, y in [(1, 2), (3, 4)]:
        assert candidate(x) == y
"""

EVALPLUS = """
import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float)

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match

def check(candidate):
    inputs = [[[1, 2], 3], [[], 0]]
    results = [[1, 2, 3], 0.5]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""


def one(text: str) -> CallTest:
    checks = read_checks(text)
    assert not checks.unreadable, checks.unreadable
    (test,) = checks.tests
    return test


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("assert f(1) == 2", (1,), 2),
        ("assert 2 == f(1)", (1,), 2),
        ("assert f(1, 'a') == [1, 'a']", (1, "a"), [1, "a"]),
        ("assert f(-1) == -2", (-1,), -2),
        ("assert f((1, 2)) == (2, 1)", ((1, 2),), (2, 1)),
        ("assert f({'a': {1, 2}}) == {'b': None}", ({"a": {1, 2}},), {"b": None}),
        ("assert f()", (), True),
        ("assert not f(3)", (3,), False),
        ("assert f(3) is None", (3,), None),
        ("assert f(10**20) == 2**70", (10**20,), 2**70),
        ("assert f([0] * 3) == list(range(3))", ([0] * 3,), [0, 1, 2]),
        ("assert f([i * i for i in range(4) if i % 2]) == 1", ([1, 9],), 1),
        (
            "assert f([i for i in range(9) if i > 2 and i % 2 != 0 or i == 0]) == 1",
            ([0, 3, 5, 7],),
            1,
        ),
        ("assert f(1 if 2 in [2] else 3) == (4 < 5 < 6)", (1,), True),
        ("print('hello')\nassert f(1) == 1", (1,), 1),
        ("if 1 < 2:\n    assert f(1) == 1\nelse:\n    assert f(2) == 2", (1,), 1),
        ("x = [1, 2]\ny = len(x)\nassert f(x) == y", ([1, 2],), 2),
        ("r = f(1)\nassert r == 5", (1,), 5),
        ("assert f(float('inf')) == math.inf", (math.inf,), math.inf),
        ("assert f('a,b'.split(',')) == 'ab'.upper()", (["a", "b"],), "AB"),
        ("assert f(b'x') == b'y'", (b"x",), b"y"),
    ],
)
def test_an_assert_of_literals_is_arguments_and_an_expected_value(
    text: str, arguments: tuple[object, ...], expected: object
) -> None:
    test = one(text)
    assert (test.function, test.arguments) == ("f", arguments)
    assert test.expected == expected
    assert type(test.expected) is type(expected)


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        ("assert abs(f(2) - 1.5) < 1e-6", Tolerance(absolute=1e-6)),
        ("assert 1e-6 > abs(1.5 - f(2))", Tolerance(absolute=1e-6)),
        ("assert math.fabs(f(2) - 1.5) <= 0.1", Tolerance(absolute=0.1)),
        ("assert math.isclose(f(2), 1.5, rel_tol=0.001)", Tolerance(relative=0.001)),
        ("assert math.isclose(1.5, f(2))", Tolerance(relative=1e-9)),
        ("assert f(2) == pytest.approx(1.5, abs=0.5)", Tolerance(absolute=0.5, relative=1e-6)),
        ("assert np.allclose(f(2), 1.5)", Tolerance(absolute=1e-8, relative=1e-5)),
    ],
)
def test_a_tolerance_in_an_assert_is_the_tests_own(text: str, tolerance: Tolerance) -> None:
    test = one(text)
    assert (test.arguments, test.expected, test.tolerance) == ((2,), 1.5, tolerance)


def test_what_an_assert_does_with_the_returned_value_is_done_outside() -> None:
    test = one("assert sorted(set(f([2, 1]))) == [1, 2]")
    assert test.views == (View(name="set"), View(name="sorted"))
    assert one("assert round(f(1), 2) == 0.33").views == (View(name="round", arguments=(2,)),)


def test_humanevals_check_is_followed_into_its_loops() -> None:
    checks = read_checks(HUMANEVAL, entry_point="has_close")
    assert not checks.unreadable
    assert [(test.arguments, test.expected) for test in checks.tests] == [
        (([1.0, 2.0], 0.3), True), (("aaa",), "aaa"), ((1,), 2), ((3,), 4)]  # fmt: skip
    assert {test.function for test in checks.tests} == {"has_close"}


def test_evalplus_assertions_are_read_with_the_tolerance_that_they_imply() -> None:
    checks = read_checks(EVALPLUS, entry_point="g")
    assert not checks.unreadable
    exact, close = checks.tests
    assert (exact.arguments, exact.expected, exact.tolerance) == (([1, 2], 3), [1, 2, 3], None)
    assert close.tolerance == Tolerance(absolute=1e-6, relative=1e-7)


@pytest.mark.parametrize(
    "text",
    [
        "assert f(1) == g(1)",  # two unknown functions
        "assert f(1) != 2",
        "assert f(1) > 2",
        "assert f(x) == 2",
        "assert f(1, key=2) == 3",
        "assert f(open('/etc/passwd').read()) == 1",
        "assert f(__import__('os').getpid()) == 1",
        "assert f(().__class__) == 1",
        "assert f('a' * 10**9) == 1",
        "assert f(9 ** 9 ** 9) == 1",
        "assert f(1 << 10**9) == 1",
        "assert f(list(range(10**9))) == 1",
        "assert f([1, 2][7]) == 1",
        "assert f(f(1)) == 1",
        "assert f(1).real == 1",
        "assert dict(f(1)) == {1: 2}",  # keys of the policy's choice, in a dict that is made here
        "assert [f(1), f(2)] == [1, 2]",
        "assert f(1) == 1 == 1",
        "assert False",
        "while True:\n    assert f(1) == 1",
        "try:\n    f(1)\nexcept ValueError:\n    pass",
        "with x:\n    assert f(1) == 1",
        "x = []\nx.append(1)\nassert f(x) == 1",
        "def f(x):\n    return x\nassert f(1) == 1",
        "for i in range(10**7):\n    assert f(i) == i",
        "assert f(" + "(" * 500 + ")" * 500 + ") == 1",
        "not python",
        "assert f('\0') ==",
    ],
)
def test_what_cannot_be_followed_is_refused_and_never_guessed(text: str) -> None:
    checks = read_checks(text)
    assert checks.unreadable or not checks.tests


def test_an_assert_that_cannot_be_read_leaves_the_others() -> None:
    checks = read_checks("assert f(1) == 1\nassert f(x) == 2\nassert f(3) == 3")
    assert [test.expected for test in checks.tests] == [1, 3]
    (line,) = checks.unreadable
    assert line == "line 2: a name whose value is not known: x"


def test_after_a_statement_that_may_have_changed_something_nothing_is_read() -> None:
    checks = read_checks("x = [1]\nx.append(2)\nassert f(x) == 2")
    assert not checks.tests
    assert len(checks.unreadable) == 1


def test_a_failed_assignment_leaves_no_old_value() -> None:
    checks = read_checks("x = 1\nx = unknown\nassert f(x) == 1\nassert f(2) == 2")
    assert [test.arguments for test in checks.tests] == [(2,)]


def test_endless_data_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_STEPS", 50)
    checks = read_checks("for i in range(1000):\n    assert f(i) == i")
    assert len(checks.tests) < 51
    assert checks.unreadable


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)


@given(values, values)
def test_any_value_written_as_python_writes_it_is_read_back(
    argument: object, value: object
) -> None:
    test = one(f"assert f({literal(argument)}) == {literal(value)}")
    assert literal(test.arguments) == literal((argument,))
    assert literal(test.expected) == literal(value)


@given(st.text(alphabet="assert f(x)=123[]{}'\"+-*/.,:\n \\", max_size=60))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    read_checks(text)


def test_a_function_of_the_texts_own_is_a_reference_where_it_is_what_is_expected() -> None:
    checks = read_checks(
        "import math\ndef ref(x):\n    return x\ndef check(candidate):\n"
        "    assert candidate(1) == ref(1)\n    assert candidate(ref(2)) == 2\n",
        entry_point="f",
    )
    (test,) = checks.tests
    assert isinstance(test.expected, Reference)
    assert (test.expected.function, test.expected.arguments) == ("ref", (1,))
    assert "def ref(x):" in test.expected.source
    assert len(checks.unreadable) == 1
