r"""`math` in both directions: what is right is paid and what only looks like it is not."""

import asyncio
from collections.abc import Iterator

import pytest

from headrace.config import MathConfig
from headrace.types import Prompt
from headrace.verifiers.math.component import MathComponent
from headrace.verifiers.math.finding import find_answer

MARKUP = [
    ("The answer is **4**.", "4"),
    ("Answer: **4**", "4"),
    ("**Answer: 4**", "4"),
    ("**Answer:** 4", "4"),
    ("**Answer**: 4", "4"),
    ("__Answer__: 4", "4"),
    ("**The answer is 4.**", "4"),
    ("The answer is **$4$**.", "4"),
    ("The answer is *4*", "4"),
    ("**Answer:**\n4", "4"),
    ("**Answer:** **4**", "4"),
    ("### Answer: `4`", "4"),
    ("<answer>4</answer>", "4"),
    ("So:\n<answer>\n4\n</answer>\nDone.", "4"),
    ("<answer>\\boxed{4}</answer>", "4"),
    ("<answer>**4**</answer>", "4"),
    ("The answer is **-4**.", "-4"),
    ("The answer is 2**3", "8"),
    ("The answer is 2*3*4", "24"),
    ("**Answer: 2**3**", "8"),
    ("Final Answer: The final answer is $4$. I hope it is correct.", "4"),
    ("**4**", "4"),
    ("*4*", "4"),
]


SAME = [
    # choices and words
    (r"\text{A}", "A"),
    (r"\text{A}", "(A)"),
    (r"\text{(A)}", "A"),
    ("A", r"\boxed{\text{(A)}}"),
    ("A", r"\boxed{\textbf{(A)}}"),
    ("A", r"\boxed{(\text{A})}"),
    ("A", "The answer is **A**."),
    ("A", "The answer is (A)."),
    ("A", "x = A"),
    (r"\text{No}", "No"),
    ("No", r"\boxed{\text{No}}"),
    ("no", "No"),
    (r"\text{Al}", "Al"),
    (r"\text{12}", "12"),
    ("12", r"\boxed{\text{12}}"),
    ("12", r"\boxed{\mathrm{12}}"),
    (r"\text{12 cm}", "12 cm"),
    (r"\text{x+1}", "1+x"),
    ("ab", "ba"),
    ("x - y", "-y + x"),
    # equations
    ("y=2x+1", "y-2x-1=0"),
    ("y-2x-1=0", "y=2x+1"),
    ("x+y=3", "y=3-x"),
    ("y=3-x", "2x+2y=6"),
    ("y=2x+1", "2x+1"),
    ("f(x)=2x", "y=2x"),
    ("x=5", "X=5"),
    ("x=5", "2x=10"),
    ("1,2", "x=2, x=1"),
    # spellings
    ("3 1/2", "7/2"),
    ("7/2", "3 1/2"),
    ("-7/2", "-3 1/2"),
    ("3.5", r"3\frac{1}{2}"),
    (r"\frac 1 2", "1/2"),
    ("1/2", r"\frac12"),
    ("I", r"\boxed{\frac{2I}{2}}"),
    ("RI", "IR"),
    (r"2\Gamma", r"\Gamma+\Gamma"),
    (r"\Gamma(5)", "24"),
    ("1/2", r"\dfrac 1{2}"),
    (r"\log_2 8", "3"),
    ("3", r"\log_28"),
    ("3", r"\log_{2} 8"),
    ("3", "log_2(8)"),
    (r"\emptyset", r"\varnothing"),
    (r"\varnothing", "\u2205"),
    (r"\emptyset", r"\{\}"),
    ("i^2", "-1"),
    ("-1", "i^2"),
    ("3+4i", "4i+3"),
    ("x^2+1", "(x+i)(x-i)"),
    (r"\begin{pmatrix}0.5\\1\end{pmatrix}", r"\begin{pmatrix}1/2\\1\end{pmatrix}"),
    ("-4", "\u20134"),
    ("12:30", "12 : 30"),
    (r"3:2", r"\boxed{3\colon 2}"),
    # units
    ("9.8 m/s^2", "9.8"),
    ("9.8", "9.8 m/s^2"),
    ("9.8 m/s^2", r"\boxed{9.8\text{ m/s}^2}"),
    ("9.8 m/s^2", r"\boxed{9.8\,\mathrm{m/s^2}}"),
    ("9.8 m/s^2", "9.8 m/s^{2}"),
    ("9.8 m/s^2", "9.8m/s^2"),
    ("60 km/h", "60 kilometers per hour"),
    ("5 m", "5m"),
    ("5 kg", "5 Kg"),
    ("5 kg", "5 kgs"),
    ("5 cm", "5 centimeters"),
    ("5 cm^2", "5 square centimeters"),
    ("5 apples", "5 Apple"),
    ("5", "5 cups of flour"),
    ("5", "5 more apples"),
    ("3 million", "3,000,000"),
    ("3,000,000", r"3 \text{ million}"),
    (r"\$2,500,000", "2.5 million dollars"),
    ("5 in", "5 inches"),
    ("101_2", "101_{2}"),
    ("3 1/2 cups", "3.5"),
    (r"\$5", "$5"),
    (r"\$5", "5 dollars"),
    (r"\$5", "5"),
    ("-5", "-$5"),
    ("5", r"\boxed{\$5}"),
    ("101_2", "101"),
    ("I_0", "I_0"),
    ("f'(x)=2x", "f'(x) = x+x"),
    ("xy'", "y'x"),
    (r"\mathbb{Z}", r"\mathbb{Z}"),
]

