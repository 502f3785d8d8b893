"""Rational arithmetic, exactly, and the caps on it.

Safe in the parent process: the size of a result is bounded before it is computed, and so is the
sum of all sizes (`_Budget`), so that any text is done with in milliseconds. `value_of` is also the
one place where an expression is refused for its size: exponents, factorials, towers of powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce

from headrace.verifiers.math.tree import Constant, Number, Operation, Refused, Tree, unreadable

MAX_BITS = 65_536
"""Of a numerator or denominator: 5000! has 54 000, 10^10000 has 33 000."""
_MAX_TOTAL_BITS = 600_000
"""Of all that one expression makes: the time of a product grows with their number."""
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 5_000
_MAX_POWER_NESTING = 2
"""Powers inside exponents that are not rational: ``e^{e^x}`` is read, one more is not."""
_MAX_ROOT = 64


class _Budget:
    """What is left of the bits that one expression may make."""

    def __init__(self) -> None:
        self._left = _MAX_TOTAL_BITS

    def spend(self, bits: int) -> None:
        """Raise Refused where a result would be too large, or all results together were."""
        self._left -= bits
        if bits > MAX_BITS or self._left < 0:
            msg = f"a number of more than {MAX_BITS} bits"
            raise Refused(msg)


def value_of(tree: Tree) -> Fraction | None:
    """Return the rational number that ``tree`` is, or None where it is none, or needs algebra.

    Raises Refused over a cap, and Unreadable for what has no value, such as 1/0.
    """
    return _value(tree, _Budget(), 0)


def bits(number: Fraction) -> int:
    """Return the size of a rational number."""
    return number.numerator.bit_length() + number.denominator.bit_length()


def _value(tree: Tree, budget: _Budget, power_nesting: int) -> Fraction | None:
    match tree:
        case Number(value):
            budget.spend(bits(value))
            return value
        case Operation(name, operands):
            return _operation(name, operands, budget, power_nesting)
        case _:
            return None


def _operation(
    name: str, operands: tuple[Tree, ...], budget: _Budget, power_nesting: int
) -> Fraction | None:
    if name == "pow":
        return _power(operands, budget, power_nesting)
    values = [_value(operand, budget, power_nesting) for operand in operands]
    if name == "factorial" and _has_size_inside(operands[0]):
        msg = "a factorial of a factorial or of a power"
        raise Refused(msg)
    if name == "div" and values[1] == 0:
        unreadable("a division by zero")
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Fraction(0) if name == "mul" and 0 in known and _is_number(operands) else None
    if name in _FOLDS:
        return _folded(name, known, budget)
    return _FUNCTIONS[name](known, budget) if name in _FUNCTIONS else None


def _is_number(operands: tuple[Tree, ...]) -> bool:
    """Whether a product with 0 may be called 0: nothing in it can be without a value."""
    return all(isinstance(operand, Number | Constant) for operand in operands) and not any(
        operand == Constant("infinity") for operand in operands
    )


def _has_size_inside(tree: Tree) -> bool:
    if not isinstance(tree, Operation):
        return False
    return tree.name in {"factorial", "pow", "binomial"} or any(
        map(_has_size_inside, tree.operands)
    )


_FOLDS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "add": lambda left, right: left + right,
    "mul": lambda left, right: left * right,
    "div": lambda left, right: left / right,
}


def _folded(name: str, values: list[Fraction], budget: _Budget) -> Fraction:
    def step(left: Fraction, right: Fraction) -> Fraction:
        budget.spend(bits(left) + bits(right))
        return _FOLDS[name](left, right)

    return reduce(step, values)


def _power(operands: tuple[Tree, ...], budget: _Budget, power_nesting: int) -> Fraction | None:
    base = _value(operands[0], budget, power_nesting)
    exponent = _value(operands[1], budget, power_nesting + 1)
    if power_nesting >= _MAX_POWER_NESTING and (base is None or exponent is None):
        msg = "a tower of powers"
        raise Refused(msg)
    if exponent is None:
        return None
    if abs(exponent) > MAX_EXPONENT:
        msg = f"an exponent above {MAX_EXPONENT}"
        raise Refused(msg)
    if base is None:
        return None
    if exponent.denominator != 1:
        root = rational_root(base, exponent.denominator)
        return None if root is None else _whole_power(root, exponent.numerator, budget)
    return _whole_power(base, exponent.numerator, budget)


def _whole_power(base: Fraction, exponent: int, budget: _Budget) -> Fraction:
    if base == 0 and exponent <= 0:
        unreadable("a division by zero")
    budget.spend(bits(base) * abs(exponent) if abs(base) != 1 else 1)
    return base**exponent


def rational_root(value: Fraction, degree: int) -> Fraction | None:
    """Return the real root of a rational number where it is rational, else None."""
    if degree < 1 or degree > _MAX_ROOT or (value < 0 and degree % 2 == 0):
        return None
    top, low = _whole_root(abs(value.numerator), degree), _whole_root(value.denominator, degree)
    if top is None or low is None:
        return None
    return Fraction(top if value >= 0 else -top, low)


def _whole_root(number: int, degree: int) -> int | None:
    """Return the exact root of a whole number, by bisection on its bits, or None."""
    if degree == 2:  # noqa: PLR2004 - a square root
        root = math.isqrt(number)
        return root if root * root == number else None
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    if number.bit_length() > MAX_BITS // 8:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= number:
            low = middle
        else:
            high = middle - 1
    return low if low**degree == number else None


def _root(values: list[Fraction], _budget: _Budget) -> Fraction | None:
    radicand, degree = values
    if degree.denominator != 1:
        return None
    return rational_root(radicand, degree.numerator)


def _factorial(values: list[Fraction], budget: _Budget) -> Fraction | None:
    (number,) = values
    if number > MAX_FACTORIAL:
        msg = f"a factorial above {MAX_FACTORIAL}"
        raise Refused(msg)
    if number < 0 or number.denominator != 1:
        return None
    budget.spend(max(1, int(number) * int(number).bit_length()))
    return Fraction(math.factorial(int(number)))


def _binomial(values: list[Fraction], budget: _Budget) -> Fraction | None:
    upper, lower = values
    if upper.denominator != 1 or lower.denominator != 1 or upper < 0:
        return None
    if not 0 <= lower <= upper:
        return Fraction(0)
    smaller = int(min(lower, upper - lower))
    budget.spend(max(1, smaller * int(upper).bit_length()))
    return Fraction(math.comb(int(upper), smaller))


def _whole(values: list[Fraction]) -> list[int] | None:
    return [int(value) for value in values] if all(v.denominator == 1 for v in values) else None


def _of_whole(function: Callable[..., int]) -> Callable[[list[Fraction], _Budget], Fraction | None]:
    def apply(values: list[Fraction], budget: _Budget) -> Fraction | None:
        numbers = _whole(values)
        if numbers is None:
            return None
        budget.spend(sum(map(bits, values)))
        return Fraction(function(*numbers))

    return apply


def _modulo(values: list[Fraction], _budget: _Budget) -> Fraction | None:
    if values[1] == 0:
        unreadable("a division by zero")
    return values[0] % values[1]


_FUNCTIONS: dict[str, Callable[[list[Fraction], _Budget], Fraction | None]] = {
    "neg": lambda values, _budget: -values[0],
    "abs": lambda values, _budget: abs(values[0]),
    "floor": lambda values, _budget: Fraction(math.floor(values[0])),
    "ceil": lambda values, _budget: Fraction(math.ceil(values[0])),
    "sgn": lambda values, _budget: Fraction((values[0] > 0) - (values[0] < 0)),
    "max": lambda values, _budget: max(values),
    "min": lambda values, _budget: min(values),
    "gcd": _of_whole(math.gcd),
    "lcm": _of_whole(math.lcm),
    "mod": _modulo,
    "root": _root,
    "factorial": _factorial,
    "binomial": _binomial,
}
