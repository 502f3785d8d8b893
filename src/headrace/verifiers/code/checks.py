"""Asserts of a data set turned into data, without running any of them.

A small reader of Python: it follows assignments of literals and loops over them, and stands a
placeholder (`Subject`) where the function under test is called. What it cannot follow it refuses;
nothing is guessed. The text is the data set's, never the policy's.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.verifiers.code.arithmetic import (
    FUNCTIONS,
    AbsoluteDifference,
    Approximate,
    Defined,
    Difference,
    Referred,
    Scope,
    Subject,
    UnreadableError,
    evaluate,
)
from headrace.verifiers.code.task import CallTest, Reference, Tolerance, Value

MAX_STEPS = 200_000
"""Statements followed in one row: its loops end."""

_EVALPLUS_RELATIVE = 1e-7
_EVALPLUS_ABSOLUTE = 1e-6
"""What EvalPlus' own assertion allows floats, where the row names no tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What became of a text of asserts."""

    tests: tuple[CallTest, ...]
    unreadable: tuple[str, ...]
    """One line for each statement that could not be turned into data, with its line number."""


def read_checks(source: str, *, entry_point: str | None = None) -> Checks:
    """Return the tests in ``source``: plain asserts, or a function ``check(candidate)``.

    Without ``entry_point`` the one function that the asserts call and nobody defines is under test.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Checks(tests=(), unreadable=(f"no Python: {error}",))
    reader = _Reader(
        _names_under_test(tree, entry_point), _float_assertions(tree), _definitions(tree)
    )
    reader.follow(tree.body, {})
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name == "check":
            reader.follow(function.body, dict(reader.scope))
    return Checks(tests=tuple(reader.tests), unreadable=tuple(dict.fromkeys(reader.unreadable)))


def _names_under_test(tree: ast.Module, entry_point: str | None) -> Mapping[str, str]:
    """Return the names that stand for the function under test, each with its real one."""
    if entry_point is not None:
        return {"candidate": entry_point, entry_point: entry_point}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    unknown = called - defined - FUNCTIONS.keys() - {"print"}
    return {name: name for name in unknown} if len(unknown) == 1 else {}


def _float_assertions(tree: ast.Module) -> frozenset[str]:
    """Return the names of EvalPlus' ``assertion(out, exp, atol)``, where the row defines it."""
    wanted = ["out", "exp", "atol"]
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and [arg.arg for arg in node.args.args] == wanted
    )


def _definitions(tree: ast.Module) -> str:
    """Return the text of what a reference solution may need: imports and functions."""
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, kinds))


