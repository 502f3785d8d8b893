"""Pays for a program that passes its row's tests: one execution for each, in a sandbox.

Owns: what goes into the sandbox is the program and one test's input; a failure of the sandbox is no
score, and a test that was not run is not passed. What a result is worth is decided in `judging`.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from headrace.config import CodeConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.code.formats import read_task
from headrace.verifiers.code.judging import TestResult, judged
from headrace.verifiers.code.program import defines, find_program
from headrace.verifiers.code.published import UnreadableRowError
from headrace.verifiers.code.task import MAX_VALUE_BYTES, CallTest, CodeTask, CodeTest, shuffled
from headrace.verifiers.component import Score, right_or_wrong, unscored
from headrace.verifiers.sandbox import canonical
from headrace.verifiers.sandbox.execution import (
    Ending,
    Execution,
    Executor,
    Job,
    Limits,
    PythonCall,
)

_MAX_TASKS = 32
"""Tasks kept as read, those of the groups that are being scored; rows stay packed as they came."""
VISIBLE_ONLY = "passes_visible_only"
"""Label of a program that passes every visible test and none of those held out that were run."""
_THREAD_BYTES = 1 << 15
"""A longer result is compared on a thread, so that nobody else waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReport:
    """How the score of one completion came about."""

    score: Score
    source: str | None = None
    """What was run, without the call."""
    results: tuple[TestResult, ...] = ()
    """Of the tests that were run, in that order."""
    num_tests: int = 0
    """Of those there were to run."""


