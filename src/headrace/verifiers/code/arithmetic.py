"""What an expression of a data set's assert is worth, computed by this reader and by nothing else.

Owns: the names it knows are the table below, so nothing is imported, opened or called that is not
in it, and no value grows beyond `MAX_ITEMS`. The function under test is never called; a `Subject`
stands for what it would return.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from headrace.verifiers.code.task import CallTest, Tolerance, Value, View

MAX_ITEMS = 2_000_000
"""Of one value that is made by multiplying or counting."""
MAX_BITS = 100_000
"""Of a power or a shift."""

Scope: TypeAlias = dict[str, Value]


class UnreadableError(Exception):
    """An expression or statement that this reader does not follow; the text says what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the function under test would return for these arguments, as the views show it."""

    function: str
    arguments: tuple[Value, ...]
    views: tuple[View, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Defined:
    """A function that the text itself defines: never followed."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Referred:
    """What such a function would return for these arguments."""

    function: str
    arguments: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What it returns, less ``value``; or the other way round."""

    subject: Subject
    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsoluteDifference:
    """The same without its sign."""

    difference: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximate:
    """``pytest.approx(value)``."""

    value: Value
    tolerance: Tolerance


def _bounded_range(*arguments: int) -> list[int]:
    found = range(*arguments)
    if len(found) > MAX_ITEMS:
        msg = f"a range of more than {MAX_ITEMS}"
        raise UnreadableError(msg)
    return list(found)


def _itself(value: Value) -> Value:
    return value


FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "abs": abs, "bool": bool, "dict": dict, "float": float, "frozenset": frozenset, "int": int,
    "len": len, "list": list, "max": max, "min": min, "range": _bounded_range, "round": round,
    "set": set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple,
    "enumerate": lambda *a: list(enumerate(*a)), "reversed": lambda v: list(reversed(v)),
    "zip": lambda *a: list(zip(*a, strict=False)), "bytes": bytes, "chr": chr, "ord": ord,
    "deepcopy": _itself, "copy.deepcopy": _itself, "math.fabs": math.fabs, "fabs": math.fabs,
    "math.sqrt": math.sqrt,
}  # fmt: skip
"""What an assert may call on data."""

VIEWS: Mapping[str, Callable[..., Value]] = {
    name: FUNCTIONS[name]
    for name in (
        "abs", "bool", "float", "frozenset", "int", "len", "list", "max", "min", "round",
        "set", "sorted", "str", "sum", "tuple",
    )
}  # fmt: skip
"""What an assert may do with what the function returned; done here, on decoded data."""

_CONSTANTS: Mapping[str, Value] = {
    "math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.nan": math.nan,
    "np.inf": math.inf, "np.nan": math.nan, "inf": math.inf, "nan": math.nan,
}  # fmt: skip
_CLOSE = frozenset(("math.isclose", "isclose", "np.isclose", "np.allclose"))
_APPROX = frozenset(("approx", "pytest.approx"))
_METHODS = frozenset(("join", "split", "upper", "lower", "strip", "replace", "items", "keys",
                      "values", "copy", "encode"))  # fmt: skip
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other, ast.NotIn: lambda one, other: one not in other,
}  # fmt: skip
_FAULTS = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)


def evaluate(node: ast.expr, scope: Scope, under_test: Mapping[str, str]) -> Value:
    """Return the value of ``node``. Raises UnreadableError for what is not followed.

    ``under_test``: the names that stand for the function under test, each with its real one.
    """
    try:
        return _Evaluation(scope, under_test).value(node)
    except _FAULTS as error:
        msg = f"an expression that raises {type(error).__name__}: {error}"
        raise UnreadableError(msg) from error
    except (RecursionError, MemoryError) as error:
        msg = "an expression that is nested too deeply"
        raise UnreadableError(msg) from error


class _Evaluation:
    def __init__(self, scope: Scope, under_test: Mapping[str, str]) -> None:
        self._scope = scope
        self._under_test = under_test

    def value(self, node: ast.expr) -> Value:  # noqa: C901, PLR0911, PLR0912 - one branch for each kind of node
        match node:
            case ast.Constant(value=value) if value is not ...:
                return value
            case ast.List(elts=parts):
                return self._parts(parts)
            case ast.Tuple(elts=parts):
                return tuple(self._parts(parts))
            case ast.Set(elts=parts):
                return set(self._parts(parts))
            case ast.Dict(keys=keys, values=values) if None not in keys:
                names = [self._plain(key) for key in keys if key is not None]
                return dict(zip(names, self._parts(values), strict=True))
            case ast.Name() | ast.Attribute():
                return self._name(node)
            case ast.UnaryOp():
                return self._unary(node)
            case ast.BinOp(left=left, op=op, right=right):
                return _binary(op, self.value(left), self.value(right))
            case ast.Call():
                return self._call(node)
            case ast.Subscript(value=value, slice=key):
                return self._plain(value)[self._index(key)]
            case (
                ast.ListComp(elt=element, generators=generators)
                | ast.GeneratorExp(elt=element, generators=generators)
            ):
                return self._comprehension(element, generators)
            case ast.Compare() | ast.BoolOp() | ast.IfExp():
                return self._decided(node)
            case ast.SetComp(elt=element, generators=generators):
                return set(self._comprehension(element, generators))
            case _:
                msg = f"an expression that is not followed: {type(node).__name__}"
                raise UnreadableError(msg)

    def _decided(self, node: ast.Compare | ast.BoolOp | ast.IfExp) -> Value:
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self._plain(test) else orelse)
            case ast.BoolOp(op=op, values=values):
                found = self._plain(values[0])
                for value in values[1:]:
                    if bool(found) is isinstance(op, ast.Or):
                        break
                    found = self._plain(value)
                return found
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self._plain(part) for part in (left, *others)]
                pairs = zip(ops, values, values[1:], strict=False)
                return all(_COMPARISONS[type(op)](one, other) for op, one, other in pairs)

    def _plain(self, node: ast.expr) -> Value:
        return _data(self.value(node))

    def _parts(self, nodes: Sequence[ast.expr]) -> list[Value]:
        found: list[Value] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found.extend(self._plain(node.value))
            else:
                found.append(self._plain(node))
        return found

    def _name(self, node: ast.Name | ast.Attribute) -> Value:
        name = _dotted(node)
        if name in self._scope:
            return self._scope[name]
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        msg = f"a name whose value is not known: {name}"
        raise UnreadableError(msg)

    def _index(self, node: ast.expr) -> Value:
        if not isinstance(node, ast.Slice):
            return self._plain(node)
        ends = (node.lower, node.upper, node.step)
        return slice(*(None if end is None else self._plain(end) for end in ends))

    def _unary(self, node: ast.UnaryOp) -> Value:
        value = self._plain(node.operand)
        match node.op:
            case ast.USub():
                return -value
            case ast.UAdd():
                return +value
            case ast.Not():
                return not value
            case _:
                return ~value

    def _call(self, node: ast.Call) -> Value:
        name = _dotted(node.func)
        if name in self._scope:
            return self._referred(self._scope[name], node)
        if name in self._under_test:
            return self._subject(self._under_test[name], node)
        if name in _CLOSE or name in _APPROX:
            return self._tolerant(name, node)
        if isinstance(node.func, ast.Attribute) and name not in FUNCTIONS:
            return self._method(node.func, node)
        if name not in FUNCTIONS:
            msg = f"a call of {name or 'what is no name'}, which is not known"
            raise UnreadableError(msg)
        arguments = [self.value(argument) for argument in node.args]
        if arguments and isinstance(arguments[0], Subject | Difference):
            return _seen(name, arguments[0], arguments[1:], node)
        keywords = {part.arg: self._plain(part.value) for part in node.keywords if part.arg}
        return FUNCTIONS[name](*map(_data, arguments), **keywords)

    def _subject(self, function: str, node: ast.Call) -> Subject:
        if node.keywords:
            msg = f"a call of {function} with keyword arguments"
            raise UnreadableError(msg)
        return Subject(function=function, arguments=tuple(self._parts(node.args)))

    def _referred(self, function: Value, node: ast.Call) -> Referred:
        if not isinstance(function, Defined) or node.keywords:
            msg = "a call of what is no function of the text's, or with keyword arguments"
            raise UnreadableError(msg)
        return Referred(function=function.name, arguments=tuple(self._parts(node.args)))

    def _tolerant(self, name: str, node: ast.Call) -> Value:
        options = {part.arg: self._plain(part.value) for part in node.keywords}
        values = [self.value(argument) for argument in node.args]
        if name in _APPROX:
            relative, absolute = options.get("rel", 1e-6), options.get("abs", 1e-12)
            tolerance = Tolerance(absolute=float(absolute), relative=float(relative))
            return Approximate(value=_data(values[0]), tolerance=tolerance)
        by_numpy = name.startswith("np.")
        keys, defaults = (("rtol", "atol"), (1e-5, 1e-8)) if by_numpy else (
            ("rel_tol", "abs_tol"), (1e-9, 0.0))  # fmt: skip
        given = dict(zip(keys, values[2:], strict=False)) | options
        left, right = values[:2]
        subject, expected = (left, right) if isinstance(left, Subject) else (right, left)
        if not isinstance(subject, Subject):
            msg = f"{name} of what the function does not return"
            raise UnreadableError(msg)
        relative, absolute = (float(given.get(k, d)) for k, d in zip(keys, defaults, strict=True))
        return CallTest(
            function=subject.function,
            arguments=subject.arguments,
            expected=_data(expected),
            views=subject.views,
            tolerance=Tolerance(absolute=absolute, relative=relative),
        )

    def _method(self, function: ast.Attribute, node: ast.Call) -> Value:
        owner = self._plain(function.value)
        if function.attr not in _METHODS or not isinstance(owner, str | dict | list | set):
            msg = f"a call of .{function.attr}, which is not known"
            raise UnreadableError(msg)
        found = getattr(owner, function.attr)(*self._parts(node.args))
        return list(found) if function.attr in {"items", "keys", "values"} else found

    def _comprehension(
        self, element: ast.expr, generators: Sequence[ast.comprehension]
    ) -> list[Value]:
        if len(generators) != 1 or generators[0].is_async:
            msg = "a comprehension with more than one loop"
            raise UnreadableError(msg)
        loop = generators[0]
        found: list[Value] = []
        for item in self._plain(loop.iter):
            inner = _Evaluation({**self._scope, **_unpacked(loop.target, item)}, self._under_test)
            if all(inner.value(condition) for condition in loop.ifs):
                found.append(_data(inner.value(element)))
        return found


def _unpacked(target: ast.expr, item: Value) -> Scope:
    match target:
        case ast.Name(id=name):
            return {name: item}
        case ast.Tuple(elts=parts) if len(parts) == len(item):
            pairs = [_unpacked(part, value) for part, value in zip(parts, item, strict=True)]
            return {name: value for pair in pairs for name, value in pair.items()}
        case _:
            msg = "a loop variable that is not followed"
            raise UnreadableError(msg)


def _binary(op: ast.operator, left: Value, right: Value) -> Value:
    if isinstance(op, ast.Sub):
        if isinstance(left, Subject) and not isinstance(right, Subject):
            return Difference(subject=left, value=_data(right))
        if isinstance(right, Subject) and not isinstance(left, Subject):
            return Difference(subject=right, value=_data(left))
    left, right = _data(left), _data(right)
    match op:
        case ast.Mult():
            return _product(left, right)
        case ast.Pow():
            return _power(left, right)
        case ast.LShift():
            return _product(left, _power(2, right))
        case _ if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](left, right)
        case _:
            msg = f"an operator that is not followed: {type(op).__name__}"
            raise UnreadableError(msg)


def _product(left: Value, right: Value) -> Value:
    for items, times in ((left, right), (right, left)):
        sized = isinstance(items, str | bytes | list | tuple)
        if sized and isinstance(times, int) and len(items) * times > MAX_ITEMS:
            msg = f"a value of more than {MAX_ITEMS} items"
            raise UnreadableError(msg)
    return left * right


def _power(base: Value, exponent: Value) -> Value:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and base.bit_length() * max(exponent, 0) > MAX_BITS:
        msg = f"a power of more than {MAX_BITS} bits"
        raise UnreadableError(msg)
    return base**exponent


def _seen(name: str, subject: Subject | Difference, rest: Sequence[Value], node: ast.Call) -> Value:
    """Return what ``name`` shows of what the function returns."""
    if isinstance(subject, Difference):
        if name in {"abs", "math.fabs", "fabs"} and not rest:
            return AbsoluteDifference(difference=subject)
        msg = f"{name} of a difference"
        raise UnreadableError(msg)
    if name in {"deepcopy", "copy.deepcopy"}:
        return subject
    name = "abs" if name in {"math.fabs", "fabs"} else name
    if name not in VIEWS or node.keywords:
        msg = f"{name} of what the function returns"
        raise UnreadableError(msg)
    view = View(name=name, arguments=tuple(map(_data, rest)))
    return replace(subject, views=(*subject.views, view))


_NO_DATA = (
    Subject, Defined, Referred, Difference, AbsoluteDifference, Approximate, CallTest
)  # fmt: skip


def _data(value: Value) -> Value:
    """Return ``value`` where it is data. Raises UnreadableError for what the function returns."""
    if isinstance(value, _NO_DATA):
        msg = "what a function returns, where data is needed"
        raise UnreadableError(msg)
    return value


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c``; the empty text where ``node`` is no name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            above = _dotted(value)
            return f"{above}.{name}" if above else ""
        case _:
            return ""
