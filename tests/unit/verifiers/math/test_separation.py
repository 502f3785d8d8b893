"""How close to 0 a number made of roots comes: the bound holds, and equality of roots is proven."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest

from headrace.verifiers.math.algebra import BallDecider
from headrace.verifiers.math.balls import evaluate, precision
from headrace.verifiers.math.deciding import Tolerance
from headrace.verifiers.math.parser import parse
from headrace.verifiers.math.separation import separation_bits
from headrace.verifiers.math.tree import Operation, Tree, tree_of

EXACT = BallDecider(Tolerance())


def expression(text: str) -> Tree:
    return tree_of(parse(text))


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
        (r"\sqrt[3]{7+5\sqrt2}", r"1+\sqrt2"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt6}"),
        (r"\frac{1}{\sqrt2+\sqrt3+\sqrt5}", r"\frac{2\sqrt3+3\sqrt2-\sqrt{30}}{12}"),
        ("2^{1/2}", r"\sqrt2"),
        (r"(\sqrt2)^{-3}", r"\frac{\sqrt2}{4}"),
    ],
)
def test_equal_roots_are_equal_by_proof(gold: str, answer: str) -> None:
    left, right = expression(gold), expression(answer)
    difference = Operation("add", (left, Operation("neg", (right,))))
    assert separation_bits(difference) is not None
    assert EXACT.same(left, right)


def test_no_sum_of_roots_comes_as_close_to_0_as_the_bound_without_being_0() -> None:
    roots = [rf"\sqrt{{{number}}}" for number in range(2, 12)]
    pairs = list(combinations_with_replacement(roots, 2))
    sums = [expression("+".join(pair)) for pair in pairs]
    with precision(400):
        for one, other in pairwise(sums):
            difference = Operation("add", (one, Operation("neg", (other,))))
            bits = separation_bits(difference)
            value = evaluate(difference, {}, is_real=True)
            assert bits is not None
            assert bits < 300
            assert abs(value) > 2.0**-bits


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\sqrt{10^{40}+1}", "10^{20}"),
        (r"\sqrt{10}+\sqrt{17}", r"\sqrt5+\sqrt{26}"),
        (r"\sqrt{2}", r"\frac{1393}{985}"),
        (r"\sqrt[5]{32+10^{-90}}", "2"),
    ],
)
def test_roots_that_nearly_agree_are_different(gold: str, answer: str) -> None:
    assert not EXACT.same(expression(gold), expression(answer))


@pytest.mark.parametrize(
    "text", [r"\pi", r"\sin 1", "x", "2^x", r"2^{\sqrt2}", r"\ln 2", "|x|", r"\sqrt[10^{400}]{2}"]
)
def test_what_is_not_made_of_roots_has_no_bound(text: str) -> None:
    assert separation_bits(expression(text)) is None
