import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.verifiers.extract import extract

FINAL_NUMBER = [
    ("10 + 5 = 15.", "15"),
    ("The answer is -5", "-5"),
    ("= -5", "-5"),
    ("10 - 5 = 5", "5"),
    ("10-5", None),
    ("10 -5", None),
    ("10 - 5", None),
    ("(10-5)", None),
    ("x - 5", None),
    ("--5", None),
    ("2*5", None),
    ("2**15", None),
    ("\u2212 5", "-5"),
    ("1,234", "1,234"),
    ("3.50", "3.50"),
    ("3/4", "3/4"),
    ("1/2/3", None),
    ("3 / 4", None),
    ("3e0", "3e0"),
    (".5", ".5"),
    ("15.", "15"),
    ("**15**", "15"),
    ("The **answer is 15**.", "15"),
    ("$x = -5$", "-5"),
    ("$5", "5"),
    ("\\boxed{15}", "15"),
    ("<answer>15</answer>", "15"),
    ("answer:15", "15"),
    ("(15)", "15"),
    ("(10, 15)", None),
    ("f(5)", None),
    ("x5", None),
    ("1,2", None),
    ("1, 2", "2"),
    ("1 2 3 4", "4"),
    ("12:30", None),
    ("50%", None),
    ("1.2.3", None),
    ("5 apples", None),
    ("", None),
    ("9" * 600, None),
    ("<think>7</think> 8", "8"),
    ("<think>it is 7", None),
]


SIGNED = [
    ("The answer is **-5**.", "-5"),
    ("The answer is *-5*", "-5"),
    ("**The answer is -5.**", "-5"),
    ("**Answer: -5**", "-5"),
    ("**Answer:** -5", "-5"),
    ("**10** -5", None),
    ("__-5__", "-5"),
    ("`-5`", "-5"),
    ("-**5**", "-5"),
    ("-\\boxed{5}", "-5"),
    ("= -\\boxed{5}.", "-5"),
    ("\\boxed{-5}", "-5"),
    ("$-\\boxed{5}$", "-5"),
    ("-$5", "-5"),
    ("The answer is -$5.", "-5"),
    ("$-5$", "-5"),
    ("(-5)", "-5"),
    ("\u20135", "-5"),
    ("The answer is \u20135", "-5"),
    ("\uff0d5", "-5"),
    ("\u20105", "-5"),
    ("\u20145", "-5"),
    ("\u22125", "-5"),
    ("-\\boxed{-5}", None),
    ("-(-5)", None),
    ("10 -\\boxed{5}", None),
    ("10 - **5**", None),
    ("10 **-5**", None),
    ("10 - $5", None),
    ("10 \u2013 5", None),
    ("10\u20135", None),
    ("x **-5", None),
    ("2**-5", None),
    ("2 ** -5", None),
    ("x -5", None),
]

OPERANDS = [
    "0.5...",
    "x != 5",
    "x <= 5",
    "x >= 5",
    "x /= 5",
    "!5",
    "it isn\u2019t 5",
    "gcd (5)",
    "10 -\n5",
    "\u00bd 5",
    "\u221a5",
    "\u221a 5",
    "\u00b15",
    "\u00b1 5",
    "x \u2260 5",
    "x > 5",
    "x < 5",
    "x \u2265 5",
    "2 x 5",
    "2x5",
    "2 X 5",
    "2 \\times 5",
    "2 \\cdot 5",
    "2\\cdot5",
    "2 \u22c5 5",
    "2 \u00b7 5",
    "2 \u2217 5",
    "10 \u2215 5",
    "10 \u2044 5",
    "10 \u00f7 5",
    "log 5",
    "\\log 5",
    "\\log_2 5",
    "log_2 5",
    "ln 5",
    "10 mod 5",
    "sqrt 5",
    "\\sqrt 5",
    "\\pm 5",
    "x \\neq 5",
    "x \\le 5",
    "x \\geq 5",
    "\\frac 1 5",
    "10 : 5",
    "10 minus 5",
    "2 times 5",
    "minus 5",
    "negative 5",
    "10 divided by 5",
    "the square root of 5",
    "not 5",
    "less than 5",
    "1 1/5",
    "12 005",
    "1 234 005",
    "12\\,005",
    "12\u00a0005",
    "12\u202f005",
    "12 005.5",
    "10 +\n5",
    "2 & 5",
]

