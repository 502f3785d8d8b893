"""Sets of real numbers: intervals, unions, differences, and inequalities in one variable.

Two sets are compared by which of their bounds, and of the gaps between bounds, lie in each: no
normal form is made, so that every way to write a set is the same set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from headrace.verifiers.math.deciding import Decider
from headrace.verifiers.math.exact import value_of
from headrace.verifiers.math.tree import (
    INFINITY,
    Braces,
    Bracketed,
    NamedSet,
    Number,
    Operation,
    Relation,
    SetOperation,
    Symbol,
    Tree,
    Unreadable,
    Value,
    infinite_sign,
    is_tree,
    symbols,
    trees_of,
    unreadable,
)

_MAX_BOUNDS = 40
_MINUS_INFINITY = Operation("neg", (INFINITY,))
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """All numbers between two bounds."""

    low: Tree
    high: Tree
    has_low: bool
    has_high: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Two sets and how they are put together."""

    name: str
    """``union``, ``intersection`` or ``difference``."""
    left: Region
    right: Region


Region = tuple[Piece, ...] | Combined
"""Pieces are a union; none is the empty set."""

EVERYTHING: Region = (Piece(low=_MINUS_INFINITY, high=INFINITY, has_low=False, has_high=False),)


def region_of(value: Value) -> Region:
    """Return the real numbers that a value stands for. Raises Unreadable for what is no set."""
    match value:
        case Bracketed("(" | "[" as left, (low, high), ")" | "]" as right):
            return _interval(*trees_of((low, high)), has_low=left == "[", has_high=right == "]")
        case Braces(items):
            return tuple(map(_point, trees_of(items)))
        case NamedSet("R"):
            return EVERYTHING
        case SetOperation(name, left, right):
            return Combined(name=name, left=region_of(left), right=region_of(right))
        case Relation(sides, ("in",)):
            return region_of(sides[1])
        case Relation():
            return _where(value)
        case _:
            msg = "no set of real numbers"
            raise Unreadable(msg)


def variables_of(value: Value) -> frozenset[str]:
    """Return the variables that a set is written with, as in ``1 < x``; case is no difference."""
    if isinstance(value, SetOperation):
        return variables_of(value.left) | variables_of(value.right)
    if isinstance(value, Relation):
        found = [symbols(side) for side in value.sides if is_tree(side)]
        return frozenset(name.casefold() for names in found for name in names)
    return frozenset()


def _interval(low: Tree, high: Tree, *, has_low: bool, has_high: bool) -> Region:
    if symbols(low) or symbols(high):
        unreadable("an interval whose bounds have variables")
    return (
        Piece(
            low=low,
            high=high,
            has_low=has_low and not infinite_sign(low),
            has_high=has_high and not infinite_sign(high),
        ),
    )


def _point(tree: Tree) -> Piece:
    if symbols(tree):
        unreadable("a set whose elements have variables")
    return Piece(low=tree, high=tree, has_low=True, has_high=True)


def _where(relation: Relation) -> Region:
    """Return where a chain of relations holds, each between a variable and a number."""
    links = zip(relation.sides, relation.signs, relation.sides[1:], strict=False)
    regions = [_link(left, sign, right) for left, sign, right in links]
    whole = regions[0]
    for region in regions[1:]:
        whole = Combined(name="intersection", left=whole, right=region)
    return whole


def _link(left: Value, sign: str, right: Value) -> Region:
    if not is_tree(left) or not is_tree(right) or sign not in _MIRRORED:
        unreadable("no inequality between numbers")
    if (absolute := _without_bars(left, sign, right)) is not None:
        return absolute
    bound, direction = _solved(left, right)
    sign = sign if direction > 0 else _MIRRORED[sign]
    match sign:
        case "<" | "<=":
            return _interval(_MINUS_INFINITY, bound, has_low=False, has_high=sign == "<=")
        case ">" | ">=":
            return _interval(bound, INFINITY, has_low=sign == ">=", has_high=False)
        case "=":
            return (_point(bound),)
        case _:
            return Combined(name="difference", left=EVERYTHING, right=(_point(bound),))


def _without_bars(left: Tree, sign: str, right: Tree) -> Region | None:
    r"""Return where ``|a x + b| > c`` or ``< c`` holds; None for what is no such inequality."""
    if not _is_absolute(left) and _is_absolute(right):
        left, sign, right = right, _MIRRORED[sign], left
    if not _is_absolute(left) or symbols(right) or sign in {"=", "!="}:
        return None
    assert isinstance(left, Operation)
    inner, minus = left.operands[0], Operation("neg", (right,))
    name = "union" if sign in {">", ">="} else "intersection"
    # Of a bound below 0 these are everything and nothing, as they should be.
    return Combined(
        name=name, left=_link(inner, sign, right), right=_link(inner, _MIRRORED[sign], minus)
    )


