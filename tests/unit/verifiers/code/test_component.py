"""What a program is paid, and what never goes where it runs."""

from __future__ import annotations

import asyncio
import json

import pytest
from code_lab import Grade, InProcess

from headrace.config import CodeConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.code.component import CodeComponent
from headrace.verifiers.sandbox.execution import Ending, Execution, Job

ADD = {"test_list": [f"assert add({i}, 1) == {i + 1}" for i in range(6)]}
ECHO = {"tests": [{"input": f"{i}\n", "output": f"{i}\n", "visible": i < 2} for i in range(5)]}


def block(source: str) -> str:
    return f"Sure:\n```python\n{source}\n```\n"


RIGHT = block("def add(a, b):\n    return a + b")
WRONG = block("def add(a, b):\n    return 1")


def test_a_right_program_is_paid_one_and_a_wrong_one_nothing(grade: Grade) -> None:
    right = grade(ADD, RIGHT)
    assert (right.score.reward, right.score.outcome) == (1.0, Outcome.PASS)
    assert right.score.detail == "6 of 6 tests passed [none]"
    wrong = grade(ADD, WRONG)
    assert (wrong.score.reward, wrong.score.outcome) == (0.0, Outcome.WRONG)
    assert "returned 1 against" in wrong.score.detail


def test_a_program_that_reads_and_writes_is_compared_by_what_it_writes(grade: Grade) -> None:
    assert grade(ECHO, block("print(input())")).score.reward == 1.0
    by_bytes = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert grade(ECHO, block(by_bytes)).score.reward == 1.0
    assert grade(ECHO, block("print(input())\nprint('debug')")).score.reward == 0.0


def test_leaving_early_is_worth_nothing_but_after_the_right_output(grade: Grade) -> None:
    early = grade(ADD, block("import sys\nsys.exit(0)\ndef add(a, b):\n    return a + b"))
    assert (early.score.reward, early.score.outcome) == (0.0, Outcome.WRONG)
    assert "status 0, and add returned nothing" in early.score.detail
    assert grade(ECHO, block("print(input())\nraise SystemExit(0)")).score.reward == 1.0
    late = grade(ECHO, block("print(input())\nraise SystemExit(3)"))
    assert (late.score.reward, late.score.outcome) == (0.0, Outcome.RUNTIME)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("timeout_cpu", Outcome.TIMEOUT_CPU),
        ("timeout_wall", Outcome.TIMEOUT_WALL),
        ("oom", Outcome.OOM),
        ("output_limit", Outcome.OUTPUT_LIMIT),
        ("violation", Outcome.VIOLATION),
        ("signaled", Outcome.RUNTIME),
    ],
)
def test_how_a_program_fails_is_its_own_fault_and_named(
    grade: Grade, said: str, outcome: Outcome
) -> None:
    score = grade(ECHO, block(f"print(input())  # ends: {said}")).score
    assert (score.reward, score.outcome) == (0.0, outcome)
    assert not score.failed


def test_a_failure_of_the_sandbox_is_no_score(grade: Grade) -> None:
    score = grade(ECHO, block("print(input())  # ends: infra")).score
    assert (score.reward, score.outcome) == (None, Outcome.INFRA)


def test_an_exception_is_named_by_the_last_line_of_its_trace(grade: Grade) -> None:
    score = grade(ADD, block("def add(a, b):\n    return 1 / 0")).score
    assert score.outcome is Outcome.RUNTIME
    assert "ZeroDivisionError" in score.detail


def test_no_expected_value_goes_where_the_program_runs(grade: Grade, executor: InProcess) -> None:
    secret = "xyzzy-expected"
    stdin = {"tests": [{"input": "1", "output": secret}, {"input": "2", "output": secret}]}
    call = {"test_list": [f"assert f({i}) == '{secret}'" for i in range(3)],
            "test_setup_code": "import math"}  # fmt: skip
    check = {"entry_point": "f", "prompt": "def f(x):\n    ''\n",
             "test": f"def check(candidate):\n    assert candidate(1) == '{secret}'"}  # fmt: skip
    private = {"public_test_cases": "[]", "metadata": "{}", "private_test_cases":
               json.dumps([{"input": "1", "output": secret, "testtype": "stdin"}])}  # fmt: skip
    for row in (stdin, call, check, private):
        grade(row, block("def f(x):\n    return 1"), stop_when_settled=False)
    assert len(executor.jobs) == 2 + 3 + 1 + 1
    assert not [job for job in executor.jobs if secret in repr(job)]


def test_each_execution_gets_one_tests_input(grade: Grade, executor: InProcess) -> None:
    grade(ECHO, block("print(input())"))
    assert sorted(job.stdin for job in executor.jobs) == [f"{i}\n".encode() for i in range(5)]