class _Reader:
    """Follows statements; gathers tests and what it could not read."""

    def __init__(
        self, under_test: Mapping[str, str], assertions: frozenset[str], definitions: str
    ) -> None:
        self.tests: list[CallTest] = []
        self.unreadable: list[str] = []
        self.scope: Scope = {}
        self._under_test = under_test
        self._assertions = assertions
        self._definitions = definitions
        self._steps = 0
        self._lost = False

    def follow(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Read the statements of ``body``; an assert that cannot be read is noted and passed over.

        Any other statement that cannot be read may have changed something: nothing after it is.
        """
        self.scope = scope
        for statement in body:
            if self._lost:
                return
            self._steps += 1
            if self._steps > MAX_STEPS:
                self._lost = True
                self.unreadable.append(f"line {statement.lineno}: more than {MAX_STEPS} steps")
                return
            try:
                self._statement(statement, scope)
            except UnreadableError as error:
                self.unreadable.append(f"line {statement.lineno}: {error}")
                # What a failed assignment names has no value then, so its users fail as well.
                if not isinstance(statement, ast.Assert | ast.Assign):
                    self._lost = True

    def _statement(self, statement: ast.stmt, scope: Scope) -> None:  # noqa: C901 - one branch each
        match statement:
            case ast.Assert(test=test):
                self._assert(test, scope)
            case ast.Assign(targets=[target], value=value):
                _forget(target, scope)
                _bind(target, self._value(value, scope), scope)
            case ast.For(target=target, iter=iterable, body=body, orelse=[]):
                for item in _items(self._value(iterable, scope)):
                    _bind(target, item, scope)
                    self.follow(body, scope)
            case ast.If(test=test, body=body, orelse=orelse):
                self.follow(body if self._plain(test, scope) else orelse, scope)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[out, exp, atol])) if (
                name in self._assertions
            ):
                self._evalplus(out, exp, atol, scope)
            case ast.Expr(value=ast.Constant() | ast.Name()) | ast.Pass():
                pass
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"))):
                # It changes nothing that an assert could see.
                pass
            case ast.FunctionDef(name=name):
                scope[name] = Defined(name=name)
            case ast.Import() | ast.ImportFrom():
                # What they bring is in the table of `arithmetic`, or refused where it is used.
                pass
            case _:
                msg = f"a statement that is not followed: {_shown(statement)}"
                raise UnreadableError(msg)

    def _assert(self, test: ast.expr, scope: Scope) -> None:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for part in test.values:
                self._assert(part, scope)
            return
        found = self._expectation(test, scope)
        if isinstance(found, CallTest):
            self._add(found)
        elif found is not True:
            msg = f"an assert that fails or does not call the function: {_shown(test)}"
            raise UnreadableError(msg)

    def _expectation(self, test: ast.expr, scope: Scope) -> CallTest | bool:
        """Return the test that ``test`` makes, or its truth where it calls nothing."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._value(operand, scope)
                return _equals(value, expected=False) if isinstance(value, Subject) else not value
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                found = _compared(operator, self._value(left, scope), self._value(right, scope))
                return bool(self._value(test, scope)) if found is None else found
            case _:
                value = self._value(test, scope)
                if isinstance(value, Subject):
                    return _equals(value, expected=True)
                return value if isinstance(value, CallTest) else bool(value)

    def _add(self, test: CallTest) -> None:
        if isinstance(test.expected, Referred):
            reference = Reference(
                source=self._definitions,
                function=test.expected.function,
                arguments=test.expected.arguments,
            )
            test = replace(test, expected=reference)
        self.tests.append(test)

    def _evalplus(self, out: ast.expr, exp: ast.expr, atol: ast.expr, scope: Scope) -> None:
        subject = self._value(out, scope)
        expected, absolute = self._value(exp, scope), self._plain(atol, scope)
        if not isinstance(subject, Subject):
            msg = "an assertion that does not call the function"
            raise UnreadableError(msg)
        relative = _EVALPLUS_RELATIVE
        if isinstance(expected, Referred):
            # It may turn out a whole number, and a share of a large one is more than 1.
            relative = 0.0
        if absolute == 0 and (_is_floats(expected) or isinstance(expected, Referred)):
            absolute = _EVALPLUS_ABSOLUTE
        tolerance = Tolerance(absolute=float(absolute), relative=relative) if absolute else None
        self._add(replace(_equals(subject, expected=expected), tolerance=tolerance))

    def _value(self, node: ast.expr, scope: Scope) -> Value:
        return evaluate(node, scope, self._under_test)

    def _plain(self, node: ast.expr, scope: Scope) -> Value:
        value = self._value(node, scope)
        if isinstance(value, Subject | Referred | Difference | AbsoluteDifference | CallTest):
            msg = f"what the function returns is needed to know {_shown(node)}"
            raise UnreadableError(msg)
        return value


def _compared(operator: ast.cmpop, left: Value, right: Value) -> CallTest | None:
    """Return the test that a comparison makes; None where it does not call the function."""
    match operator:
        case ast.Eq() | ast.Is():
            if isinstance(right, Subject):
                left, right = right, left
            if isinstance(left, Subject) and not isinstance(right, Subject):
                return _equals(left, expected=right)
        case ast.Lt() | ast.LtE() if isinstance(left, AbsoluteDifference):
            return _close(left.difference, right)
        case ast.Gt() | ast.GtE() if isinstance(right, AbsoluteDifference):
            return _close(right.difference, left)
        case _:
            pass
    unsettled = Subject | Difference | AbsoluteDifference
    if any(isinstance(side, unsettled) for side in (left, right)):
        msg = "a comparison that fixes no expected value"
        raise UnreadableError(msg)
    return None


def _equals(subject: Subject, *, expected: Value) -> CallTest:
    tolerance = None
    if isinstance(expected, Approximate):
        tolerance, expected = expected.tolerance, expected.value
    return CallTest(
        function=subject.function,
        arguments=subject.arguments,
        expected=expected,
        views=subject.views,
        tolerance=tolerance,
    )


def _close(difference: Difference, allowed: Value) -> CallTest:
    if type(allowed) not in {int, float}:
        msg = "a difference that is compared with no number"
        raise UnreadableError(msg)
    test = _equals(difference.subject, expected=difference.value)
    return replace(test, tolerance=Tolerance(absolute=float(allowed)))


def _items(value: Value) -> Iterator[Value]:
    if not isinstance(value, list | tuple | str | dict | set | frozenset | range):
        msg = "a loop over what is no literal"
        raise UnreadableError(msg)
    yield from value


def _bind(target: ast.expr, value: Value, scope: Scope) -> None:
    match target:
        case ast.Name(id=name):
            scope[name] = value
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            values = list(_items(value))
            if len(values) != len(parts):
                msg = "an assignment of another number of values"
                raise UnreadableError(msg)
            for part, item in zip(parts, values, strict=True):
                _bind(part, item, scope)
        case _:
            msg = f"an assignment to {_shown(target)}"
            raise UnreadableError(msg)


def _forget(target: ast.expr, scope: Scope) -> None:
    """Take out what ``target`` names: an assignment that cannot be read leaves no old value."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            scope.pop(node.id, None)


def _is_floats(value: Value) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _shown(node: ast.AST) -> str:
    text = ""
    with contextlib.suppress(RecursionError, ValueError):
        text = ast.unparse(node)
    return repr(text if len(text) <= 80 else text[:80] + "...")  # noqa: PLR2004 - characters of a line
