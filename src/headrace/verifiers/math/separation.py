r"""How close to 0 a number made of roots can be without being 0.

The bound of Burnikel, Funke, Mehlhorn, Schirra and Schmitt for radical expressions ("A separation
bound for real algebraic expressions", ESA 2001): with numerator and denominator bounds u and l
built up over the expression, and D the product of the degrees of its roots, a value that is not 0
is at least 1 / (u^(D-1) l). All bounds are kept as base-2 logarithms, rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from headrace.verifiers.math.exact import value_of
from headrace.verifiers.math.tree import Number, Operation, Tree

_MAX_DEGREE = 4096
"""Of all roots together."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """Logarithms of u and l, and the product of the degrees of the roots."""

    upper: float
    lower: float
    degree: int


def separation_bits(tree: Tree) -> int | None:
    """Return b so that ``tree`` is 0 if its absolute value is below 2^-b.

    None where it is made of more than whole numbers, the four operations, whole powers and roots.
    """
    bound = _bound(tree)
    if bound is None or bound.degree > _MAX_DEGREE:
        return None
    return math.ceil((bound.degree - 1) * max(bound.upper, 0.0) + bound.lower) + 2


def _bound(tree: Tree) -> _Bound | None:
    if isinstance(tree, Number):
        value = tree.value
        return _Bound(_log(value.numerator), _log(value.denominator), 1)
    if not isinstance(tree, Operation):
        return None
    if tree.name == "pow":
        return _power(*tree.operands)
    if tree.name == "root":
        degree = value_of(tree.operands[1])
        return _fractional(tree.operands[0], 1 / degree) if degree else None
    parts = [_bound(operand) for operand in tree.operands]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or tree.name not in {"add", "mul", "div", "neg"}:
        return None
    whole = known[0]
    for part in known[1:]:
        whole = _joined(tree.name, whole, part)
    return whole


def _joined(name: str, left: _Bound, right: _Bound) -> _Bound:
    degree = left.degree * right.degree
    match name:
        case "add":
            upper = max(left.upper + right.lower, left.lower + right.upper) + 1
            return _Bound(upper, left.lower + right.lower, degree)
        case "mul":
            return _Bound(left.upper + right.upper, left.lower + right.lower, degree)
        case _:
            return _Bound(left.upper + right.lower, left.lower + right.upper, degree)


def _power(base: Tree, exponent: Tree) -> _Bound | None:
    power = value_of(exponent)
    return None if power is None else _fractional(base, power)


def _fractional(base: Tree, power: Fraction) -> _Bound | None:
    """Return the bound of a power with a fraction for exponent: a whole power, then a root."""
    below = _bound(base)
    if below is None or power == 0:
        return None
    size, degree = abs(power.numerator), power.denominator
    if max(size, degree) > _MAX_DEGREE:
        return None
    upper, lower = below.upper * size, below.lower * size
    if power < 0:
        upper, lower = lower, upper
    if degree > 1 and upper >= lower:
        upper = (upper + (degree - 1) * lower) / degree
    elif degree > 1:
        lower = ((degree - 1) * upper + lower) / degree
    return _Bound(upper, lower, below.degree * degree)


def _log(number: int) -> float:
    """Return an upper bound of log2 of the absolute value; of 0 that of 1, which bounds it, too."""
    return float(max(abs(number), 1).bit_length())