def test_a_program_hard_coded_to_the_visible_tests_fails_those_held_out(grade: Grade) -> None:
    hard = block("x = input()\nprint(x if x in ('0', '1') else '?')")
    for credit in ("all", "share", "visible_then_heldout"):
        assert grade(ECHO, hard, credit=credit).score.reward == 0.0
    assert grade(ECHO, hard).score.labels == ("passes_visible_only",)
    assert not grade(ECHO, block("print(input())")).score.labels
    assert not grade(ECHO, block("print('?')")).score.labels


def test_partial_credit_is_the_share_of_tests_held_out(grade: Grade) -> None:
    partly = block("x = input()\nprint(x if x in ('0', '1', '2', '3') else '?')")
    assert grade(ECHO, partly).score.reward == 0.0
    assert grade(ECHO, partly, credit="share").score.reward == pytest.approx(2 / 3)
    gated = grade(ECHO, partly, credit="visible_then_heldout")
    assert gated.score.reward == pytest.approx(2 / 3)
    assert gated.score.outcome is Outcome.WRONG
    blind = block("x = input()\nprint(x if x in ('0', '2', '3', '4') else '?')")
    assert grade(ECHO, blind, credit="share").score.reward == 1.0
    assert grade(ECHO, blind, credit="visible_then_heldout").score.reward == 0.0


def test_tests_run_in_an_order_of_their_own_that_never_changes(
    grade: Grade, executor: InProcess
) -> None:
    grade(ECHO, block("print(input())"))
    grade(ECHO, block("print(input())"))
    order = [job.stdin for job in executor.jobs[:5]]
    assert order == [job.stdin for job in executor.jobs[5:]]
    assert {*order[:2]} == {b"0\n", b"1\n"}


def test_nothing_runs_once_the_reward_is_settled(grade: Grade, executor: InProcess) -> None:
    many = {"test_list": [f"assert add({i}, 1) == {i + 1}" for i in range(50)]}
    report = grade(many, WRONG, tests_at_once=4)
    assert len(report.results) <= 2
    assert len(executor.jobs) <= 6
    executor.jobs.clear()
    assert len(grade(many, WRONG, stop_when_settled=False).results) == 50


def test_what_runs_beyond_the_deciding_test_is_cancelled(executor: InProcess) -> None:
    executor.seconds = 0.01

    class Slow(InProcess):
        async def run(self, job: Job) -> Execution:
            self.seconds = 60.0 if len(self.jobs) else 0.0
            return await super().run(job)

    slow = Slow()
    component = CodeComponent(CodeConfig(kind="code", tests_at_once=3), slow)
    prompt = Prompt(prompt_id="p", source="train", text="", token_ids=(0,), metadata=ADD)
    report = asyncio.run(component.report(prompt, block("x = 1")))
    assert report.score.reward == 0.0
    assert len(slow.jobs) == 3
    assert slow.num_cancelled == 2


def test_a_cancelled_score_leaves_nothing_running() -> None:
    slow = InProcess(wait_for=3)
    slow.seconds = 60.0
    component = CodeComponent(CodeConfig(kind="code", tests_at_once=3), slow)
    prompt = Prompt(prompt_id="p", source="train", text="", token_ids=(0,), metadata=ADD)

    async def cancel() -> None:
        task = asyncio.create_task(component.score(prompt, RIGHT))
        await slow.all_started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert slow.num_cancelled == 3


def test_a_humaneval_completion_may_continue_the_prompt_or_define_anew(grade: Grade) -> None:
    row = {
        "prompt": "import math\ndef area(r):\n    '''Area of a circle.'''\n",
        "entry_point": "area",
        "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n",
    }
    assert grade(row, "    return math.pi * r * r\n", extract="whole").score.reward == 1.0
    anew = block("def area(r):\n    return math.pi * r * r")
    assert grade(row, anew).score.reward == 1.0
    assert grade(row, block("x = 1")).score.reward == 0.0


def test_a_method_of_class_solution_is_found_and_may_use_what_its_site_imports(
    grade: Grade,
) -> None:
    row = {
        "public_test_cases": "[]",
        "private_test_cases": json.dumps(
            [{"input": "[3, 1]", "output": "[1, 3]", "testtype": "functional"}]
        ),
        "metadata": '{"func_name": "order"}',
        "starter_code": "class Solution:\n    def order(self, items: List[int]) -> List[int]:\n",
    }
    method = "class Solution:\n    def order(self, items: List[int]) -> List[int]:\n"
    assert grade(row, block(method + "        return sorted(items)")).score.reward == 1.0
    assert grade(row, block("def order(items):\n    return sorted(items)")).score.reward == 1.0
    as_tuple = block(method + "        return tuple(sorted(items))")
    assert grade(row, as_tuple).score.reward == 1.0
    assert grade(row, as_tuple, tuple_is_list="never").score.reward == 0.0


