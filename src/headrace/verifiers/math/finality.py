r"""Whether an answer leaves work to its reader that the expected one has done.

``12 \cdot 34`` equals 408, and ``2x = 10`` holds for the same x as ``x = 5``: where the form
counts, a policy is not paid for saying the task again. Radicals, powers of letters and functions
that have no rational value are a form of their own and may stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from headrace.verifiers.math.exact import value_of
from headrace.verifiers.math.kinds import bare
from headrace.verifiers.math.reading import Reading, as_text, trees
from headrace.verifiers.math.tree import (
    Number,
    Operation,
    Relation,
    Tree,
    is_label,
    symbols,
)

_TEN = 10
_IN_TASK = re.compile(r"\d[\d,]*(?:\.\d+)?")
_NEUTRAL = frozenset((Fraction(0), Fraction(1)))
"""What anything can be written with once more."""
_MAX_DIGITS = 40
"""Of a number of a task that is looked for in an answer."""


def left_to_do(reading: Reading) -> str | None:
    """Return what is left to do in an answer, or None where nothing is."""
    for item in reading.items:
        if isinstance(item.value, Relation) and _is_unsolved(item.value):
            return "a relation that is not solved"
        for tree in trees(bare(item.value)):
            unfinished = _unfinished(tree)
            if unfinished is not None:
                return f"{as_text(unfinished)} is not worked out"
    return None


def says_the_task(task: str, reading: Reading) -> bool:
    r"""Whether an answer that is left to work out holds no number but those of the task.

    ``34 \cdot 12`` for what asks for ``12 \cdot 34``; the ``2^{10}`` of a set of ten is worked out.
    """
    if left_to_do(reading) is None:
        return False
    written = (found[0].replace(",", "") for found in _IN_TASK.finditer(task))
    given = {Fraction(digits) for digits in written if len(digits) <= _MAX_DIGITS}
    numbers = {
        number for item in reading.items for tree in trees(item.value) for number in _numbers(tree)
    }
    return numbers <= given | _NEUTRAL


def _numbers(tree: Tree) -> Iterator[Fraction]:
    """Yield the numbers that are written in an expression."""
    match tree:
        case Number(value):
            yield value
        case Operation("root", (radicand, _)):
            # The degree of a square root is not written.
            yield from _numbers(radicand)
        case Operation(_, operands):
            for operand in operands:
                yield from _numbers(operand)


def _is_unsolved(relation: Relation) -> bool:
    has_variables = any(symbols(tree) for tree in trees(relation))
    return has_variables and not any(map(is_label, relation.sides))


def _unfinished(tree: Tree) -> Tree | None:
    """Return some part of an expression that is a rational number and not written as one."""
    if not isinstance(tree, Operation):
        return None
    if value_of(tree) is not None:
        return None if _is_literal(tree) else tree
    known = [operand for operand in tree.operands if value_of(operand) is not None]
    if tree.name in {"add", "mul"} and len(known) > 1:
        return Operation(tree.name, tuple(known))
    for operand in tree.operands:
        unfinished = _unfinished(operand)
        if unfinished is not None:
            return unfinished
    return None


def _is_literal(tree: Tree) -> bool:
    """Whether digits spell a number: a fraction, a mixed number, a power of ten, with its sign."""
    match tree:
        case Number():
            return True
        case Operation("neg", (number,)):
            return _is_literal(number)
        case Operation("div", (top, Number())):
            return isinstance(top, Number) or (isinstance(top, Operation) and _is_negative(top))
        case Operation("add", (Number(), Operation("div", (Number(), Number())))):
            return True
        case Operation("mul", (Number(), Operation("pow", (Number(base), power)))) | Operation(
            "pow", (Number(base), power)
        ):
            return base == _TEN and _is_literal(power)
        case _:
            return False


def _is_negative(tree: Operation) -> bool:
    return tree.name == "neg" and isinstance(tree.operands[0], Number)
