"""Whether what a program wrote or returned is what was expected.

Owns: types are compared exactly, so a value is never right because it says so itself; what is
compared was decoded from bytes here and has built-in types alone. Integers and floats are both
numbers; ``True`` is none.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from headrace.config import OutputComparison
from headrace.verifiers.code.arithmetic import VIEWS
from headrace.verifiers.code.task import Tolerance, Value, View
from headrace.verifiers.sandbox import canonical

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_CHARS = 64
"""A longer token is compared as text: no float says as much."""
_HASHING = frozenset(("set", "frozenset"))
_MAX_COLLISIONS = 64
"""Different items of one list with equal hashes, when a set is made of it."""
_FAULTS = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When two values are the same."""

    tolerance: Tolerance
    tuple_is_list: bool
    """A tuple counts as the list of its items."""
    nan_is_nan: bool
    """NaN is the same as NaN."""


def same_output(written: bytes, expected: str, how: OutputComparison, tolerance: Tolerance) -> bool:
    """Whether standard output is the expected one.

    ``exact``: every byte. ``lines``: line by line, whatever ends a line, without white space at
    the ends of lines and empty lines at the end. ``tokens``: without any white space. With a
    tolerance, words that are numbers on both sides are compared as such.
    """
    try:
        text = written.decode()
    except UnicodeDecodeError:
        return False
    match how:
        case "exact":
            return text == expected
        case "lines":
            left, right = _lines(text), _lines(expected)
        case "tokens":
            left, right = [" ".join(text.split())], [" ".join(expected.split())]
        case _:
            assert_never(how)
    if left == right:
        return True
    is_exact = tolerance.absolute == tolerance.relative == 0.0
    return not is_exact and _same_words(left, right, tolerance)


def same_value(returned: Value, expected: Value, rule: Rule) -> bool:
    """Whether a returned value is the expected one, by exact type and, of numbers, by tolerance."""
    try:
        return _same(returned, expected, rule)
    except _FAULTS:
        return False


def seen(returned: Value, views: Sequence[View]) -> Value:
    """Return what ``views`` make of ``returned``. Raises ValueError where they cannot be made."""
    for view in views:
        if view.name in _HASHING:
            _refuse_collisions(returned)
        try:
            returned = VIEWS[view.name](returned, *view.arguments)
        except _FAULTS as error:
            msg = f"{view.name}() of what was returned raises {type(error).__name__}"
            raise ValueError(msg) from error
    return returned


def _refuse_collisions(value: Value) -> None:
    """Raise ValueError for items with hashes that were made equal: a set of them takes hours."""
    if not isinstance(value, list | tuple):
        return
    # Bytes have a hash with a secret, so finding the different items is quick whatever they are.
    different = {canonical.encode(item): item for item in value}
    try:
        hashes = Counter(map(hash, different.values()))
    except TypeError:
        # What makes the set says that an item has no hash.
        return
    if max(hashes.values(), default=0) > _MAX_COLLISIONS:
        msg = "too many items with equal hashes"
        raise ValueError(msg)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(left: Sequence[str], right: Sequence[str], tolerance: Tolerance) -> bool:
    if len(left) != len(right):
        return False
    for written, expected in zip(left, right, strict=True):
        words, others = written.split(), expected.split()
        if len(words) != len(others):
            return False
        if not all(map(_same_word, words, others, [tolerance] * len(words))):
            return False
    return True


def _same_word(word: str, expected: str, tolerance: Tolerance) -> bool:
    if word == expected:
        return True
    if not (_is_number(word) and _is_number(expected)):
        return False
    return _close(float(word), float(expected), tolerance)


def _is_number(word: str) -> bool:
    return len(word) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(word) is not None


def _same(returned: Value, expected: Value, rule: Rule) -> bool:
    if rule.tuple_is_list:
        returned = list(returned) if type(returned) is tuple else returned
        expected = list(expected) if type(expected) is tuple else expected
    if _is_real(returned) and _is_real(expected):
        return _same_number(returned, expected, rule)
    if type(returned) is not type(expected):
        return False
    if isinstance(expected, list | tuple):
        return len(returned) == len(expected) and all(
            _same(one, other, rule) for one, other in zip(returned, expected, strict=True)
        )
    if isinstance(expected, dict):
        return _same_dict(returned, expected, rule)
    if isinstance(expected, set | frozenset):
        return {_typed(item) for item in returned} == {_typed(item) for item in expected}
    return bool(returned == expected)


def _same_dict(returned: dict[Value, Value], expected: dict[Value, Value], rule: Rule) -> bool:
    values = {_typed(key): value for key, value in returned.items()}
    wanted = {_typed(key): value for key, value in expected.items()}
    return values.keys() == wanted.keys() and all(
        _same(values[key], wanted[key], rule) for key in wanted
    )


def _typed(value: Value) -> object:
    """Return what is equal for values of the same type alone: for Python True is 1."""
    if isinstance(value, tuple):
        return ("tuple", *map(_typed, value))
    if isinstance(value, frozenset):
        return ("frozenset", frozenset(map(_typed, value)))
    return ("number" if _is_real(value) else type(value).__name__, value)


def _is_real(value: Value) -> bool:
    return type(value) in {int, float}


def _same_number(returned: float, expected: float, rule: Rule) -> bool:
    if returned == expected:
        return True
    if math.isnan(returned) or math.isnan(expected):
        return rule.nan_is_nan and math.isnan(returned) and math.isnan(expected)
    return _close(returned, expected, rule.tolerance)


def _close(number: float, expected: float, tolerance: Tolerance) -> bool:
    """Whether two numbers differ by no more than allowed; an infinity is close to nothing."""
    allowed = max(tolerance.absolute, tolerance.relative * abs(expected))
    difference = abs(number - expected)
    return bool(difference <= allowed) and not math.isinf(difference)