def test_a_completion_without_a_program_is_wrong_and_nothing_runs(
    grade: Grade, executor: InProcess
) -> None:
    score = grade(ADD, "I think the answer is 4.").score
    assert (score.reward, score.outcome) == (0.0, Outcome.WRONG)
    assert not executor.jobs


def test_a_row_without_usable_tests_is_our_fault(grade: Grade) -> None:
    score = grade({"tests": []}, RIGHT).score
    assert (score.reward, score.outcome) == (None, Outcome.INFRA)


def test_an_answer_to_another_job_is_no_score() -> None:
    class Confused(InProcess):
        async def run(self, job: Job) -> Execution:
            done = await super().run(job)
            return Execution(job_id="other", tier=done.tier, ending=Ending.EXITED, exit_status=0,
                             stdout=done.stdout)  # fmt: skip

    component = CodeComponent(CodeConfig(kind="code"), Confused())
    prompt = Prompt(prompt_id="p", source="train", text="", token_ids=(0,), metadata=ECHO)
    score = asyncio.run(component.score(prompt, block("print(input())")))
    assert (score.reward, score.outcome) == (None, Outcome.INFRA)


def test_the_same_program_and_input_are_the_same_job(grade: Grade, executor: InProcess) -> None:
    grade(ECHO, block("print(input())"))
    grade(ECHO, block("print(input())"))
    grade(ECHO, block("print(input() )"))
    ids = [job.job_id for job in executor.jobs]
    assert len(set(ids)) == 10
    assert ids[:5] == ids[5:10]
    grade(ECHO, block("print(input())"), cpu_seconds=1.0)
    assert not {job.job_id for job in executor.jobs[15:]} & set(ids)


def test_only_so_many_held_out_tests_are_run_as_declared(grade: Grade, executor: InProcess) -> None:
    grade(ECHO, block("print(input())"), max_tests=1)
    assert len(executor.jobs) == 3


def test_a_huge_output_is_compared_all_the_same(grade: Grade) -> None:
    row = {"tests": [{"input": "", "output": "x" * 200_000}]}
    assert grade(row, block("print('x' * 200_000)")).score.reward == 1.0


REFERRED = {
    "prompt": "from typing import List\ndef total(xs: List[int]) -> int:\n    '''Adds.'''\n",
    "entry_point": "total",
    "test": (
        "import math\n"
        "def assertion(out, exp, atol):\n    assert out == exp\n"
        "def ref_func(xs: List[int]):\n    return sum(xs)  # the secret way\n"
        "def check(candidate):\n"
        "    for inp in [[[1, 2]], [[3]], [[]]]:\n"
        "        assertion(candidate(*inp), ref_func(*inp), 0)\n"
    ),
}


def test_a_row_may_expect_what_its_own_solution_returns(grade: Grade, executor: InProcess) -> None:
    right = block("def total(xs):\n    return 0 + sum(xs)")
    assert grade(REFERRED, right).score.reward == 1.0
    assert grade(REFERRED, block("def total(xs):\n    return len(xs)")).score.reward == 0.0
    theirs = [job for job in executor.jobs if job.call and job.call.function == "total"]
    assert theirs
    assert not [job for job in theirs if "secret" in job.source or "ref_func" in job.source]


def test_a_reference_runs_once_for_a_whole_group(executor: InProcess) -> None:
    component = CodeComponent(CodeConfig(kind="code"), executor)
    prompt = Prompt(prompt_id="p", source="train", text="", token_ids=(0,), metadata=REFERRED)

    async def score_group() -> None:
        for k in range(4):
            source = f"def total(xs):\n    return {k} + sum(xs) - {k}"
            assert (await component.score(prompt, block(source))).reward == 1.0

    asyncio.run(score_group())
    references = [job for job in executor.jobs if job.call and job.call.function == "ref_func"]
    assert len(references) == 3
    assert len(executor.jobs) == 3 + 4 * 3


def test_a_reference_that_fails_is_our_fault(grade: Grade) -> None:
    broken = REFERRED | {"test": REFERRED["test"].replace("sum(xs)", "sum(xs) / 0")}
    score = grade(broken, block("def total(xs):\n    return 0")).score
    assert (score.reward, score.outcome) == (None, Outcome.INFRA)
    assert "its reference solution returned nothing" in score.detail
