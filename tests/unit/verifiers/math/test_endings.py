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

IN_WORDS = {
    "5": (
        "Answer:\n\n5", "**Answer**\n\n5", "The answer is:\n$$5$$", "The answer is:\n\\[5\\]",
        "The answer is: $$5$$", "Final answer: 5 apples.",
        r"Final Answer: The final answer is $\boxed{5}$. I hope it is correct.",
        "Thus the answer is therefore 5.", "So the answer is x = 5", "The final answer is x=5.",
        "So, the number of apples is 5.", "The number of ways is $5$.",
        "Therefore, there are $5$ ways.", "Therefore, there are **5** ways.",
        "Hence the required number is 5", "It follows that x = 5.", "which equals 5",
        "which gives x = 5.", "giving 5.", "5 is the answer", r"Thus, $\text{answer} = 5$",
        r"$\text{Answer} = 5$", r"\textbf{Answer: } 5", r"\text{Answer: 5}",
        r"The answer is $\text{5}$", "The sum of 2 and 3 is 5.", "The sum is 5.",
        "The product of the roots is 5.", "The greatest common divisor is 5.",
        "The square root of 25 is 5.", "Half of 10 is 5.", "2 plus 3 equals 5.",
        "The remainder is 5.", "The difference is 5.", "Twice 2.5 is 5",
        "We conclude that x = 5.", "It takes 5 hours.", "He needs 5 more apples.",
        "The area is 5 cm^2.", "The area of the triangle is 5 square units.",
        "The area is $5$ square units.", "That's 5.", "That makes 5 in total.", "In total, 5.",
        "Total: 5", "Total = 5", "Area = 5", "Sum: 5", "Ans: 5", "(5)", "[5]", "{5}",
        "x=5, which is the answer.", "answer\uff1a5", "\u7b54\u6848\uff1a5",
        "\u7b54\u6848\u662f5", "\u6700\u7ec8\u7b54\u6848\u662f 5\u3002", "The answer is 5\u3002",
        "5\u3002", "Answer: $$5$$", r"Answer: \[5\]", "Solution: x = 5", "Solution: 5",
        "Therefore: 5", "=5", "=> x = 5", "→ x = 5", "- 5", "* 5", "• 5", "> 5", "| 5 |",
        "**x = 5**", "_5_", "x=**5**", "$x$ = 5", "$x = $ 5", "$x$ is $5$", "$x$ equals 5.",
        "x ≈ 5", "The solution set is {5}.", "The only solution is 5.",
        "The unique solution is $x=5$.", "Thus x=5 is the only solution.",
        "We have x=5 as the solution.", r"\boxed{5} is the answer.",
        "\\boxed{5}\n\nLet me verify: 2+3=5.", r"\boxed{\textbf{5}}", r"\boxed{\mathrm{5}}",
        r"\boxed{\text{Answer: }5}", r"\boxed{\text{x = 5}}", r"\boxed{x\,=\,5}",
        r"\boxed{\,5\,}", "\\boxed{\n5\n}", r"\boxed{5\text{ left}}", r"\boxed{\text{5 apples}}",
        r"\boxed{\$5}", r"\boxed{5\%}", r"\boxed{ 5. }", r"\boxed{+5}", r"\boxed{5,}",
        r"\boxed{`5`}", r"\boxed{**5**}", '\\boxed{"5"}', r"\boxed{5.0}", r"\boxed{05}",
        r"\boxed{5\cdot1}", r"\boxed{\left(5\right)}", r"\boxed{5\quad}", r"\boxed{5~}",
        r"\boxed{\;5}", r"\boxed{5}\ ", "<answer>The answer is 5</answer>",
        "<answer>x = 5.</answer>", "<answer>**5**</answer>", "<answer>5 apples</answer>",
        "<answer>$5$</answer>", "<answer>$$5$$</answer>", "<answer>\n\\[5\\]\n</answer>",
        "<answer>5</answer>.", "#### 5.", "#### 5 apples", "#### x = 5", "#### **5**", "####5",
        "#### $5", r"#### \boxed{5}", "#### The answer is 5", "#### Answer: 5",
        "the answer is 5\n</answer>",
    ),
    "-5": (
        "The answer is -5.", "The answer is \u22125", "So x = -5.", "x = \u2212 5", "It is -5.",
        "The answer is $-5$!", "#### -5", "The total is -5", "-5", r"\boxed{-5}", r"\boxed{- 5}",
    ),
    r"\frac{1}{2}": (
        "So the probability is 1/2.", r"The probability is $\frac{1}{2}$.", "Thus, P = 1/2.",
        "1/2", r"It equals \frac{1}{2}.", r"We get $x = \frac12$.",
        r"Therefore $P(A) = \frac{1}{2}$.",
    ),
    r"2\sqrt{3}": (
        r"The length is 2\sqrt{3}.", r"So AB = 2\sqrt{3}.", r"Thus the side is $2\sqrt{3}$ cm.",
        "The distance is 2√3 units.", r"Therefore, $AB = 2\sqrt{3}$.",
        "So the answer is 2*sqrt(3).",
    ),
    "x^2+1": (
        "So f(x) = x^2+1.", "The function is x^2 + 1.", "Thus $f(x)=x^2+1$.",
        "The polynomial is $x^2+1$.", "We get x² + 1.",
    ),
    "(1,2)": (
        "The point is (1,2).", "So (x,y) = (1,2).", "The solution is (1, 2).",
        "The intersection is at (1,2).", "They meet at $(1,2)$.", "So x = 1 and y = 2.",
        "x = 1, y = 2", "The answer is x = 1 and y = 2.",
    ),
    "1,2": (
        "The roots are 1 and 2.", "So x = 1 or x = 2.", "The solutions are 1 and 2.", "x = 1, 2",
        "The answers are 1 and 2.", "The solutions are $x=1$ and $x=2$.", "So x is 1 or 2.",
        "The solution set is {1, 2}.", "x ∈ {1, 2}", "The zeros are x=1, x=2.",
    ),
    "(1,2]": (
        "The solution is (1,2].", "So 1 < x ≤ 2.", "The interval is $(1,2]$.",
        "The domain is (1, 2].",
    ),
    "5 cm": (
        "The length is 5 cm.", "It is 5 cm long.", "The radius is $5$ cm.",
        "It is 5 centimeters.",
    ),
    "B": (
        "The answer is (B).", "Therefore, the correct answer is B.", "So the answer is (B) 12.",
        "B", "(B)", "The correct answer is: B", "Answer is B.", "Hence, option (B).",
        "Thus, (B).", "So B.",
    ),
    "0": (
        "There are 0 ways.", "The answer is zero.", "zero", "0", "The answer is 0.",
    ),
}  # fmt: skip