DIFFERENT = [
    ("3", "3 million"),
    ("3 million", "3"),
    ("3", r"3\text{ hundred}"),
    ("3", "3 halves"),
    ("3", "3 less than ten"),
    ("3", "3 times ten"),
    ("3", "3 over four"),
    ("3", "3 percent of ten"),
    (r"\text{A}", "B"),
    ("A", "(B)"),
    ("A", "a"),
    ("A", "A or B"),
    ("A", "AB"),
    ("no", "on"),
    ("No", r"\boxed{\text{on}}"),
    (r"\text{Al}", "lA"),
    (r"\text{12}", "21"),
    ("5 m", "5 ms"),
    ("5 ms", "5 m"),
    ("5 MW", "5 mW"),
    ("5 MJ", "5 mJ"),
    ("5 Mm", "5 mm"),
    ("9.8 m/s^2", "9.8 m/s"),
    ("9.8 m/s^2", "9.8 s/m^2"),
    ("2m/s", "2"),
    (r"\frac{R}{r}", "1"),
    ("1", r"\boxed{\frac{R}{r}}"),
    ("a^2", "aA"),
    ("aA", "a^2"),
    ("x", "X"),
    (r"\theta", r"\boxed{\Theta}"),
    (r"\pi", r"\boxed{\Pi}"),
    (r"\gamma", r"\boxed{\Gamma}"),
    ("I", "i"),
    ("2I", "2i"),
    ("2E", "2e"),
    ("n_1", "N_1"),
    ("I_0", "I"),
    ("I_0", "i_0"),
    ("101_2", "101_3"),
    (r"\$5", "5 cents"),
    ("5 cents", r"\$5"),
    ("5 cents", "$5"),
    (r"\$5", "\u20ac5"),
    ("5", r"5\ldots"),
    ("0.3", "0.3..."),
    ("5", "5'"),
    ("f(x)", "f'(x)"),
    ("y'=2x", "y''=2x"),
    ("3", r"\pm 3"),
    ("3", "x>3"),
    ("5", "x=6=5"),
    ("5", "101_2"),
    ("RI", "Ri"),
    ("P(a)", "P(A)"),
    ("12:30", "12/30"),
    ("12/30", "12:30"),
    ("12:30", "24:60"),
    ("y=2x+1", "y=2x-1"),
    ("y=2x+1", "y-2x+1=0"),
    ("y=5", "x=5"),
    ("y=2x+1", "x=2y+1"),
    ("x+y=3", "3"),
    ("x+y=3", "y=3"),
    ("x=x", "y=1"),
    ("2", "3 1/2"),
    ("3/2", "3 1/2"),
    ("11/2", "3 5/2"),
    ("1/2", r"\boxed{\frac 1 23}"),
    ("1/23", r"\boxed{\frac123}"),
    ("8", r"\boxed{\log_2 8}"),
    (r"\emptyset", r"\boxed{0}"),
    ("i^2", "1"),
    ("3+4i", "3-4i"),
    ("x^2-1", "(x+i)(x-i)"),
    ("4", "\u20134"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[MathComponent]:
    # The deadline is far above what one answer takes: a busy machine changes nothing.
    component = MathComponent(MathConfig(kind="math", timeout_seconds=60.0, num_processes=1))
    yield component
    component.pool.close_blocking()


def reward(grader: MathComponent, gold: str, completion: str) -> float | None:
    prompt = Prompt(prompt_id="p", source="s", text="t", token_ids=(1,), answer=gold)
    return asyncio.run(grader.score(prompt, completion)).reward


@pytest.mark.parametrize(("completion", "gold"), MARKUP)
def test_markup_around_an_answer_or_its_line_changes_nothing(
    grader: MathComponent, completion: str, gold: str
) -> None:
    assert reward(grader, gold, completion) == 1.0
    assert reward(grader, "7", completion) == 0.0


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\[ \boxed{-2} \quad \text{and} \quad \boxed{1}. \]", "-2, 1"),
        (r"$\boxed{1}$, $\boxed{2}$ or $\boxed{\frac{1}{2}}$", r"1, 2, \frac{1}{2}"),
        (r"First \boxed{1}. So \boxed{2}", "2"),
        (r"\boxed{1}\boxed{2} hence \boxed{3}", "3"),
        (r"\boxed{1} and \boxed{1}", "1"),
        (r"\boxed{b} and \boxed{x}", "b, x"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{}", ""),
    ],
)
def test_boxes_in_a_row_are_a_list_and_the_last_row_counts(
    completion: str, found: str | None
) -> None:
    assert find_answer(completion, "answer") == find_answer(completion, "boxed") == found


@pytest.mark.parametrize(
    "completion", ["The answer is **4", "The answer is **4** or **5**.", "<answer></answer>"]
)
def test_markup_that_is_not_closed_or_not_around_one_answer_is_no_answer(
    grader: MathComponent, completion: str
) -> None:
    assert reward(grader, "4", completion) == 0.0


def test_the_answer_of_a_huge_line_takes_no_time() -> None:
    assert find_answer("answer: " + "**a " * 100_000, "answer") is not None
    assert find_answer("**a " * 100_000, "answer") is not None


@pytest.mark.parametrize(("gold", "completion"), SAME)
def test_the_same_answer_in_another_spelling_is_right(
    grader: MathComponent, gold: str, completion: str
) -> None:
    assert reward(grader, gold, completion) == 1.0


@pytest.mark.parametrize(("gold", "completion"), DIFFERENT)
def test_an_answer_that_only_looks_the_same_is_wrong(
    grader: MathComponent, gold: str, completion: str
) -> None:
    assert reward(grader, gold, completion) == 0.0


@pytest.mark.parametrize(
    ("task", "gold", "answer", "is_paid"),
    [
        ("What is 12 * 34?", "408", "12*34", False),
        ("What is 12 * 34?", "408", "34 \\cdot 12 + 0", False),
        ("What is 12 * 34?", "408", "408", True),
        ("What is 12 * 34?", "408", "12*34 = 408", True),
        ("What is 12 * 34?", "408", "6*68", True),
        ("What is 1,200 + 34?", "1234", "1200 + 34", False),
        ("Solve 2x = 10.", "x=5", "2x=10", False),
        ("Solve 2x = 10.", "x=5", "x=5", True),
        ("What is the square root of 16?", "4", "\\sqrt{16}", False),
        ("What is the cube root of 64?", "4", "\\sqrt[3]{64}", False),
        ("Compute 2^10.", "1024", "2^{10}", False),
        ("How many subsets has a set of 10 elements?", "1024", "2^{10}", True),
        ("Simplify 6/4.", "\\frac{3}{2}", "\\frac{6}{4}", True),
        ("Simplify the root of 12.", "2\\sqrt3", "\\sqrt{12}", True),
        ("Write 408 as 12 times 34.", "12*34", "12*34", True),
        ("Is it (B), 2 + 2?", "B", "\\textbf{(B)} 2 + 2", True),
    ],
)
def test_saying_the_task_again_is_not_paid(
    task: str, gold: str, answer: str, is_paid: bool
) -> None:
    component = MathComponent(MathConfig(kind="math", timeout_seconds=60.0))
    prompt = Prompt(prompt_id="p", source="s", text=task, token_ids=(1,), answer=gold)
    try:
        score = asyncio.run(component.score(prompt, f"\\boxed{{{answer}}}"))
    finally:
        component.pool.close_blocking()
    assert score.reward == float(is_paid), score.detail


def test_whoever_wants_it_may_pay_for_what_is_equal() -> None:
    component = MathComponent(MathConfig(kind="math", form="any", timeout_seconds=60.0))
    prompt = Prompt(prompt_id="p", source="s", text="12*34", token_ids=(1,), answer="408")
    assert asyncio.run(component.score(prompt, "12*34")).reward == 1.0