def _is_absolute(tree: Tree) -> bool:
    return isinstance(tree, Operation) and tree.name == "abs" and bool(symbols(tree))


def _solved(left: Tree, right: Tree) -> tuple[Tree, int]:
    """Return b and the sign of a for ``a x + c`` against a number: x against b.

    Either the variable stands alone on one side, or both sides are linear with fractions.
    """
    if isinstance(left, Symbol) and not symbols(right):
        return right, 1
    if isinstance(right, Symbol) and not symbols(left):
        return left, -1
    names = symbols(left) | symbols(right)
    line = _linear(Operation("add", (left, Operation("neg", (right,)))))
    if len(names) != 1 or line is None or line[0] == 0:
        unreadable("no linear inequality in one variable")
    slope, constant = line
    return Number(-constant / slope), 1 if slope > 0 else -1


def _linear(tree: Tree) -> tuple[Fraction, Fraction] | None:  # noqa: PLR0911 - one for each operation
    """Return slope and constant of a linear expression in one variable, or None."""
    constant = value_of(tree)
    if constant is not None:
        return Fraction(0), constant
    if isinstance(tree, Symbol):
        return Fraction(1), Fraction(0)
    if not isinstance(tree, Operation):
        return None
    lines = [_linear(operand) for operand in tree.operands]
    known = [line for line in lines if line is not None]
    if len(known) < len(lines):
        return None
    match tree.name:
        case "add":
            return sum((a for a, _ in known), Fraction(0)), sum((b for _, b in known), Fraction(0))
        case "neg":
            return -known[0][0], -known[0][1]
        case "mul" if known[0][0] == 0 or known[1][0] == 0:
            (a, b), (c, d) = known
            return a * d + b * c, b * d
        case "div" if known[1][0] == 0 and known[1][1] != 0:
            return known[0][0] / known[1][1], known[0][1] / known[1][1]
        case _:
            return None


def same_region(gold: Region, answer: Region, decide: Decider) -> bool:
    """Return whether two sets hold the same numbers. Raises Unreadable for bounds without order."""
    bounds = _ordered([*_bounds(gold), *_bounds(answer)], decide)
    # Twice the place of a bound among all of them is the bound, and odd numbers are the gaps.
    places = {tree: 2 * place for place, group in enumerate(bounds) for tree in group}
    return all(
        _holds(gold, spot, places) == _holds(answer, spot, places)
        for spot in range(-1, 2 * len(bounds))
    )


def is_empty(region: Region, decide: Decider) -> bool:
    """Whether a set has no number in it."""
    return same_region(region, (), decide)


def _bounds(region: Region) -> list[Tree]:
    if isinstance(region, Combined):
        return _bounds(region.left) + _bounds(region.right)
    return [bound for piece in region for bound in (piece.low, piece.high)]


def _ordered(bounds: Sequence[Tree], decide: Decider) -> list[list[Tree]]:
    """Return groups of equal bounds, in increasing order."""
    if len(bounds) > _MAX_BOUNDS:
        unreadable(f"a set of more than {_MAX_BOUNDS} bounds")
    groups: list[list[Tree]] = []
    for bound in bounds:
        place = 0
        while place < len(groups) and (order := decide.order(groups[place][0], bound)) <= 0:
            if order == 0:
                groups[place].append(bound)
                break
            place += 1
        else:
            groups.insert(place, [bound])
    return groups


def _holds(region: Region, spot: int, places: dict[Tree, int]) -> bool:
    if isinstance(region, Combined):
        left, right = _holds(region.left, spot, places), _holds(region.right, spot, places)
        match region.name:
            case "union":
                return left or right
            case "intersection":
                return left and right
            case _:
                return left and not right
    return any(_in_piece(piece, spot, places) for piece in region)


def _in_piece(piece: Piece, spot: int, places: dict[Tree, int]) -> bool:
    low, high = places[piece.low], places[piece.high]
    if low < spot < high:
        return True
    if low == high:
        return spot == low and piece.has_low and piece.has_high
    return (spot == low and piece.has_low and low < high) or (
        spot == high and piece.has_high and low < high
    )
