"""From a row's columns to its tests, for each format that data sets publish them in.

Owns: a row whose tests are not all understood is refused with the reason, never graded by those
that were; a row without a test is refused. Nothing of a row is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from headrace.config import CodeConfig, RowFormat
from headrace.verifiers.code.checks import Checks, read_checks
from headrace.verifiers.code.published import (
    UnreadableRowError,
    parse_json,
    parse_private_tests,
)
from headrace.verifiers.code.task import (
    MAX_TESTS,
    MAX_VALUE_BYTES,
    CallTest,
    CodeTask,
    CodeTest,
    OutputTest,
    Reference,
    Value,
    hold_out,
    numbered,
)
from headrace.verifiers.sandbox import canonical

Row = Mapping[str, object]
Check = OutputTest | CallTest

_TESTS_COLUMN: Mapping[RowFormat, str] = {
    "tests": "tests",
    "livecodebench": "private_test_cases",
    "humaneval": "test",
    "mbpp": "test_list",
    "apps": "input_output",
}
_CLASS_PRELUDE = """\
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import *
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from builtins import *
"""
"""What a method of ``class Solution`` may use without importing it, as on the sites that ask so."""


def read_task(row: Row, config: CodeConfig) -> CodeTask:
    """Return the tests of ``row``. Raises UnreadableRowError saying why it cannot be graded."""
    kind = _told_by_columns(row) if config.format == "auto" else config.format
    column = config.tests_column or _TESTS_COLUMN[kind]
    match kind:
        case "tests":
            task = _own(row, column)
        case "livecodebench":
            task = _livecodebench(row, column)
        case "humaneval":
            task = _humaneval(row, column)
        case "mbpp":
            task = _mbpp(row, column)
        case "apps":
            task = _apps(row, column)
        case "auto":
            msg = "auto was resolved above"
            raise AssertionError(msg)
        case _:
            assert_never(kind)
    return task.settled(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """The tests of a row before any is held out."""

    checks: Sequence[Check]
    private: Sequence[Check] = ()
    """Those that the row itself keeps from the policy."""
    unreadable: Sequence[str] = ()
    prelude: str = ""
    header: str = ""
    entry_point: str | None = None

    def settled(self, config: CodeConfig) -> CodeTask:
        self._refuse(config)
        if self.private:
            tests: tuple[CodeTest, ...] = (
                *numbered(self.checks, visible=True),
                *numbered(self.private, visible=False, prefix="held-out "),
            )
        else:
            tests = hold_out(numbered(self.checks, visible=True), config.heldout_share)
        return CodeTask(
            tests=tests,
            prelude=self.prelude,
            header=self.header,
            entry_point=self.entry_point,
            num_dropped=len(self.unreadable),
        )

    def _refuse(self, config: CodeConfig) -> None:
        if self.unreadable and config.unreadable_asserts == "refuse":
            msg = (
                f"{len(self.unreadable)} asserts cannot be turned into data, the first: "
                f'{self.unreadable[0]}; unreadable_asserts = "drop" leaves them out'
            )
            raise UnreadableRowError(msg)
        checks = (*self.checks, *self.private)
        if not checks:
            msg = f"no test at all{f' ({self.unreadable[0]})' if self.unreadable else ''}"
            raise UnreadableRowError(msg)
        if len(checks) > MAX_TESTS:
            msg = f"{len(checks)} tests; at most {MAX_TESTS} are read"
            raise UnreadableRowError(msg)
        if config.language != "python" and any(isinstance(check, CallTest) for check in checks):
            msg = f'tests that call a function; language = "{config.language}" reads stdin alone'
            raise UnreadableRowError(msg)
        for check in checks:
            _refuse_unsendable(check)


def _refuse_unsendable(check: Check) -> None:
    """Refuse what cannot go into the sandbox, or could never come out of it."""
    if isinstance(check, OutputTest):
        return
    try:
        known = None if isinstance(check.expected, Reference) else check.expected
        canonical.encode([list(check.arguments), known], max_bytes=MAX_VALUE_BYTES)
    except canonical.EncodeError as error:
        msg = f"a test of {check.function} has a value that cannot be sent: {error}"
        raise UnreadableRowError(msg) from error


def _told_by_columns(row: Row) -> RowFormat:
    has = {name for name, value in row.items() if value is not None}
    if has & {"public_test_cases", "private_test_cases"}:
        return "livecodebench"
    if {"test", "entry_point"} <= has:
        return "humaneval"
    formats: tuple[RowFormat, ...] = ("mbpp", "apps", "tests")
    for kind in formats:
        if _TESTS_COLUMN[kind] in has:
            return kind
    msg = (
        f"no column that holds tests; the columns are {', '.join(row) or 'none'}; set format and "
        "tests_column, or see docs/VERIFIERS.md for the columns of each format"
    )
    raise UnreadableRowError(msg)


def _own(row: Row, column: str) -> _Draft:
    value = _listed(row, column)
    if isinstance(value, dict):
        return _in_and_out(value, column)
    if not isinstance(value, list):
        msg = f"column {column!r} must hold a list of tests"
        raise UnreadableRowError(msg)
    shown: list[Check] = []
    private: list[Check] = []
    unreadable: list[str] = []
    for number, case in enumerate(value, start=1):
        checks = _case(case, f"{column}[{number}]")
        (private if case.get("visible") is False else shown).extend(checks.tests)
        unreadable += [f"{column}[{number}] {line}" for line in checks.unreadable]
    return _Draft(
        checks=shown,
        private=private,
        unreadable=unreadable,
        prelude=_optional_text(row, "prelude"),
        header=_optional_text(row, "header"),
        entry_point=_optional_text(row, "entry_point") or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    tests: tuple[Check, ...]
    unreadable: tuple[str, ...] = ()


def _case(case: Value, where: str) -> _Case:
    match case:
        case {"input": str(stdin), "output": str(stdout)}:
            return _Case(tests=(OutputTest(stdin=stdin, stdout=stdout),))
        case {"function": str(function), "arguments": list(arguments), "returns": expected}:
            return _Case(tests=(_call(function, arguments, expected),))
        case {"assert": str(text)}:
            checks = read_checks(text)
            return _Case(tests=checks.tests, unreadable=checks.unreadable)
        case _:
            msg = (
                f'{where} must be {{"input", "output"}} as text, {{"function", "arguments", '
                '"returns"}, or {"assert": text}'
            )
            raise UnreadableRowError(msg)


def _call(function: str, arguments: Sequence[Value], expected: Value) -> CallTest:
    return CallTest(
        function=function, arguments=tuple(arguments), expected=expected, from_json=True
    )


def _livecodebench(row: Row, column: str) -> _Draft:
    starter = _optional_text(row, "starter_code")
    facts = _listed(row, "metadata") if row.get("metadata") else {}
    function = facts.get("func_name") if isinstance(facts, dict) else None
    public = _listed(row, "public_test_cases") if row.get("public_test_cases") else []
    private = row.get(column) or []
    if isinstance(private, str):
        private = parse_private_tests(private)
    return _Draft(
        checks=_published(public, function, "public_test_cases"),
        private=_published(private, function, column),
        prelude=_CLASS_PRELUDE if "class Solution" in starter else "",
        entry_point=function if isinstance(function, str) else None,
    )


def _published(cases: Value, function: object, where: str) -> tuple[Check, ...]:
    if not isinstance(cases, list):
        msg = f"{where} must hold a list of tests"
        raise UnreadableRowError(msg)
    return tuple(
        _published_case(case, function, f"{where}[{number}]")
        for number, case in enumerate(cases, start=1)
    )


def _published_case(case: Value, function: object, where: str) -> Check:
    match case:
        case {"input": str(given), "output": str(expected), "testtype": "stdin"}:
            return OutputTest(stdin=given, stdout=expected)
        case {"input": str(given), "output": str(expected), "testtype": "functional"}:
            if not isinstance(function, str):
                msg = f"{where} calls a function, and metadata has no func_name"
                raise UnreadableRowError(msg)
            lines = [line for line in given.split("\n") if line.strip()]
            arguments = [parse_json(line, f"{where} input") for line in lines]
            return _call(function, arguments, parse_json(expected, f"{where} output"))
        case _:
            msg = (
                f'{where} must have "input" and "output" as text and "testtype" stdin or functional'
            )
            raise UnreadableRowError(msg)


def _humaneval(row: Row, column: str) -> _Draft:
    entry_point = _text(row, "entry_point")
    checks = read_checks(_text(row, column), entry_point=entry_point)
    header = row.get("prompt")
    is_header = isinstance(header, str) and f"def {entry_point}" in header
    return _Draft(
        checks=[_after(str(header), test) if is_header else test for test in checks.tests],
        unreadable=checks.unreadable,
        header=str(header) if is_header else "",
        entry_point=entry_point,
    )


def _after(header: str, test: CallTest) -> CallTest:
    """Put the beginning of the function, which has imports and helpers, before a reference."""
    if not isinstance(test.expected, Reference):
        return test
    source = f"{header}\n{test.expected.source}"
    return replace(test, expected=replace(test.expected, source=source))


def _mbpp(row: Row, column: str) -> _Draft:
    checks = _asserts(row, column)
    functions = {test.function for test in checks.tests}
    entry_point = next(iter(functions)) if len(functions) == 1 else None
    challenge = _asserts(row, "challenge_test_list", entry_point)
    text = _optional_text(row, "test")
    more = read_checks(text, entry_point=entry_point) if text else Checks(tests=(), unreadable=())
    imports = row.get("test_imports") or []
    lines = [str(line) for line in imports] if isinstance(imports, list) else [str(imports)]
    return _Draft(
        checks=checks.tests,
        private=(*challenge.tests, *more.tests),
        unreadable=(*checks.unreadable, *challenge.unreadable, *more.unreadable),
        prelude="\n".join([*lines, _optional_text(row, "test_setup_code")]).strip(),
        entry_point=entry_point,
    )


def _asserts(row: Row, column: str, entry_point: str | None = None) -> Checks:
    value = _listed(row, column) if row.get(column) else []
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        msg = f"column {column!r} must hold a list of asserts as text"
        raise UnreadableRowError(msg)
    read = [read_checks(line, entry_point=entry_point) for line in value]
    return Checks(
        tests=tuple(test for checks in read for test in checks.tests),
        unreadable=tuple(
            f"{column}[{number}] {line}"
            for number, checks in enumerate(read, start=1)
            for line in checks.unreadable
        ),
    )


def _apps(row: Row, column: str) -> _Draft:
    value = _listed(row, column)
    if not isinstance(value, dict):
        msg = f'column {column!r} must hold {{"inputs": [...], "outputs": [...]}}'
        raise UnreadableRowError(msg)
    draft = _in_and_out(value, column)
    if "class Solution" in _optional_text(row, "starter_code"):
        return _Draft(checks=draft.checks, prelude=_CLASS_PRELUDE, entry_point=draft.entry_point)
    return draft


def _in_and_out(value: Mapping[str, Value], column: str) -> _Draft:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        msg = f"{column} must have as many outputs as inputs, both in lists"
        raise UnreadableRowError(msg)
    function = value.get("fn_name")
    if not function:
        tests = [
            OutputTest(stdin=_joined(given, column), stdout=_joined(expected, column))
            for given, expected in zip(inputs, outputs, strict=True)
        ]
        return _Draft(checks=tests)
    # Some rows wrap every returned value into a list of its own, as they do with the arguments.
    if all(isinstance(expected, list) and len(expected) == 1 for expected in outputs):
        outputs = [expected[0] for expected in outputs]
    if not all(isinstance(given, list) for given in inputs):
        msg = f"{column}: each input of a function must be a list of its arguments"
        raise UnreadableRowError(msg)
    calls = [
        _call(str(function), given, expected)
        for given, expected in zip(inputs, outputs, strict=True)
    ]
    return _Draft(checks=calls, entry_point=str(function))


def _joined(value: Value, column: str) -> str:
    """Return text; lists of lines, as some rows have them, with newlines between."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    msg = f"{column}: an input and an output must be text, or lists of lines"
    raise UnreadableRowError(msg)


def _listed(row: Row, column: str) -> Value:
    """Return what ``column`` holds, read from JSON where it is text."""
    value = _present(row, column)
    return parse_json(value, f"column {column!r}") if isinstance(value, str) else value


def _present(row: Row, column: str) -> Value:
    value = row.get(column)
    if value is None or value == "":
        msg = f"column {column!r} is empty or missing; the columns are {', '.join(row) or 'none'}"
        raise UnreadableRowError(msg)
    return value


def _text(row: Row, column: str) -> str:
    value = _present(row, column)
    if not isinstance(value, str):
        msg = f"column {column!r} must hold text, not {type(value).__name__}"
        raise UnreadableRowError(msg)
    return value


def _optional_text(row: Row, column: str) -> str:
    value = row.get(column)
    return value if isinstance(value, str) else ""
