r"""`math` in both directions: what is right is paid and what only looks like it is not."""

import asyncio
from collections.abc import Iterator

import pytest

from headrace.config import MathConfig
from headrace.types import Prompt
from headrace.verifiers.math import MathComponent
from headrace.verifiers.math_text import find_answer

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
    ("**4**", "4"),
    ("*4*", "4"),
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
    "completion", ["The answer is **4", "The answer is **4** or **5**.", "<answer></answer>"]
)
def test_markup_that_is_not_closed_or_not_around_one_answer_is_no_answer(
    grader: MathComponent, completion: str
) -> None:
    assert reward(grader, "4", completion) == 0.0


def test_the_answer_of_a_huge_line_takes_no_time() -> None:
    assert find_answer("answer: " + "**a " * 100_000, "answer") is not None
    assert find_answer("**a " * 100_000, "answer") is not None
