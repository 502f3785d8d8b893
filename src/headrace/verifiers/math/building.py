"""Putting expressions together as the parser reads them.

Owns: an operation has expressions for operands, and only a matrix is multiplied by a number entry
by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from headrace.verifiers.math import symbols
from headrace.verifiers.math.tree import (
    Constant,
    Matrix,
    NamedSet,
    Number,
    Operation,
    Tree,
    Unreadable,
    Value,
    tree_of,
    trees_of,
    unreadable,
)

_TEN = Number(Fraction(10))


def each(value: Value, change: Callable[[Tree], Tree]) -> Value:
    """Return ``value``, or a matrix of it, with an operation on each entry."""
    if isinstance(value, Matrix):
        return Matrix(tuple(tuple(change(tree_of(entry)) for entry in row) for row in value.rows))
    return change(tree_of(value))


def sum_of(terms: Sequence[Value]) -> Tree:
    """Return the sum of expressions."""
    return Operation("add", trees_of(terms))


def times(left: Value, right: Value) -> Value:
    """Return a product; of a matrix and a number it is the matrix of products."""
    if isinstance(right, Matrix):
        return each(right, lambda entry: _product(tree_of(left), entry))
    return each(left, lambda entry: _product(entry, tree_of(right)))


def _product(left: Tree, right: Tree) -> Tree:
    """Return a product without products on its left, so that a long one is not deep."""
    before = left.operands if isinstance(left, Operation) and left.name == "mul" else (left,)
    return Operation("mul", (*before, right))


def divided(top: Value, low: Value) -> Value:
    """Return a quotient; of a matrix it is the matrix of quotients."""
    return each(top, lambda entry: Operation("div", (entry, tree_of(low))))


def in_degrees(tree: Tree) -> Tree:
    """Return an angle in radians."""
    half_turn = Number(Fraction(180))
    return Operation("mul", (tree, Operation("div", (Constant("pi"), half_turn))))


def is_plain_fraction(value: Value) -> bool:
    """Whether a value is one whole number over another."""
    if not (isinstance(value, Operation) and value.name == "div"):
        return False
    return all(isinstance(part, Number) and part.value.denominator == 1 for part in value.operands)


def mixed(whole: Number, fraction: Value) -> Tree:
    """Return a mixed number. Raises Unreadable where it would be no proper one."""
    assert isinstance(fraction, Operation)
    top, low = fraction.operands
    parts = (whole, top, low)
    if not all(isinstance(part, Number) and _is_whole(part) for part in parts):
        unreadable("a mixed number whose parts are not whole")
    assert isinstance(top, Number)
    assert isinstance(low, Number)
    if not 0 < top.value < low.value:
        unreadable("a number before a fraction that is not proper")
    return Operation("add", (whole, fraction))


def _is_whole(number: Number) -> bool:
    return number.value.denominator == 1 and not number.is_decimal


def named_set(name: str) -> NamedSet:
    """Return the set of a letter on the blackboard. Raises Unreadable for others."""
    letter = name.removeprefix("mathbb ")
    if letter not in symbols.NAMED_SETS:
        unreadable(f"a set called {letter}")
    return NamedSet(letter)


def applied(name: str, base: Tree | None, arguments: tuple[Tree, ...]) -> Tree:
    """Return a function of its arguments, by the operation that it is."""
    several = {"gcd", "lcm", "max", "min"}
    if name not in several and len(arguments) != 1:
        unreadable(f"{name} of {len(arguments)} arguments")
    match name:
        case "log" | "ln" | "lg":
            logarithm_base = _TEN if name == "lg" else base or Constant("e")
            return Operation("log", (logarithm_base, arguments[0]))
        case "exp":
            return Operation("pow", (Constant("e"), arguments[0]))
        case "det":
            msg = "a determinant"
            raise Unreadable(msg)
        case _:
            return Operation(name, arguments)
