r"""Each cap on what a policy may write: refused for its own reason, before anything is computed.

And what no cap forbids, because it costs nothing: graded, and wrong.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from headrace.config import MathConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.component import Score
from headrace.verifiers.math.component import MathComponent
from headrace.verifiers.process_pool import Reply, ReplyStatus

REFUSED = [
    ("1+" * 600 + "1", "1201 characters"),
    ("1" * 1001, "1001 characters"),
    ("{" * 400 + "1" + "}" * 400, "brackets deeper than 20"),
    (r"\sqrt" * 199 + "2", "nested deeper than 60"),
    (r"\sin" * 240 + "2", "nested deeper than 60"),
    (r"\frac" * 199, "nested deeper than 60"),
    ("/".join("x" * 100), "a chain of more than 60"),
    ("^".join("x" * 100), "a chain of more than 60"),
    (r"\cup".join(["(1,2)"] * 100), "a chain of more than 60"),
    (r"\pm" * 100 + "1", "a chain of more than 60"),
    (",".join("1" * 65), "a list of 65"),
    ("10^{10^9}", "an exponent above 10000"),
    ("2^{-99999}", "an exponent above 10000"),
    ("(x+1)^{99999}", "an exponent above 10000"),
    ("((9^{99})^{99})^{99}", "more than 65536 bits"),
    ("9999^{9999}", "more than 65536 bits"),
    ("*".join(["5000!"] * 20), "more than 65536 bits"),
    ("+".join(["5000!"] * 100), "more than 65536 bits"),
    (r"\binom{99999}{4000}", "more than 65536 bits"),
    ("(10^9)!", "a factorial of a factorial or of a power"),
    ("(3!)!", "a factorial of a factorial or of a power"),
    ("5001!", "a factorial above 5000"),
    (r"e^{e^{e^{99}}}", "a tower of powers"),
    (r"\exp(\exp(\exp(x)))", "a tower of powers"),
    ("1e99999", "a power of ten above 400"),
    ("\ufdfa" * 100, "characters; at most 1000"),
]

CHEAP = [
    r"\sin(10^{400})",
    r"\cos(10^{9999})",
    "+".join([r"\sin(10^{300})"] * 60),
    r"(1+\pi)^{9999}",
    r"(\sqrt2+\sqrt3+\sqrt5)^{9999}",
    "x!",
    r"(x^{9999})!",
    r"\binom{x}{5000}",
    r"\ln(\ln(\ln(\ln x)))",
    r"e^{e^{10000}}",
    r"e^{-e^{10000}}",
    r"\sqrt[9999]{2}",
    r"\sqrt[10^{400}]{2}",
    r"\tan\frac{\pi}{2}",
    r"\ln 0",
    "+".join([r"\sqrt{5000!}"] * 5),
    "+".join([r"\ln(4999!)"] * 5),
    "*".join(["x"] * 400),
    "-" * 900 + "1",
    ",".join(rf"\sqrt{{{n}}}" for n in range(60)),
    r"\cup".join(rf"(\sqrt{{{n}}},\sqrt{{{n + 1}}})" for n in range(18)),
    r"\begin{pmatrix}" + "&".join(["1"] * 300) + r"\end{pmatrix}",
    r"\lfloor 10^{400}\pi\rfloor",
    "x_{" + "a" * 900 + "}",
    r"x^{9999}-x^{9999}",
]

GAMMAS = "+".join(rf"(\pi+{n})!" for n in range(60))
COSTLY = [
    (r"\pi", rf"\frac{{{GAMMAS}}}{{\sin\pi}}+10^{{9000}}"),
    (r"\{\pi,e\}", rf"\{{\frac{{{GAMMAS}}}{{\sin\pi}}+10^{{9000}},3\}}"),
    ("x+1", "x+2+10^{9000}(" + "+".join(f"(xx+{n})!-(xx+{n})!" for n in range(24)) + ")"),
    ("(0,1)", rf"(\frac{{{GAMMAS}}}{{\sin\pi}}+10^{{9000}},1)"),
    ("y=x", "y=x+10^{9000}(" + "+".join(f"(x+{n})!-(x+{n})!" for n in range(24)) + ")"),
]
"""Each within every cap on what is written, and minutes of computing."""


@pytest.fixture(scope="module")
def grader() -> Iterator[MathComponent]:
    component = MathComponent(MathConfig(kind="math", timeout_seconds=60.0, num_processes=1))
    yield component
    component.pool.close_blocking()


def grade(grader: MathComponent, gold: str, text: str) -> Score:
    prompt = Prompt(prompt_id="p", source="s", text="t", token_ids=(1,), answer=gold)
    return asyncio.run(grader.score(prompt, rf"\boxed{{{text}}}"))


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_what_is_over_a_cap_is_wrong_for_that_reason_and_starts_no_process(
    text: str, reason: str
) -> None:
    untouched = MathComponent(MathConfig(kind="math", timeout_seconds=60.0))
    score = grade(untouched, r"\sqrt{2}", text)
    assert (score.reward, score.outcome) == (0.0, Outcome.WRONG)
    assert "refused: " in score.detail
    assert reason in score.detail
    assert untouched.pool.pids == ()


@pytest.mark.parametrize("text", CHEAP)
@pytest.mark.parametrize("gold", [r"\sqrt{2}", "x+1", r"(0,\pi)"])
def test_what_looks_expensive_and_is_not_is_graded_by_a_process_that_lives_on(
    grader: MathComponent, gold: str, text: str
) -> None:
    score = grade(grader, gold, text)
    assert (score.reward, score.outcome) == (0.0, Outcome.WRONG), score.detail
    assert len(grader.pool.pids) <= 1


@pytest.mark.parametrize(("gold", "text"), COSTLY)
def test_what_would_compute_for_minutes_is_wrong_and_does_not_run_out_of_time(
    grader: MathComponent, gold: str, text: str
) -> None:
    score = grade(grader, gold, text)
    assert (score.reward, score.outcome) == (0.0, Outcome.WRONG), score.detail
    assert "more computing than a comparison may take" in score.detail


def test_an_expected_answer_that_no_answer_could_be_compared_with_is_a_fault_at_load(
    grader: MathComponent,
) -> None:
    problem = grader.answer_problem(rf"\frac{{{GAMMAS}}}{{\pi}}+10^{{9000}}", {})
    assert problem is not None
    assert "takes more computing than a comparison may take" in problem


def test_many_threads_get_the_verdicts_that_one_gets(grader: MathComponent) -> None:
    answers = [r"\frac{2}{\sqrt2}", r"\sqrt3", "2^{1/2}", "1.41421356", r"\sqrt{2}"] * 4
    found: dict[int, float | None] = {}

    def one(place: int) -> None:
        found[place] = grade(grader, r"\sqrt{2}", answers[place]).reward

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[place] for place in range(len(answers))] == [1.0, 0.0, 1.0, 0.0, 1.0] * 4


@pytest.mark.parametrize(
    ("fields", "outcome", "reward"),
    [
        ({"status": "timeout", "cpu_seconds": 3.0}, Outcome.TIMEOUT_CPU, 0.0),
        ({"status": "timeout", "cpu_seconds": 0.1}, Outcome.TIMEOUT_WALL, None),
        ({"status": "oom"}, Outcome.OOM, 0.0),
        ({"status": "crash", "exit_status": -signal.SIGSEGV}, Outcome.RUNTIME, 0.0),
        ({"status": "crash", "exit_status": -signal.SIGKILL}, Outcome.INFRA, None),
        ({"status": "crash", "exit_status": None}, Outcome.INFRA, None),
        ({"status": "error"}, Outcome.RUNTIME, None),
    ],
)
def test_who_brings_down_its_grading_is_not_left_out_for_it(
    fields: dict[str, object], outcome: Outcome, reward: float | None
) -> None:
    component = MathComponent(MathConfig(kind="math", timeout_seconds=60.0))
    asked: list[object] = []

    async def call(job: object) -> Reply:
        asked.append(job)
        return Reply(**{**fields, "status": ReplyStatus(str(fields["status"]))})

    component.pool.call = call
    prompt = Prompt(prompt_id="p", source="s", text="t", token_ids=(1,), answer="\\pi")
    score = asyncio.run(component.score(prompt, "\\boxed{\\pi + e - e}"))
    assert (score.outcome, score.reward) == (outcome, reward)
    assert len(asked) == (2 if fields["status"] == "oom" else 1)
