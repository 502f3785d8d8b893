r"""Whatever a policy writes: no text raises or is paid by accident, and spelling changes nothing.

A deadline would measure the machine: that nothing hangs is the test's own time limit.
"""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import AnswerType
from headrace.verifiers.math.algebra import BallDecider
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.judging import UnreadableGold, explain, judged

PIECES = [
    *(
        r"\frac",
        r"\sqrt",
        r"\pi ",
        r"\sin ",
        r"\log_",
        r"\left(",
        r"\right)",
        r"\{",
        r"\}",
        r"\pm ",
    ),
    *(r"\cup ", r"\setminus ", r"\infty ", r"\mathbb{R}", r"\begin{pmatrix}", r"\end{pmatrix}"),
    *(r"\\", r"\text{", r"^\circ", r"\,", r"\binom", r"\le ", r"\in ", r"\mid ", r"\overline{3}"),
    *(r"\langle ", r"\rangle ", "{,}", "1,234", "10^{", "99999", "!!", r"\lfloor ", r"\choose "),
    *"{}()[]|^_+-*/=<>!'12xyein,;&%$ :aAB.",
    *("12", "3.5", "f(", "C(", " and ", " or ", "cm", "\u00b0", "\u00b2", "\u00bd", "(A)", "\x00"),
]
GOLDS = [
    *("7", r"\frac{\sqrt3}{2}", "x^2+1", "(1,2)", r"\{1,2\}", r"(-\infty,1)\cup(2,\infty)"),
    *("y=2x+1", "x>2", r"\begin{pmatrix}1\\2\end{pmatrix}", "5 cm", "B", "Tuesday", "1,2", "(0,1]"),
]

formulas = st.lists(st.sampled_from(PIECES), min_size=1, max_size=40).map("".join)
fractions = st.fractions(max_denominator=10**6)
types = st.sampled_from(get_args(AnswerType))


def right(gold: str, answer: str, answer_type: AnswerType = "auto") -> bool | None:
    """Whether an answer is right; None where the expected one cannot be."""
    rules = Rules(answer_type=answer_type)
    try:
        return judged(gold, answer, rules, BallDecider(rules.tolerance)).right
    except UnreadableGold:
        return None


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(GOLDS), formulas, types)
def test_no_formula_raises_on_either_side(gold: str, text: str, answer_type: AnswerType) -> None:
    right(gold, text, answer_type)
    right(text, gold, answer_type)
    right(text, text, answer_type)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(GOLDS), st.text(max_size=200))
def test_no_text_raises_or_is_right(gold: str, text: str) -> None:
    if right(gold, text):
        assert text.strip(" .,;$*_`").casefold() in {gold.casefold(), "b)", "(b)"}
    explain(gold, text, Rules())


def spellings(value: Fraction) -> st.SearchStrategy[str]:
    """Return ways to write a number, none of which changes it."""
    top, low = value.numerator, value.denominator
    ways = [f"{top}/{low}", rf"\frac{{{top}}}{{{low}}}", rf"\dfrac{{{2 * top}}}{{{2 * low}}}"]
    ways += [f"x = {top}/{low}", f"{top} \\cdot {low}^{{-1}}", f"$({top})/({low})$"]
    ways += [rf"\sqrt{{{top * top}}}/{low}" if top >= 0 else rf"-\sqrt{{{top * top}}}/{low}"]
    ways += [f"{top}", f"{top:,}", f"{top}.0", f"{top}e0", f"+{top}"[top < 0 :]] * (low == 1)
    return st.sampled_from(ways)


@settings(deadline=None, max_examples=150)
@given(st.data(), fractions, fractions)
def test_the_same_number_is_right_and_another_is_wrong_however_they_are_written(
    data: st.DataObject, one: Fraction, other: Fraction
) -> None:
    gold, answer = data.draw(spellings(one)), data.draw(spellings(other))
    assert right(gold, answer) == (one == other)
    assert right(gold, data.draw(spellings(one))) is True


def polynomial(coefficients: list[int], *, expanded: bool) -> str:
    """Return c0 + c1 x + ..., or the same by Horner's rule."""
    if expanded:
        return "+".join(f"({c})x^{{{power}}}" for power, c in enumerate(coefficients))
    text = f"({coefficients[-1]})"
    for c in reversed(coefficients[:-1]):
        text = f"(x \\cdot {text} + ({c}))"
    return text


coefficients = st.lists(st.integers(-50, 50), min_size=1, max_size=8)


@settings(deadline=None, max_examples=80)
@given(coefficients, coefficients)
def test_two_polynomials_are_the_same_only_with_the_same_coefficients(
    one: list[int], other: list[int]
) -> None:
    width = max(len(one), len(other))
    ours, theirs = (row + [0] * (width - len(row)) for row in (one, other))
    assert right(polynomial(one, expanded=True), polynomial(one, expanded=False)) is True
    same = right(polynomial(one, expanded=True), polynomial(other, expanded=False))
    assert same == (ours == theirs)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=6), st.randoms())
def test_a_set_is_right_in_any_order_and_a_tuple_in_its_own(
    values: list[int], random: Random
) -> None:
    shuffled = values.copy()
    random.shuffle(shuffled)
    ours, theirs = (",".join(map(str, row)) for row in (values, shuffled))
    assert right(rf"\{{{ours}\}}", rf"\{{{theirs}\}}") is True
    assert right(f"({ours})", f"({theirs})") == (values == shuffled)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 500), st.integers(2, 500), st.integers(1, 40))
def test_roots_that_differ_are_told_apart(one: int, other: int, digits: int) -> None:
    assert right(rf"\sqrt{{{one}}}", rf"\frac{{{one}}}{{\sqrt{{{one}}}}}") is True
    assert right(rf"\sqrt{{{one}}}", rf"\sqrt{{{other}}}") == (one == other)
    assert right(rf"\sqrt{{{one}}}", rf"\sqrt{{{one}}}+10^{{-{digits}}}") is False
