"""How completions end: what `extract = "answer"` finds, and that it finds nothing else."""

from __future__ import annotations

import pytest

from headrace.config import AnswerType
from headrace.verifiers.math.algebra import BallDecider
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.finding import find_answer
from headrace.verifiers.math.judging import judge

FIVE = (
    "#### 5", "The total is 10.\n#### 5", "#### $5$", "So x = 5.", "So, x = 5", "Thus $x = 5$.",
    "Therefore, the answer is 5.", "Therefore the answer is: 5", "The answer is **5**.",
    "The answer is $5$.", "The answer is 5!", "the final answer is 5", "Final Answer: 5",
    "**Final Answer:** 5", "**Final Answer**: 5", "### Final Answer\n5",
    "### Final Answer\n\n**5**", "## Answer\n$5$", "Answer: 5.", "answer = 5", "Answer is 5",
    "ANSWER: 5", "The answer: 5", "Hence, the value is 5.", "= 5", "2 + 3 = 5", "2+3 = 5.",
    "So 2 + 3 = **5**.", "$$x = 5$$", r"\[ x = 5 \]", "\\[\n\\boxed{5}\n\\]", r"\boxed{5}.",
    r"$\boxed{5}$", r"\fbox{5}", r"\boxed5", r"\boxed 5", r"\boxed{ 5 }", r"\boxed{\text{5}}",
    r"\boxed{x=5}", r"\boxed{$5$}", r"\boxed{\mathbf{5}}", "<answer>5</answer>",
    "<answer> 5 </answer>", r"<answer>\boxed{5}</answer>", "<answer>\n5\n</answer>",
    "<ANSWER>5</ANSWER>", "The answer is (5).", 'The answer is "5".', "It is 5.", "We get 5", "5",
    "5.", "5.0", "+5", "5.00", "**5**", "`5`", "five", " 5 \n\n", "Thus, we have 5 apples.",
    "There are 5 apples in total.", "She has 5 left.", "The correct answer is 5",
    r"So the answer is $\boxed{5}$.", r"The final answer is: $\boxed{5}$", r"Final answer: \(5\)",
    r"the answer is \(5\).", "My answer: 5", "The result is 5.", "x=5", "x equals 5",
    "The solution is x = 5.", "The value of x is 5.", "Answer: x = 5", "Answer: **x = 5**",
    r"\(\boxed{5}\)", r"\boxed{5}\).", r"Therefore, $x=\boxed{5}$.",
    "The answer is 5, since 2+3=5.", "The answer is 5 because 2+3=5.",
    "answer is 5\n\nLet me know if you have questions!", "The answer is 5. I hope it is correct.",
    "**Answer:** $5$", "**Answer: 5**", "Answer:5", "Output: 5", "Result: 5", "∴ x = 5", "⇒ 5",
    "=> 5", "→ 5", r"\therefore x = 5", r"$\therefore 5$", "So the total is $5.",
    "It costs 5 dollars.", "x = 5 ✓", "5 ✅", "Answer: 5 ✅", "The answer is 5 .", "**5.**", "*5*",
    "__5__", r"$\text{Answer: }5$", r"\text{The answer is } 5", r"\boxed{\displaystyle 5}",
    r"\boxed{{5}}", r"\boxed {5}", r"\framebox{5}", r"\boxed{5}$$", "\\boxed{5}\n```",
    "```\n5\n```", "```5```", "# Answer\n5", "so our answer is 5.", "the answer should be 5.",
    "The answer would be 5", "The answer must be 5.", "The final result equals 5.",
)  # fmt: skip

NOT_FIVE = (
    "It is not 5.", "The answer is not 5.", "x is not 5", "half of 10 is... 5 or 6",
    "The answer is 5 or 6", "The answer is 4, no 5", "It is less than 5.", "It is minus 5",
    "The answer is minus 5", "negative 5", "The answer is negative 5", "the square root of 5",
    "The result is 2 x 5", "The answer is -5", "The answer is 50", "It is 5 or 6", "#### 15",
    "#### 5 or 6", "#### 5, 6", "#### -5", "The answer is not 6 but 5, or 4",
    "It is either 5 or 6.", "If x is 5, it works.", "Maybe it is 5", "The result isn't 5",
    "The answer isn't 5", "So x = 5 or x = 6.", "So xy = 5.", "The answer is 5^2", "twice 5",
    "The answer is twice 5", "5 dozen", "5 hundred", "5 thousand", "The answer is 5 dozen",
    "The answer is 5 squared", "5%5", "log 5", "ln 5", "The answer is log 5",
    "The answer is sin 5", "5!", "Answer: 5!", "$5!$", "The answer is $5!$", r"\boxed{5!}",
    r"\boxed5 \boxed6", r"\boxed{5}\boxed{6}", r"\boxed{5} or \boxed{6}", r"\boxed 52",
    r"\boxed5^2", r"\boxed52", "<think>5</think>", "The answer is 5 more than x",
    "5 less than 10", "5 twelve", "the greatest common divisor of 5", "The answer is 5 and 6",
    "1, 2, 3, 4, 5", "y is 5 or so, x is 6", "2 of 5", "It is 1/5.", "It is 0.5.", "x^5",
    "Answer: x5", "the product of 5 and 6", "5 is not the answer", "It was never 5",
    "#### five hundred", "The answer is fifty", r"\fbox{6}", r"\boxed{4} \fbox{6}", r"\boxed{}5",
    r"5\boxed{}", "The answer is approximately 5.01", "5 halves",
    "The answer is 5 if x is 2 else 6",
)  # fmt: skip

