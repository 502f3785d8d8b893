"""What one test says of one execution.

Owns: a pass is a clean end and a complete result that equals the expected one. The end is the
kernel's word; the result is bytes that are decoded and compared here, where the expected value is
and the program is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from headrace.config import CodeConfig
from headrace.types import Outcome
from headrace.verifiers.code.comparing import Rule, same_output, same_value, seen
from headrace.verifiers.code.task import CallTest, CodeTest, OutputTest, Tolerance, literal
from headrace.verifiers.component import shown
from headrace.verifiers.sandbox import canonical
from headrace.verifiers.sandbox.execution import Ending, Execution


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """One line of the table that ``--explain`` prints."""

    __test__ = False  # it is no test of pytest's

    test: CodeTest
    outcome: Outcome
    detail: str
    """One line: what was found against what was expected, or how it ended."""
    tier: str
    """How the execution was isolated."""
    cpu_seconds: float
    wall_seconds: float

    @property
    def passed(self) -> bool:
        """Whether the program did what the test asks."""
        return self.outcome is Outcome.PASS


def judged(test: CodeTest, execution: Execution, config: CodeConfig) -> TestResult:
    """Return what ``execution``, which ran with the input of ``test``, is worth."""
    outcome, detail = _ended(execution)
    if outcome is Outcome.PASS:
        outcome, detail = _compared(test, execution, config)
    return TestResult(
        test=test,
        outcome=outcome,
        detail=detail,
        tier=execution.tier.value,
        cpu_seconds=execution.cpu_seconds,
        wall_seconds=execution.wall_seconds,
    )


def _ended(execution: Execution) -> tuple[Outcome, str]:  # noqa: PLR0911 - one for each ending
    """Return PASS where the program ended cleanly, which is worth nothing yet."""
    match execution.ending:
        case Ending.EXITED if execution.is_clean:
            return Outcome.PASS, ""
        case Ending.EXITED:
            return Outcome.RUNTIME, f"exit status {execution.exit_status}{_last_words(execution)}"
        case Ending.SIGNALED:
            return Outcome.RUNTIME, f"killed by signal {execution.signal}{_last_words(execution)}"
        case Ending.TIMEOUT_CPU:
            return Outcome.TIMEOUT_CPU, f"{execution.cpu_seconds:.3g} s of processor time"
        case Ending.TIMEOUT_WALL:
            return Outcome.TIMEOUT_WALL, f"{execution.wall_seconds:.3g} s on the clock"
        case Ending.OOM:
            return Outcome.OOM, "out of memory"
        case Ending.OUTPUT_LIMIT:
            return Outcome.OUTPUT_LIMIT, "too much output"
        case Ending.VIOLATION:
            return Outcome.VIOLATION, execution.detail
        case Ending.INFRA:
            return Outcome.INFRA, execution.detail
        case _:
            assert_never(execution.ending)


def _compared(test: CodeTest, execution: Execution, config: CodeConfig) -> tuple[Outcome, str]:
    match test.check:
        case OutputTest() as check:
            right = same_output(execution.stdout, check.stdout, config.stdout, _tolerance(config))
            found = shown(execution.stdout.decode(errors="backslashreplace"))
            detail = f"wrote {found} against {shown(check.stdout)}"
            return (Outcome.PASS if right else Outcome.WRONG), detail
        case CallTest() as check:
            return _returned(check, execution, config)
        case _:
            assert_never(test.check)


def _returned(check: CallTest, execution: Execution, config: CodeConfig) -> tuple[Outcome, str]:
    if execution.returned is None:
        why = f"status 0, and {check.function} returned nothing that can be compared"
        return Outcome.WRONG, f"{why}{_last_words(execution)}"
    try:
        value = canonical.decode(execution.returned, max_bytes=config.output_kib << 10)
        value = seen(value, check.views)
    except ValueError as error:
        return Outcome.WRONG, str(error)
    how = config.tuple_is_list
    rule = Rule(
        tolerance=check.tolerance or _tolerance(config),
        tuple_is_list=how == "always" or (how == "from_json" and check.from_json),
        nan_is_nan=config.nan_is_nan,
    )
    right = same_value(value, check.expected, rule)
    detail = f"returned {_short(value)} against {_short(check.expected)}"
    return (Outcome.PASS if right else Outcome.WRONG), detail


def _tolerance(config: CodeConfig) -> Tolerance:
    return Tolerance(absolute=config.absolute_tolerance, relative=config.relative_tolerance)


def _last_words(execution: Execution) -> str:
    """Return the last line of standard error: where Python names the exception."""
    tail = execution.stderr[-2000:].decode(errors="backslashreplace")
    lines = [line for line in tail.splitlines() if line.strip()]
    return f": {shown(lines[-1].strip(), 160)}" if lines else ""


def _short(value: object) -> str:
    try:
        text = literal(value)
    except ValueError:
        # An integer with more digits than Python writes out.
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else text[:80] + "..."  # noqa: PLR2004 - characters of a line
