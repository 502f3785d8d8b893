"""Pays for a program that passes its row's tests: one execution for each, in a sandbox.

Owns: what goes into the sandbox is the program and one test's input; a failure of the sandbox is no
score, and a test that was not run is not passed. What a result is worth is decided in `judging`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.config import CodeConfig
from headrace.types import Prompt
from headrace.verifiers.code.credit import is_settled, score_of
from headrace.verifiers.code.formats import read_task
from headrace.verifiers.code.judging import TestResult, judged
from headrace.verifiers.code.program import assembled, find_program, found_as
from headrace.verifiers.code.published import UnreadableRowError
from headrace.verifiers.code.task import (
    MAX_VALUE_BYTES,
    CallTest,
    CodeTask,
    CodeTest,
    OutputTest,
    Reference,
    Value,
    shuffled,
)
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
_THREAD_BYTES = 1 << 15
"""A longer result is compared on a thread, so that nobody else waits for it."""


_MAX_REFERENCES = 1024
_MISSING = object()


class ReferenceFailedError(Exception):
    """A row's own solution returned nothing, so nobody knows what is right."""


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
        self._references: OrderedDict[str, Value] = OrderedDict()
        """Job -> what a row's own solution returned."""

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
        try:
            results = await self._run(tests, source)
        except ReferenceFailedError as error:
            return CodeReport(score=unscored(f"prompt {prompt.prompt_id}: {error}"))
        return CodeReport(
            score=score_of(results, tests, config),
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
            while not (results and is_settled(results[-1], self._config)):
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
        check = test.check
        if isinstance(check, OutputTest):
            job = self._job(source, stdin=check.stdin.encode("utf-8", "surrogatepass"))
        else:
            if isinstance(check.expected, Reference):
                test = replace(test, check=await self._referred(check, check.expected))
            call = _call(found_as(check.function, source), check.arguments)
            job = self._job(source, call=call)
        execution = await self._execution(job)
        return await _aside(lambda: judged(test, execution, self._config), execution)

    async def _referred(self, check: CallTest, reference: Reference) -> CallTest:
        """Return ``check`` with what the row's own solution returns, in an execution of its own.

        Raises ReferenceFailedError where it returns nothing.
        """
        call = _call(reference.function, reference.arguments)
        job = self._job(reference.source, call=call)
        value = self._references.get(job.job_id, _MISSING)
        if value is _MISSING:
            execution = await self._execution(job)
            value = _value_of(execution, self._limits.output_bytes)
            self._references[job.job_id] = value
            while len(self._references) > _MAX_REFERENCES:
                self._references.popitem(last=False)
        return replace(check, expected=value)

    async def _execution(self, job: Job) -> Execution:
        execution = await self._executor.run(job)
        if execution.job_id != job.job_id:
            detail = f"the sandbox answered job {execution.job_id} instead of {job.job_id}"
            return replace(execution, ending=Ending.INFRA, detail=detail)
        return execution

    def _job(self, source: str, *, stdin: bytes = b"", call: PythonCall | None = None) -> Job:
        """Return a program with one input, and nothing of what is expected."""
        return Job(
            job_id=_job_id(self._config.language, source, stdin, call, self._limits),
            language=self._config.language,
            source=source,
            stdin=stdin,
            call=call,
            limits=self._limits,
        )


def _call(function: str, arguments: Sequence[Value]) -> PythonCall:
    encoded = canonical.encode(list(arguments), max_bytes=MAX_VALUE_BYTES)
    return PythonCall(function=function, arguments=encoded)


def _value_of(execution: Execution, max_bytes: int) -> Value:
    """Return what a reference returned. Raises ReferenceFailedError where it did not."""
    if execution.is_clean and execution.returned is not None:
        with contextlib.suppress(canonical.DecodeError):
            return canonical.decode(execution.returned, max_bytes=max_bytes)
    words = execution.stderr[-200:].decode(errors="backslashreplace").strip()
    msg = f"its reference solution returned nothing: {execution.ending} {words} {execution.detail}"
    raise ReferenceFailedError(msg)


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
