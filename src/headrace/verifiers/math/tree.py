"""What an answer says, as data: expressions and the shapes that hold them.

Built by `parser` and `reading`; nothing in here computes. Two trees that are equal are spelt alike
but for spacing, brackets and markup; trees that differ may still mean the same (`compare`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NoReturn, TypeAlias, TypeGuard


class Unreadable(Exception):
    """A text that says nothing this grader can read; the message says why."""


class Refused(Unreadable):
    """A text over a cap: too large to look at."""


def unreadable(reason: str) -> NoReturn:
    """Raise Unreadable."""
    raise Unreadable(reason)


@dataclass(frozen=True, slots=True)
class Number:
    """A number in digits."""

    value: Fraction
    is_decimal: bool = field(default=False, compare=False)
    """Written with a point: ``0.5`` is one half, and no fraction."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable: a letter with its subscript, primes and accents; case counts."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """``pi``, ``e``, ``i`` or ``infinity``."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A named operation on expressions.

    ``add`` and ``mul`` of two or more; ``neg``, ``plus_minus`` and ``minus_plus`` of one; ``div``,
    ``pow``, ``root`` (radicand, degree), ``log`` (base, argument), ``binomial``, ``mod`` of two;
    ``call`` (name, arguments) of a function that nobody defined; else a function by its name.
    """

    name: str
    operands: tuple[Tree, ...]


Tree: TypeAlias = Number | Symbol | Constant | Operation

INFINITY = Constant("infinity")
TWO = Number(Fraction(2))


@dataclass(frozen=True, slots=True)
class Bracketed:
    """``(1, 2]``, ``(1, 2, 3)``: an interval, a point or a vector, as the brackets and type say."""

    left: str
    """``(``, ``[`` or ``<``."""
    items: tuple[Value, ...]
    right: str
    """``)``, ``]`` or ``>``."""


@dataclass(frozen=True, slots=True)
class Braces:
    """A set by its elements; none is the empty set."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class NamedSet:
    """One of the sets that have a letter: N, Z, Q, R, C."""

    name: str


@dataclass(frozen=True, slots=True)
class SetOperation:
    """``union``, ``intersection`` or ``difference`` of two sets."""

    name: str
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """``1 < x <= 2``: one more side than signs. Signs: ``= approx != < <= > >= in equiv``."""

    sides: tuple[Value, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Text that is no mathematics, folded; or the capital letter of a choice."""

    text: str
    is_choice: bool = False


Value: TypeAlias = Tree | Bracketed | Braces | NamedSet | SetOperation | Matrix | Relation | Words

EMPTY_SET = Braces(())


def is_tree(value: Value) -> TypeGuard[Tree]:
    """Whether ``value`` is an expression, and not a shape of several."""
    return isinstance(value, Number | Symbol | Constant | Operation)


def tree_of(value: Value) -> Tree:
    """Return an expression. Raises Unreadable for a set, a point or a relation inside of one."""
    if not is_tree(value):
        msg = f"a {type(value).__name__.lower()} inside an expression"
        raise Unreadable(msg)
    return value


def trees_of(values: Iterable[Value]) -> tuple[Tree, ...]:
    """Return expressions. Raises Unreadable where one of them is none."""
    return tuple(map(tree_of, values))


def infinite_sign(tree: Value) -> int:
    """Return 1 or -1 for an infinity with its sign, else 0."""
    if tree == INFINITY:
        return 1
    if isinstance(tree, Operation) and tree.name == "neg" and tree.operands[0] == INFINITY:
        return -1
    return 0


def symbols(tree: Tree) -> frozenset[str]:
    """Return the names of the variables in an expression."""
    match tree:
        case Symbol(name):
            return frozenset((name,))
        case Operation(_, operands):
            return frozenset().union(*map(symbols, operands))
        case _:
            return frozenset()


def has_constant(tree: Tree, name: str) -> bool:
    """Whether a constant of that name stands in an expression."""
    match tree:
        case Constant(found):
            return found == name
        case Operation(_, operands):
            return any(has_constant(operand, name) for operand in operands)
        case _:
            return False


def both_signs(tree: Tree) -> tuple[Tree, ...]:
    """Return the two expressions that one with plus-or-minus stands for; itself without one."""
    upper, lower = _with_sign(tree, upper=True), _with_sign(tree, upper=False)
    return (tree,) if upper == tree else (upper, lower)


def _with_sign(tree: Tree, *, upper: bool) -> Tree:
    if not isinstance(tree, Operation):
        return tree
    operands = tuple(_with_sign(operand, upper=upper) for operand in tree.operands)
    if tree.name in {"plus_minus", "minus_plus"}:
        stays_plus = (tree.name == "plus_minus") == upper
        return operands[0] if stays_plus else Operation("neg", operands)
    return Operation(tree.name, operands)


def is_label(value: Value) -> bool:
    """Whether a left side is but a name: ``x``, ``f(x)``, ``P(n)``, ``(x, y)``."""
    match value:
        case Symbol():
            return True
        case Operation("call", operands):
            return all(isinstance(operand, Symbol) for operand in operands)
        case Operation("mul"):
            return is_name_of_several(value)
        case Bracketed(_, items, _):
            return all(isinstance(item, Symbol) for item in items)
        case _:
            return False


def is_name_of_several(value: Value) -> bool:
    """Whether capitals side by side name one thing: the side ``AB``, the probability ``P(A)``."""
    match value:
        case Operation("mul", operands):
            names = [operand.name for operand in operands if isinstance(operand, Symbol)]
            return len(names) == len(operands) and all(name[:1].isupper() for name in names)
        case _:
            return False


def without_approximation(value: Value) -> Value:
    r"""Return what stands before an approximation of it: ``2/3`` of ``2/3 \approx 0.667``.

    Behind a mere name it is the value: ``x \approx 0.667``.
    """
    if not isinstance(value, Relation) or "approx" not in value.signs:
        return value
    place = value.signs.index("approx")
    sides, signs = value.sides[: place + 1], value.signs[:place]
    if len(sides) == 1 and is_label(sides[0]):
        exact = tuple("=" if sign == "approx" else sign for sign in value.signs)
        return without_approximation(Relation(value.sides[:2], exact[:1]))
    return Relation(sides, signs) if signs else sides[0]