RIGHT = {
    "B": (
        "Option B", "(B)", "B.", "B", "The answer is B.", "The answer is (B)",
        "The answer is option B.", "**B**", "**(B)**", "The correct option is (B).", "Option (B)",
        "Choice B", "Answer: (B)", "Answer: B) 12",
    ),
    r"\text{Tuesday}": (
        "Tuesday", "tuesday.", "The answer is Tuesday.", "**Tuesday**", "Answer: Tuesday",
        '"Tuesday"', 'Answer: "Tuesday".',
    ),
    r"\text{Yes}": (
        "yes", "Yes", "Yes.", "The answer is yes.", "**Yes**", "Answer: Yes", "yes!",
    ),
}  # fmt: skip

WRONG = {
    "3": (
        "3 dozen", "3 million", "3 halves", "3 hundred",
    ),
    "B": (
        "A or B", "(A) or (B)", "(A)(B)", "B or C", "Option A", "b", "option b", "not B", "C",
        "B+1", "(B)^2", "B^2", "B/2", "B, C", "(B)(C)", "B is wrong", r"\boxed{B}, \boxed{C}",
        "B(x)",
    ),
    r"\text{Tuesday}": (
        "It is Monday.", "It is not Tuesday.", "Tuesday or Monday", "It is Tuesday or Wednesday.",
        "The day is Monday, not Tuesday", "either Tuesday or Monday",
    ),
    r"\text{Yes}": (
        "No", "not yes", "yes and no", "yes or no", "The answer is no, yes",
    ),
    "10": (
        "twelve", "eleven", "ten or eleven", "one hundred", "ten thousand", "ten million",
        "the answer is ten dozen", "one zero",
    ),
    "25": (
        "twenty five hundred", "twenty-six",
    ),
    "x=5": (
        "y = 5", "The value of y is 5.", "y is 5", "y equals 5", "x = 6", "So y = 5.", "xy = 5",
    ),
    "12000": (
        "12.000",
    ),
}  # fmt: skip

CHOSEN = {
    "B": (
        "Option B", "(B)", "B.", "B", "The answer is B.", "The answer is (B)",
        "The answer is option B.", "Answer: B) 12", "**B**", "**(B)**", "(B) 12 cm",
        "The correct option is B.", "The correct option is (B).", "So the correct choice is B",
        "Option (B)", "Choice B", "choice (B)", "Answer: (B)", "B: 12", "B) 12", "[B]", "{B}",
        "The answer is **B**.", "B.\n", "answer is b", "b", "(b)", "Answer B",
        "The answer is B, 12.", "Final answer: (B) 12", r"\textbf{(B)}",
        "The correct answer is (B) 12.", "Therefore, the answer is (B).", "The best answer is B.",
        "The answer is B because 3>2.",
    ),
}  # fmt: skip

NOT_CHOSEN = {
    "B": (
        "A or B", "(A) or (B)", "The answer is (A) or (B)", "(A)(B)", "B or C", "Option A",
        "not B", "The answer is not B", "(C)", "C", "B and C", "A, B",
        "The correct option is not B", "Option B is wrong", "B is incorrect",
    ),
}  # fmt: skip


def is_right(gold: str, completion: str, answer_type: AnswerType = "auto") -> bool:
    rules = Rules(answer_type=answer_type)
    found = find_answer(completion, "answer")
    return bool(found) and judge(gold, found or "", rules, BallDecider(rules.tolerance)).right


def pairs(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(gold, text) for gold, texts in table.items() for text in texts]


@pytest.mark.parametrize("completion", FIVE)
def test_an_honest_ending_is_paid(completion: str) -> None:
    assert is_right("5", completion)


@pytest.mark.parametrize("completion", NOT_FIVE)
def test_an_ending_that_says_something_else_is_not(completion: str) -> None:
    assert not is_right("5", completion)


@pytest.mark.parametrize(("gold", "completion"), pairs(RIGHT))
def test_words_around_an_answer_are_no_part_of_it(gold: str, completion: str) -> None:
    assert is_right(gold, completion)


@pytest.mark.parametrize(("gold", "completion"), pairs(WRONG))
def test_words_that_turn_an_answer_are_not_taken_off(gold: str, completion: str) -> None:
    assert not is_right(gold, completion)


@pytest.mark.parametrize(("gold", "completion"), pairs(CHOSEN))
def test_a_choice_is_made_in_many_ways(gold: str, completion: str) -> None:
    assert is_right(gold, completion, "choice")


@pytest.mark.parametrize(("gold", "completion"), pairs(NOT_CHOSEN))
def test_two_choices_or_another_one_are_none(gold: str, completion: str) -> None:
    assert not is_right(gold, completion, "choice")


def test_an_exclamation_mark_ends_a_sentence_and_multiplies_a_formula() -> None:
    assert is_right("5", "The answer is 5!")
    assert is_right("120", "Answer: 5!")
    assert is_right("120", "The answer is $5!$")
    assert is_right("120", "\\boxed{5!}")
    assert not is_right("120", "The answer is 5!")


@pytest.mark.parametrize("piece", ["is ", "#", "x is ", "the ", "because ", "$", "**", "answer is"])
def test_a_huge_ending_takes_no_time(piece: str) -> None:
    assert not is_right("5", piece * (900_000 // len(piece)))
