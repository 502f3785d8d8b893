"""What kind of answer a value is: a label, a set, a vector, a region, or of the declared type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.verifiers.math.reading import Item, Reading, has_decimal
from headrace.verifiers.math.tree import (
    Braces,
    Bracketed,
    Matrix,
    NamedSet,
    Relation,
    SetOperation,
    Symbol,
    Tree,
    Value,
    is_label,
    is_name_of_several,
    is_tree,
    symbols,
)

if TYPE_CHECKING:
    from headrace.config import AnswerType

_INEQUALITIES = frozenset(("<", ">", "<=", ">=", "!="))
_PAIRS = frozenset((("(", ")"), ("[", "]"), ("<", ">")))
"""Brackets that may be of points; all others are of intervals."""


def type_problem(answer: Reading, answer_type: AnswerType) -> str | None:
    """Return why an answer is not of the declared type, or None."""
    values = [bare(item.value) for item in answer.items]
    only = values[0] if len(values) == 1 else None
    match answer_type:
        case "number" | "fraction" | "quantity" | "expression":
            return _expression_problem(answer, only, answer_type)
        case "equation":
            value = answer.items[0].value
            is_equation = only and isinstance(value, Relation) and set(value.signs) == {"="}
            return None if is_equation else "an equation is wanted"
        case "matrix":
            return None if isinstance(only, Matrix) else "a matrix is wanted"
        case "tuple":
            is_tuple = only is None or isinstance(only, Bracketed | Matrix)
            return None if is_tuple else "a tuple is wanted"
        case _:
            return None


def _expression_problem(answer: Reading, only: Value | None, answer_type: AnswerType) -> str | None:
    if only is None or not is_tree(only):
        return f"one {answer_type} is wanted"
    if answer_type != "expression" and symbols(only):
        return f"a {answer_type} without variables is wanted"
    if answer_type == "fraction" and has_decimal(only):
        return "a fraction is wanted, and no decimals"
    if answer_type == "quantity" and not answer.items[0].unit:
        return "a unit is wanted"
    return None


def bare(value: Value) -> Value:
    """Return what stands behind ``x =`` or "x in", without asking whether a chain agrees."""
    if not isinstance(value, Relation):
        return value
    last = value.sides[-1]
    if value.signs in {("in",), ("=",)} and is_label(value.sides[0]):
        return last
    is_chain = set(value.signs) == {"="} and is_tree(last) and not symbols(last)
    return last if is_chain else value


def as_set(value: Value) -> Value:
    """Return the set behind a label; a condition such as ``x = 3`` stays."""
    behind = bare(value)
    return value if is_tree(behind) else behind


def is_same_label(gold: Relation, answer: Relation) -> bool:
    """Whether left sides name the same: ``f(x)`` and ``y``; ``X`` and ``x`` of a number."""
    left, right = gold.sides[0], answer.sides[0]
    if left == right:
        return True
    if is_name_of_several(left) or is_name_of_several(right):
        return False
    if not (isinstance(left, Symbol) and isinstance(right, Symbol)):
        return True
    no_variables = not any(
        is_tree(side) and symbols(side) for side in (gold.sides[-1], answer.sides[-1])
    )
    return left.name.casefold() == right.name.casefold() and no_variables


def element_items(reading: Reading) -> list[Item]:
    """Return the values of a list, or of the one set in it."""
    only = reading.only
    if only is None:
        return list(reading.items)
    value = bare(only.value)
    if isinstance(value, Braces):
        return [Item(value=item, unit=only.unit) for item in value.items]
    return [only]


def places_of(reading: Reading) -> list[Item]:
    """Return the entries of a tuple, with or without its brackets."""
    only = reading.only
    if only is None:
        return list(reading.items)
    entries = entries_of(bare(only.value))
    return [only] if entries is None else [Item(value=entry) for entry in entries]


def entries_of(value: Value) -> tuple[Value, ...] | None:
    """Return the entries of a tuple, or of a matrix of one row or one column."""
    if isinstance(value, Bracketed):
        return value.items
    if not isinstance(value, Matrix):
        return None
    if len(value.rows) == 1:
        return value.rows[0]
    return tuple(row[0] for row in value.rows) if len(value.rows[0]) == 1 else None


def differ_in_style(gold: Bracketed, answer: Bracketed) -> bool:
    """Whether brackets differ in style alone: of two entries, square ones mean an interval."""
    if len(gold.items) == 2:  # noqa: PLR2004 - may be an interval
        return {(b.left, b.right) for b in (gold, answer)} == {("(", ")"), ("<", ">")}
    return True


def assigned(reading: Reading) -> dict[str, Value] | None:
    """Return what each name is given by ``x = 1, y = 2`` or ``(x, y) = (1, 2)``, else None.

    Names with subscripts of one letter are the solutions of one thing, which have no order.
    """
    pairs = _given_together(reading) if reading.only else _given_one_by_one(reading)
    letters = {name.partition("_")[0] for name, _ in pairs}
    return dict(pairs) if len(letters) == len(pairs) > 1 else None


def _given_together(reading: Reading) -> list[tuple[str, Value]]:
    match reading.items[0].value:
        case Relation((Bracketed(_, names, _), Bracketed(_, values, _)), ("=",)) if len(
            names
        ) == len(values):
            pairs = zip(names, values, strict=True)
            return [(name.name, value) for name, value in pairs if isinstance(name, Symbol)]
        case _:
            return []


def _given_one_by_one(reading: Reading) -> list[tuple[str, Value]]:
    if reading.joined not in {",", "and"}:
        return []
    found: list[tuple[str, Value]] = []
    for item in reading.items:
        match item.value:
            case Relation((Symbol(name), value), ("=",)):
                found.append((name, value))
            case _:
                return []
    return found


def is_vector(item: Item | None) -> bool:
    """Whether a value has entries in order."""
    return item is not None and isinstance(item.value, Bracketed | Matrix)


def rows_of(value: Value) -> tuple[tuple[Value, ...], ...] | None:
    """Return the rows of a matrix, or of a list of lists; None for other values."""
    match value:
        case Matrix(rows):
            return rows
        case Bracketed("[", lists, "]"):
            rows = tuple(one.items for one in lists if isinstance(one, Bracketed))
            return rows if len(rows) == len(lists) else None
        case _:
            return None


def sides_of(value: Value) -> tuple[Tree, ...]:
    """Return an expression, or the sides of a chain of equal ones; nothing for other values."""
    if is_tree(value):
        return (value,)
    if isinstance(value, Relation) and set(value.signs) == {"="} and all(map(is_tree, value.sides)):
        return tuple(filter(is_tree, value.sides))
    return ()


def is_set(item: Item | None) -> bool:
    """Whether a value is a set by its elements."""
    return item is not None and isinstance(bare(item.value), Braces)


def may_be_region(value: Value) -> bool:
    """Whether a value may be a set of real numbers."""
    if isinstance(value, Relation):
        signs = set(value.signs)
        return signs <= _INEQUALITIES or signs in ({"in"}, {"="})
    is_interval = isinstance(value, Bracketed) and len(value.items) == 2 and value.left != "<"  # noqa: PLR2004 - bounds
    return is_interval or isinstance(value, Braces | NamedSet | SetOperation)


def is_region(reading: Reading) -> bool:
    """Whether a reading is inequalities, intervals or sets, and no list of values."""
    values = [item.value for item in reading.items]
    has_inequality = any(
        isinstance(value, SetOperation)
        or (isinstance(value, Relation) and set(value.signs) & (_INEQUALITIES | {"in"}))
        or (isinstance(value, Bracketed) and (value.left, value.right) not in _PAIRS)
        for value in values
    )
    alone = len(values) == 1 and isinstance(values[0], Bracketed)
    return (has_inequality or alone) and all(map(may_be_region, values))
