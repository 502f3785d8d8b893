"""What a declared type, a rule for units and a tolerance change about a verdict."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import pytest

from headrace.config import AnswerType, MathConfig, UnitRule
from headrace.types import Outcome, Prompt
from headrace.verifiers.math.algebra import BallDecider
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.component import MathComponent
from headrace.verifiers.math.deciding import Tolerance
from headrace.verifiers.math.judging import UnreadableGold, judge, judged, read_gold
from headrace.verifiers.math.tree import Tree

RIGHT: list[tuple[AnswerType, str, str]] = [
    ("number", "1/2", "0.5"),
    ("number", r"\sqrt{2}", r"\frac{2}{\sqrt2}"),
    ("number", "5", "x = 5"),
    ("number", "5 cm", "5"),
    ("fraction", "3/4", r"\frac{6}{8}"),
    ("fraction", "7/2", r"3\frac12"),
    ("fraction", "3/4", "x=3/4"),
    ("fraction", "5", "5"),
    ("quantity", "5 cm", "5 centimeters"),
    ("quantity", "50%", r"50\%"),
    ("expression", "x^2-1", "(x-1)(x+1)"),
    ("expression", "2x", "f(x)=2x"),
    ("equation", "y=2x+1", "2x-y+1=0"),
    ("equation", "x=5", "2x=10"),
    ("interval", "(0,1)", "0<x<1"),
    ("interval", "(0,1)", "]0,1["),
    ("interval", "[1,2]", r"\{x: 1\le x\le 2\}"),
    ("interval", r"(1,2)\cup(3,4)", "(3,4), (1,2)"),
    ("interval", r"(-\infty,1)\cup(1,\infty)", r"x\ne1"),
    ("interval", r"(-\infty,1)\cup(1,\infty)", "x<1,x>1"),
    ("interval", r"(-\infty,1)\cup(1,\infty)", r"\mathbb{R}\setminus\{1\}"),
    ("interval", r"\{3\}", "x=3"),
    ("set", "1,2", r"\{2,1\}"),
    ("set", "1,234", r"\{234, 1\}"),
    ("set", "5", r"\{5\}"),
    ("set", r"\{5\}", "x=5"),
    ("set", "1,-1", r"\pm1"),
    ("tuple", "(1,2)", "1,2"),
    ("tuple", "1, 2", "(1,2)"),
    ("tuple", "(1,2)", r"\langle1,2\rangle"),
    ("tuple", "(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("tuple", "(1,234)", "(1, 234)"),
    ("tuple", "(1,2)", "[1,2]"),
    ("matrix", r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{bmatrix}1&2\end{bmatrix}"),
    ("choice", "B", "(B) 12 cm"),
    ("choice", "B", "b"),
    ("choice", "B", "Option B"),
    ("choice", "(B)", r"\textbf{(B)}\ 12"),
    ("choice", "B", "B: because it is"),
    ("text", "x^2 is even", "X^2 is  even"),
    ("text", r"\text{red and blue}", "red and blue."),
]

WRONG: list[tuple[AnswerType, str, str]] = [
    ("number", "5", "x"),
    ("number", "5", "5,6"),
    ("number", "1/3", "0.3333333333"),
    ("fraction", "3/4", "0.75"),
    ("fraction", "3/4", "7.5e-1"),
    ("fraction", "3/4", r"\frac{1.5}{2}"),
    ("fraction", "3/4", "4/3"),
    ("quantity", "5 cm", "5"),
    ("quantity", "5 cm", "5 m"),
    ("expression", "x^2-1", "x^2+1"),
    ("expression", "2x", "2x=0"),
    ("equation", "y=2x+1", "2x+1"),
    ("equation", "x=5", "5"),
    ("equation", "x=5", "x<5"),
    ("interval", "(0,1)", "[0,1]"),
    ("interval", "(0,1)", r"\{0,1\}"),
    ("interval", "(0,1)", "0.5"),
    ("interval", r"(1,2)\cup(3,4)", "(1,4)"),
    ("set", "1,2", "(1,2)"),
    ("set", "1,2", "1,2,2"),
    ("tuple", "(1,2)", "(2,1)"),
    ("tuple", "(1,2)", r"\{1,2\}"),
    ("tuple", "(1,2)", "1<x<2"),
    ("tuple", "(1,234)", "1234"),
    ("matrix", r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)"),
    ("choice", "B", "(A) or (B)"),
    ("choice", "A", "(A) or (B)"),
    ("choice", "A", "A. or B."),
    ("choice", "A", "A, B"),
    ("choice", "A", "(A)/(B)"),
    ("choice", "B", "Both A and B"),
    ("choice", "B", "C. B"),
    ("choice", "B", "12"),
    ("text", "even", "odd"),
]

UNITS: list[tuple[UnitRule, str, str, bool]] = [
    ("convert", "5 m", "500 cm", True),
    ("convert", "5 m", "0.005 km", True),
    ("convert", "5 m", "5", True),
    ("convert", "5 m", "5 cm", False),
    ("convert", "5 m", "5 s", False),
    ("convert", "1 h", "60 minutes", True),
    ("convert", "36 km/h", "10 m/s", True),
    ("convert", "1 cm^2", "100 square millimeters", True),
    ("convert", "1 L", "1000 cm^3", True),
    ("convert", "1 N", r"1\text{ N}", True),
    ("convert", "12 inches", "1 foot", True),
    ("convert", r"\$5", "500 cents", True),
    ("convert", "50%", "0.5", True),
    ("convert", "50%", "1/2", True),
    ("convert", "50%", "0.05", False),
    ("convert", r"180^\circ", r"\pi", True),
    ("convert", r"180^\circ", "3.14159", False),
    ("convert", "5 apples", "5 pears", False),
    ("convert", "0.5", "50%", True),
    ("convert", "1/2", r"50\%", True),
    ("convert", r"\frac{\pi}{3}", r"60^\circ", True),
    ("convert", "50", "50%", True),
    ("convert", "5", "5 cm", True),
    ("convert", "0.05", "5 cm", False),
    ("same", "0.5", "50%", False),
    ("ignore", "5 cm", "5 m", True),
    ("ignore", "5 cm", "6 m", False),
    ("same", "5 m", "500 cm", False),
]

FINAL: list[tuple[str, str, bool]] = [
    ("408", "408", True),
    ("408", "12*34", False),
    ("408", r"12\cdot34 = 408", True),
    ("408", "x = 408", True),
    ("8", "2^3", False),
    ("120", "5!", False),
    ("10", r"\binom{5}{2}", False),
    ("2", r"\sqrt{4}", False),
    ("-7", "-7.0", True),
    ("1/2", r"\frac{-1}{-2}", False),
    ("-1/2", r"\frac{-1}{2}", True),
    ("7/3", r"2\frac13", True),
    ("30000", r"3\times10^4", True),
    ("1/1024", "2^{-10}", False),
    (r"2\sqrt3", r"\sqrt{12}", True),
    (r"2\sqrt3", r"(1+1)\sqrt3", False),
    (r"6\sqrt2", r"2\cdot3\sqrt2", False),
    (r"\frac{1+\sqrt5}{2}", r"\frac12+\frac{\sqrt5}{2}", True),
    ("x^2-1", "(x-1)(x+1)", True),
    ("x+5", "x+2+3", False),
    ("x=5", "2x=10", False),
    ("x=5", "5=x", True),
    ("x>2", "2x>4", False),
    ("2x+y=3", "4x+2y=6", True),
    ("2^{100}", "2^{100}", True),
    ("2^{100}", "4^{50}", True),
    ("1,2", "1, 1+1", False),
    ("(0,2)", r"(0,\sqrt4)", False),
]

TOLERANCES: list[tuple[str, str, Fraction, Fraction, bool]] = [
    (r"\pi", "3.14159265", Fraction(0), Fraction(1, 10**6), True),
    (r"\pi", "3.14159265", Fraction(0), Fraction(1, 10**12), False),
    (r"\pi", "3.14", Fraction(1, 100), Fraction(0), True),
    (r"\pi", "3.15", Fraction(1, 1000), Fraction(0), False),
    ("1/3", "0.3333", Fraction(1, 1000), Fraction(0), True),
    ("100", "101", Fraction(0), Fraction(1, 100), True),
    ("100", "101.5", Fraction(0), Fraction(1, 100), False),
    ("(1,2)", "(1.001,2)", Fraction(1, 100), Fraction(0), True),
    ("x", "x+0.001", Fraction(1, 100), Fraction(0), False),
]


def right(gold: str, answer: str, rules: Rules) -> bool:
    return judge(gold, answer, rules, BallDecider(rules.tolerance)).right


@pytest.mark.parametrize(("answer_type", "gold", "answer"), RIGHT)
def test_an_answer_of_the_declared_type_is_right(
    answer_type: AnswerType, gold: str, answer: str
) -> None:
    assert right(gold, answer, Rules(answer_type=answer_type))


@pytest.mark.parametrize(("answer_type", "gold", "answer"), WRONG)
def test_an_answer_of_another_type_or_value_is_wrong(
    answer_type: AnswerType, gold: str, answer: str
) -> None:
    assert not right(gold, answer, Rules(answer_type=answer_type))


@pytest.mark.parametrize(("units", "gold", "answer", "expected"), UNITS)
def test_units_count_as_declared(
    units: UnitRule, gold: str, answer: str, *, expected: bool
) -> None:
    assert right(gold, answer, Rules(units=units)) == expected


@pytest.mark.parametrize(("gold", "answer", "expected"), FINAL)
def test_where_the_form_counts_saying_the_task_again_is_wrong(
    gold: str, answer: str, *, expected: bool
) -> None:
    assert right(gold, answer, Rules(form="final")) == expected
    assert right(gold, answer, Rules())


@pytest.mark.parametrize(("gold", "answer", "absolute", "relative", "expected"), TOLERANCES)
def test_numbers_may_differ_by_the_declared_tolerance_and_no_more(
    gold: str, answer: str, absolute: Fraction, relative: Fraction, *, expected: bool
) -> None:
    tolerance = Tolerance(absolute=absolute, relative=relative)
    assert right(gold, answer, Rules(tolerance=tolerance)) == expected


@pytest.mark.parametrize(
    ("answer_type", "gold"),
    [
        ("number", "x"),
        ("number", "1,2"),
        ("fraction", "0.5"),
        ("quantity", "5"),
        ("equation", "5"),
        ("interval", "5"),
        ("interval", "Tuesday"),
        ("matrix", "(1,2)"),
        ("tuple", "5"),
        ("choice", "12"),
        ("expression", r"\{1,2\}"),
    ],
)
def test_an_expected_answer_of_another_type_is_a_fault(answer_type: AnswerType, gold: str) -> None:
    with pytest.raises(UnreadableGold):
        read_gold(gold, Rules(answer_type=answer_type))


def prompt(answer: str, **columns: object) -> Prompt:
    return Prompt(
        prompt_id="p", source="s", text="t", token_ids=(1,), answer=answer, metadata=columns
    )


@pytest.fixture
def by_row() -> MathComponent:
    return MathComponent(MathConfig(kind="math", answer_type_column="type", timeout_seconds=60.0))


def test_a_row_declares_the_type_of_its_own_answer(by_row: MathComponent) -> None:
    rows = [
        (prompt("(0,1)", type="interval"), 1.0),
        (prompt("(0,1)", type="tuple"), 0.0),
        (prompt("(0,1)"), 1.0),
    ]
    for row, reward in rows:
        assert asyncio.run(by_row.score(row, "0<x<1")).reward == reward


def test_a_type_that_does_not_exist_leaves_the_rollout_unscored_and_is_told_at_load(
    by_row: MathComponent,
) -> None:
    score = asyncio.run(by_row.score(prompt("5", type="numbr"), "5"))
    assert (score.outcome, score.reward) == (Outcome.INFRA, None)
    problem = by_row.answer_problem("5", {"type": "numbr"})
    assert problem is not None
    assert "'numbr': must be one of auto, number" in problem


def test_a_row_without_the_column_of_types_is_a_fault_and_null_is_the_type_of_the_recipe(
    by_row: MathComponent,
) -> None:
    problem = by_row.answer_problem("5", {"typ": "number"})
    assert problem == "answer_type_column = 'type': the row has no such column"
    assert by_row.answer_problem("5", {"type": None}) is None


class Broken(BallDecider):
    def same(self, gold: Tree, answer: Tree) -> bool:
        raise ZeroDivisionError(gold, answer)


def test_an_answer_that_breaks_the_grader_is_wrong_and_not_left_out() -> None:
    judgement = judge("5", "6", Rules(), Broken(Tolerance()))
    assert (judgement.right, judgement.rule) == (False, "cannot be compared: ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        judged("5", "6", Rules(), Broken(Tolerance()))


def test_what_has_no_value_is_no_expected_answer() -> None:
    component = MathComponent(MathConfig(kind="math", num_processes=1, timeout_seconds=60.0))
    try:
        for gold in ("1/0", r"\ln 0", r"\frac{1}{\sin \pi}"):
            assert component.answer_problem(gold, {}) is not None
        for gold in (r"\ln 2", r"\sqrt{-4}", r"(-\infty,\sqrt2)", "x"):
            assert component.answer_problem(gold, {}) is None
    finally:
        component.pool.close_blocking()


def test_an_explanation_has_every_step_from_the_completion_to_who_decides() -> None:
    component = MathComponent(MathConfig(kind="math", timeout_seconds=60.0))
    lines = component.explain(r"\dfrac{1}{2} cm", r"So \boxed{0.5\,\text{cm}}")
    assert lines == [
        r"extract = 'answer' finds '0.5\\,\\text{cm}'",
        "answer type auto, units same, form worked, within 0 absolute and 0 relative",
        r"expected: '\\dfrac{1}{2} cm'",
        "expected is read as: div(1, 2) [cm]",
        r"answer: '0.5\\,\\text{cm}'",
        r"answer with one spelling for each sign: '0.5 \\text{cm}'",
        "answer is read as: 1/2 [cm]",
        "decided without algebra: same expression: right",
    ]
    assert "by balls" in component.explain(r"\sqrt2", "1.41")[-1]
    assert "cannot be read" in component.explain("5", "5 +")[-1]
    assert "the task's" in component.explain("408", "12*34", task="What is 12*34?")[-1]
    assert component.pool.pids == ()
