r"""What an optimizer would write to be paid, to crash the grader or to hang it.

Every row is graded by the real processes. Wrong is 0, right is 1; what is refused is wrong at
once, and nothing here may end unscored.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import MathConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers import check_answer
from headrace.verifiers.component import Score
from headrace.verifiers.math.component import MathComponent

WRONG = [
    # math-verify 0.9 says equal
    ("1/2^{99}", r"\boxed{1/2^{98}}"),
    ("1/2004!", "1/2006!"),
    ("4", r"\boxed{4\sqrt(2)}"),
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
    ("2x+1=0", "3x+1=0"),
    ("x+y=0", "x-y=0"),
    ("5 cm", "5 m"),
    (r"\pi", "3.14159265"),
    ("1/3", "0.333333"),
    ("(1,2)", r"\{1,2\}"),
    ("5", "2 3"),
    # no answer, or more than one
    ("3", ""),
    ("3", r"<think>\boxed{3}</think> I do not know"),
    ("B", "A or B or C"),
    ("3", r"\boxed{1 \text{ or } 3}"),
    ("3", r"\boxed{3} \boxed{4"),
    # looks like it
    ("0", "2x+1=0"),
    ("5", "2=5"),
    ("x", "y"),
    (r"\sqrt{x^2}", "x"),
    ("listen", "silent"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    (r"x\ge 2", "x>2"),
    ("3+4i", "4+3i"),
    ("x^2-1", "(x-1)(x+2)"),
    ("0", "1/2^{300}"),
    ("7", r"\boxed{1/0}"),
    ("50%", "0.5"),
]

REFUSED = [
    "10^{10^9}",
    "9^{9^{9^9}}",
    "9^9^9^9",
    "9**9**9**9",
    "(10^9)!",
    r"\boxed{5^(5^(5^(5^5)))}",
    "((9^{99})^{99})^{99}",
    "2^{20!}",
    "3e99999",
    r"e^{e^{e^{99}}}",
    r"\exp(\exp(\exp(99)))",
    r"\binom{99999}{4000}",
    r"\sum_{k=1}^{10^8}1/k",
    r"\sum_{k=1}^{100}1/k",
    "{" * 5000 + "}" * 5000,
    "(" * 12 + "1" + ")" * 12,
    "a_{" * 6 + "b" + "}" * 6,
    "|" * 300,
    r"\left(" * 100,
    "1" * 5000,
    "(a+b+c)^{99999}",
]

HARMLESS = [
    "__import__('os').system('touch PWNED')",
    r"\text{__import__('os').system('touch PWNED')}",
    "x^2+" * 39 + "1",
    "(a+b+c+d)^{9999}",
    "\x00\x01",
    "\ud800",
    "\\" * 300,
    "}{",
    "\\begin{pmatrix}1\\\\2",
    "5\u0301",
    "nan",
    "\\infty-\\infty",
]

RIGHT = [
    ("3", "3e0"),
    ("3", r"The answer is \boxed{3}."),
    ("3", r"<think>\boxed{4}</think> \boxed{3}"),
    (r"\dfrac{9}{7}", "9/7"),
    (r"\dfrac{9}{7}", r"\boxed{\frac{9}{7}}"),
    ("1/2^{99}", r"\frac{1}{2^{99}}"),
    (r"4\sqrt{2}", r"\boxed{4\sqrt(2)}"),
    (r"1-\frac{1}{\mathrm{e}}", r"1-\frac{1}{e}"),
    ("2x+1=0", "4x+2=0"),
    ("5 cm", r"\boxed{5\text{ cm}}"),
    ("5 cm", "5 centimeters"),
    ("5 cm", "5"),
    (r"\pi", "\u03c0"),
    ("1/2", "0.5"),
    ("1,3", r"\boxed{3 \text{ or } 1}"),
    (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}"),
    ("(1,2)", "1<x<2"),
    ("1<x<2", r"\boxed{(1,2)}"),
    ("5", "10 + 5 = 15\n2+3=5"),
    ("5", "x = 5"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("x^2-1", "(x-1)(x+1)"),
    ("1,234", "1234"),
    ("Tuesday", r"\boxed{\text{Tuesday}}"),
    (r"30^\circ", "30 degrees"),
    ("12!", "479001600"),
    ("0", r"\sqrt{2}\sqrt{2}-2"),
    ("1", r"\sin^2 x+\cos^2 x"),
    (r"x\ge 2", r"[2,\infty)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("5", "**Answer:** 5."),
    ("1e400", "10^{400}"),
    (r"50\%", "50%"),
    (r"50\%", "50"),
    ("5", "5 cm"),
    ("5", "5 apples"),
    (r"\{1,2\}", "2,1"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[MathComponent]:
    # Parsing takes some 50 ms; the deadline is far above, so that a busy machine changes nothing.
    component = MathComponent(MathConfig(kind="math", timeout_seconds=60.0))
    yield component
    component.pool.close_blocking()


def grade(grader: MathComponent, gold: str, completion: str) -> Score:
    prompt = Prompt(prompt_id="p", source="s", text="t", token_ids=(1,), answer=gold)
    return asyncio.run(grader.score(prompt, completion))


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_a_wrong_answer_is_wrong(grader: MathComponent, gold: str, completion: str) -> None:
    score = grade(grader, gold, completion)
    assert (score.reward, score.outcome) == (0.0, Outcome.WRONG), score.detail


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_a_right_answer_is_right(grader: MathComponent, gold: str, completion: str) -> None:
    score = grade(grader, gold, completion)
    assert (score.reward, score.outcome) == (1.0, Outcome.PASS), score.detail


@pytest.mark.parametrize("completion", REFUSED)
def test_what_would_take_for_ever_is_wrong_before_any_process_sees_it(completion: str) -> None:
    untouched = MathComponent(MathConfig(kind="math", timeout_seconds=60.0))
    score = grade(untouched, "7", completion)
    assert score.reward == 0.0
    assert untouched.pool.pids == ()


@pytest.mark.parametrize("completion", HARMLESS)
def test_odd_text_is_wrong_and_breaks_nothing(
    grader: MathComponent, completion: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert grade(grader, "7", completion).reward == 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_right_answer_is_right_from_a_thread(grader: MathComponent) -> None:
    rewards: list[float | None] = []
    thread = threading.Thread(
        target=lambda: rewards.append(grade(grader, r"\frac{1}{2}", r"\frac{2}{4}").reward)
    )
    thread.start()
    thread.join(120)
    assert rewards == [1.0]


def test_a_blown_deadline_is_our_failure_and_no_wrong_answer() -> None:
    component = MathComponent(MathConfig(kind="math", timeout_seconds=2.0, num_processes=1))
    try:
        grade(component, r"\frac{1}{2}", r"\sin(x)")
        # However fast the machine is, a process that stands still answers nobody.
        for pid in component.pool.pids:
            os.kill(pid, signal.SIGSTOP)
        score = grade(component, r"\frac{1}{2}", r"\cos(x)")
    finally:
        component.pool.close_blocking()
    assert score.outcome is Outcome.TIMEOUT_WALL
    assert score.reward is None


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("3 +", "cannot be read"),
        ("", "cannot be read"),
        (r"\foo{", "cannot be read"),
        ("10^{10^9}", "refused"),
    ],
)
def test_an_unreadable_expected_answer_is_found_before_the_run(gold: str, reason: str) -> None:
    assert reason in (check_answer(MathConfig(kind="math"), gold) or "")


@pytest.mark.parametrize("gold", ["5", "Tuesday", r"\dfrac{9}{7}", r"$\frac{1}{2}$"])
def test_a_readable_expected_answer_is_accepted(gold: str) -> None:
    assert check_answer(MathConfig(kind="math"), gold) is None