RESULTS = [
    "x := 5",
    "So! 5",
    "-\n5",
    "= 5",
    "x = 5",
    "=> 5",
    "-> 5",
    "\u2192 5",
    "\u21d2 5",
    "\u2248 5",
    "\\approx 5",
    "\\Rightarrow 5",
    "\\quad 5",
    "Step 3: 5",
    "10 + 5:\n5",
    "#### 5",
    "**Answer:**\n5",
    "Total\n---\n5",
    "the answer of 5",
    "1 2 3 5",
    "= \\, 5",
    "The max 5",
    "an index 5",
    "**5**",
    "*5*",
    "**Answer:** 5",
    "**Answer**: 5",
    "*So* 5",
    "The answer is: **$5$**.",
]


@pytest.mark.parametrize(("text", "number"), SIGNED)
def test_a_minus_inside_or_outside_of_markup_and_of_any_kind_is_the_sign_unless_it_subtracts(
    text: str, number: str | None
) -> None:
    assert extract(text, "final_number") == number


@pytest.mark.parametrize("text", OPERANDS)
def test_a_number_that_is_only_part_of_what_stands_there_is_no_answer(text: str) -> None:
    assert extract(text, "final_number") is None


@pytest.mark.parametrize("text", RESULTS)
def test_a_number_behind_what_leads_to_a_result_is_the_answer(text: str) -> None:
    assert extract(text, "final_number") == "5"


@pytest.mark.parametrize(("text", "number"), FINAL_NUMBER)
def test_final_number_is_the_number_that_ends_the_completion(text: str, number: str | None) -> None:
    assert extract(text, "final_number") == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 apples", "5"),
        ("10-5", "5"),
        ("10 - 5 is -5 or so", "-5"),
        ("1 2 3 4", "4"),
        ("no", None),
        ("x5", "5"),
        ("it is **-5** or so", "-5"),
        ("2*-5", "5"),
        ("\u20135", "\u20135"),
        ("10\u20135", "5"),
    ],
)
def test_last_number_is_the_last_one_anywhere(text: str, number: str | None) -> None:
    assert extract(text, "last_number") == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{3}", "3"),
        ("\\boxed{3} no, \\boxed{4}", "4"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{3} and \\boxed{4", None),
        ("<think>\\boxed{3}</think> done", None),
        ("\\boxed{3}</think> done", None),
        ("<think>\\boxed{3}", None),
        ("<think>\\boxed{3}</think>\\boxed{4}", "4"),
        ("3", None),
    ],
)
def test_boxed_is_the_last_closed_box_outside_of_thinking(text: str, content: str | None) -> None:
    assert extract(text, "boxed") == content


def test_without_a_marker_the_whole_completion_is_the_answer() -> None:
    assert extract("14", "after_last_marker", marker=":") == "14"
    assert extract("+2:10-5:5+9:14", "after_last_marker", marker=":") == "14"


@pytest.mark.parametrize("rule", ["last_number", "final_number", "boxed", "after_last_marker"])
@pytest.mark.parametrize(
    "text", ["1" * 900_000, "</a>" * 200_000, "\\boxed{" * 100_000, "-" * 900_000]
)
def test_a_huge_completion_takes_no_time(rule: str, text: str) -> None:
    start = time.monotonic()
    extract(text, rule)  # type: ignore[arg-type]  # parametrized literals
    assert time.monotonic() - start < 90.0  # a hang guard: quadratic would take minutes


@given(st.text(max_size=300))
def test_no_text_makes_a_rule_raise(text: str) -> None:
    for rule in ("whole", "after_last_marker", "last_number", "final_number", "boxed"):
        extract(text, rule)  # type: ignore[arg-type]  # a tuple of the literals


@given(st.integers(-(10**9), 10**9), st.sampled_from(["", ".", "**", " ", "\n", "`", "!"]))
def test_a_number_at_the_end_is_found_with_its_sign(number: int, closing: str) -> None:
    assert extract(f"It is = {number}{closing}", "final_number") == str(number)


@given(
    st.integers(0, 999), st.integers(0, 999), st.sampled_from(["-", " - ", " -", "+", "*", " / "])
)
def test_an_expression_is_never_paid_as_its_last_number(a: int, b: int, operator: str) -> None:
    assert extract(f"{a}{operator}{b}", "final_number") is None