class CodeComponent:
    """Runs the tests of a prompt on a completion's program, and pays by ``credit``."""

    def __init__(self, config: CodeConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self._limits = Limits(
            cpu_seconds=config.cpu_seconds,
            wall_seconds=config.wall_seconds,
            memory_mib=config.memory_mib,
            output_bytes=config.output_kib << 10,
        )
        self._tasks: OrderedDict[tuple[str, str], CodeTask] = OrderedDict()
        self._reading = threading.Lock()

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return the share of tests passed, as ``credit`` says; None where the sandbox failed."""
        return (await self.report(prompt, completion)).score

    async def report(self, prompt: Prompt, completion: str) -> CodeReport:
        """Return the score with every test that was run."""
        try:
            task = await self._task(prompt)
        except UnreadableRowError as error:
            return CodeReport(score=unscored(f"prompt {prompt.prompt_id}: {error}"))
        config = self._config
        program = find_program(
            completion,
            config.extract,
            language=config.language,
            unclosed_is_code=config.unclosed_is_code,
        )
        if program.source is None:
            return CodeReport(score=right_or_wrong(right=False, detail=program.problem))
        source = assembled(task, program.source)
        tests = self._to_run(task)
        results = await self._run(tests, source)
        return CodeReport(
            score=_score(results, tests, config),
            source=source,
            results=results,
            num_tests=len(tests),
        )

    async def close(self) -> None:
        """End the executor, which components share; idempotent."""
        await self._executor.close()

    async def _task(self, prompt: Prompt) -> CodeTask:
        key = (prompt.source, prompt.prompt_id)
        task = self._tasks.get(key)
        return await asyncio.to_thread(self._read, key, prompt) if task is None else task

    def _read(self, key: tuple[str, str], prompt: Prompt) -> CodeTask:
        """Read the row's tests once for the whole group; unpacking them can take a second."""
        with self._reading:
            task = self._tasks.get(key)
            if task is None:
                task = read_task(prompt.metadata, self._config)
                self._tasks[key] = task
                while len(self._tasks) > _MAX_TASKS:
                    self._tasks.popitem(last=False)
            return task

    def _to_run(self, task: CodeTask) -> tuple[CodeTest, ...]:
        """Return the tests in order; visible ones only where they can change the reward."""
        tests = shuffled(task, self._config.max_tests)
        if self._config.credit == "share" and self._config.stop_when_settled:
            return tuple(test for test in tests if not test.visible)
        return tests

    async def _run(self, tests: Sequence[CodeTest], source: str) -> tuple[TestResult, ...]:
        """Run ``tests``, some side by side, and look at their results in order.

        Waits for one execution after the other; what ends each is a limit of its own. Those begun
        beyond the one that settles the reward are cancelled.
        """
        results: list[TestResult] = []
        waiting = iter(tests)
        running: deque[asyncio.Task[TestResult]] = deque()
        try:
            while not (results and _is_settled(results[-1], self._config)):
                while len(running) < self._config.tests_at_once:
                    test = next(waiting, None)
                    if test is None:
                        break
                    running.append(asyncio.create_task(self._test(test, source)))
                if not running:
                    break
                results.append(await running[0])
                running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return tuple(results)

    async def _test(self, test: CodeTest, source: str) -> TestResult:
        job = self._job(test, source)
        execution = await self._executor.run(job)
        if execution.job_id != job.job_id:
            detail = f"the sandbox answered job {execution.job_id} instead of {job.job_id}"
            execution = replace(execution, ending=Ending.INFRA, detail=detail)
        return await _aside(lambda: judged(test, execution, self._config), execution)

    def _job(self, test: CodeTest, source: str) -> Job:
        """Return the program with one input, and nothing of what is expected."""
        call, stdin = None, b""
        if isinstance(test.check, CallTest):
            function = _found_as(test.check.function, source)
            arguments = list(test.check.arguments)
            encoded = canonical.encode(arguments, max_bytes=MAX_VALUE_BYTES)
            call = PythonCall(function=function, arguments=encoded)
        else:
            stdin = test.check.stdin.encode("utf-8", "surrogatepass")
        return Job(
            job_id=_job_id(self._config.language, source, stdin, call, self._limits),
            language=self._config.language,
            source=source,
            stdin=stdin,
            call=call,
            limits=self._limits,
        )


def assembled(task: CodeTask, program: str) -> str:
    """Return what is run: the task's prelude, its header where that is needed, the program."""
    parts = [task.prelude, program]
    if task.header:
        entry_point = task.entry_point or ""
        continues = not (defines(program, entry_point) or defines(program, "Solution"))
        parts = [task.prelude, task.header + program if continues else f"{task.header}\n{program}"]
    return "\n".join(part for part in parts if part)


def _found_as(function: str, source: str) -> str:
    """Return the method of ``class Solution`` where only that can be meant."""
    if "." not in function and not defines(source, function) and defines(source, "Solution"):
        return f"Solution.{function}"
    return function


def _job_id(
    language: str, source: str, stdin: bytes, call: PythonCall | None, limits: Limits
) -> str:
    """Return an id that stands for this work alone, also beside that of other components."""
    digest = hashlib.blake2b(digest_size=16)
    given = b"" if call is None else call.function.encode() + b"\0" + call.arguments
    settings = f"{language} {limits}".encode()
    for part in (settings, source.encode("utf-8", "surrogatepass"), stdin, given):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


async def _aside(judge: Callable[[], TestResult], execution: Execution) -> TestResult:
    size = len(execution.stdout) + len(execution.returned or b"")
    return judge() if size <= _THREAD_BYTES else await asyncio.to_thread(judge)


def _is_settled(result: TestResult, config: CodeConfig) -> bool:
    """Whether no further test can change what is paid."""
    if result.outcome is Outcome.INFRA:
        return True
    if result.passed or not config.stop_when_settled:
        return False
    match config.credit:
        case "all":
            return True
        case "share":
            return False
        case "visible_then_heldout":
            return result.test.visible
        case _:
            assert_never(config.credit)


def _score(results: Sequence[TestResult], tests: Sequence[CodeTest], config: CodeConfig) -> Score:
    failed = [result for result in results if not result.passed]
    broken = next((result for result in failed if result.outcome is Outcome.INFRA), None)
    if broken is not None:
        return unscored(f"test {broken.test.test_id}: {broken.detail}")
    reward = _reward(results, tests, config)
    passed = len(results) - len(failed)
    detail = f"{passed} of {len(tests)} tests passed"
    if failed:
        first = failed[0]
        detail += f"; test {first.test.test_id}: {first.outcome}: {first.detail}"
    tiers = ", ".join(sorted({result.tier for result in results}))
    outcome = failed[0].outcome if failed else Outcome.PASS
    return Score(
        outcome=outcome, reward=reward, detail=f"{detail} [{tiers}]", labels=_labels(results)
    )


def _labels(results: Sequence[TestResult]) -> tuple[str, ...]:
    """Note a program that knows what the prompt shows and nothing else; a hint, not a proof."""
    visible = [result.passed for result in results if result.test.visible]
    heldout = [result for result in results if not result.test.visible]
    wrong = any(result.outcome is Outcome.WRONG for result in heldout)
    only = bool(visible) and all(visible) and wrong and not any(r.passed for r in heldout)
    return (VISIBLE_ONLY,) if only else ()


def _reward(results: Sequence[TestResult], tests: Sequence[CodeTest], config: CodeConfig) -> float:
    """Return what is paid. A test without a result counts as not passed."""
    num_graded = sum(not test.visible for test in tests)
    num_passed = sum(result.passed and not result.test.visible for result in results)
    match config.credit:
        case "all":
            return float(len(results) == len(tests) and all(result.passed for result in results))
        case "share":
            return num_passed / num_graded
        case "visible_then_heldout":
            visible = [result for result in results if result.test.visible]
            return num_passed / num_graded if all(r.passed for r in visible) else 0.0
        case _:
            assert_never(config.credit)