NOT_IN_WORDS = {
    "5": (
        "The answer is not 5 but 6.", "5 is wrong", "The answer can't be 5", "x ≠ 5", "x > 5",
        r"x \ne 5", "The remainder when 5", "5 and then 6", "5 / 2",
        "The answer is 5 or maybe 6.", "It is 5 ± 1", "The answer is between 5 and 6",
        "about 5 to 6", "5 - 6", "5,6", "5 6", "5;6", "(5,6)", "The answers are 5 and 6.",
        "5 of 6", "5.5", "5e5", "5^0", r"\boxed{5}+1 = \boxed{6}",
        r"\boxed{5}, \boxed{6}, \boxed{7}", r"\boxed{5 \text{ or } 6}", r"\boxed{5\text{ and }6}",
        r"\boxed{\{5,6\}}", r"\boxed{5\pm1}", r"\boxed{5+x}", r"\boxed{5x}", r"\boxed{5y=25}",
        r"\boxed{5=6}", r"\boxed{5 \neq 5}", r"\boxed{x<5}", r"\boxed{5!}",
        r"\boxed{5 \times 10}", r"\boxed{5\text{ squared}}", r"\boxed{5\text{ thousand}}",
        r"\boxed{5 \text{ less than 6}}", r"\boxed{\text{not }5}", r"\boxed{\neg 5}",
        r"\boxed{1,2,3,4,5,6,7}", r"\boxed{5\text{ to }6}", r"\boxed{5-6}", r"\boxed{5:6}",
        r"\boxed{\text{five or six}}", r"\boxed{5\text{ or six}}", "The answer is five hundred",
        "#### 5 6", "#### 4 or 5", "#### not 5", "x is at least 5", "It exceeds 5", "more than 5",
        "at most 5", "The answer is at most 5", "the number is greater than 5",
        "the number is below 5", "5 percent of 100", "The sum of 5 and 6", "The sum is 5 + 1",
        "It is 5 times 2", "It is the square of 5", "the answer is the opposite of 5",
        "it is -(5)", "It is 5 if n is even, 6 otherwise", "The answer is 5 when x>0",
        "The answer is 5 for even n and 6 for odd n", "The answer: 5, 6, 7, or 8", "a=5, b=6",
        "The answer is a=5 and b=6", "It would be 5 without the fee", "except 5",
        "It is 10/2 - 1",
    ),
    "1,2": (
        "x=1", "1", "The roots are 1, 2 and 3", "1 or 3", "1-2", "1/2", "12", "1.2", "(1,2) or 3",
        "1 to 2", "The roots are not 1 and 2",
    ),
    "B": (
        "A and B", "Either A or B", "B or C", "Not B", "(A), (B)", r"\boxed{A}\boxed{B}",
        "Option A or B", "B, A", "The answer is A, not B", "The answer is B or D",
    ),
    "x=5": (
        "x=5 or x=6", "x>5", "x=-5", "2x=5", "x=5y", "x_1=5, x_2=6",
    ),
    "408": (
        r"\boxed{409}", r"\boxed{4 08}", r"\boxed{4,08}", r"\boxed{40 8}",
    ),
    "0.5": (
        r"\boxed{5}", r"\boxed{0,5 or 5}", r"\boxed{.05}", r"\boxed{50}",
    ),
    "-5": (
        "5", "The answer is 5", "--5",
    ),
    r"\emptyset": (
        r"\boxed{\text{none of the above}}", r"\boxed{\text{no idea}}",
    ),
    r"\mathbb{R}": (
        r"\boxed{\text{all rational numbers}}", r"\boxed{x\ne0}", r"\boxed{\mathbb{Q}}",
    ),
    "10": (
        r"\boxed{ten-ten}", r"\boxed{\text{tens}}", r"\boxed{\text{ten and a half}}",
    ),
    r"\frac{x^2}{2}+C": (
        r"\boxed{\frac{x^2}{2}+cx}", r"\boxed{x^2+c}",
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


@pytest.mark.parametrize(("gold", "completion"), pairs(RIGHT) + pairs(IN_WORDS))
def test_words_around_an_answer_are_no_part_of_it(gold: str, completion: str) -> None:
    assert is_right(gold, completion)


@pytest.mark.parametrize(("gold", "completion"), pairs(WRONG) + pairs(NOT_IN_WORDS))
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
