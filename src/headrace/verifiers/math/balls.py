"""The value of an expression as a ball: a number with a bound on its error, by Arb's arithmetic.

Runs only in a grading process. A ball holds the exact value for certain, so two balls that do not
meet are different numbers, whatever was lost on the way; that two meet is evidence of equality,
the stronger the smaller they are (`algebra` asks for how much). Where an expression has no value,
such as a logarithm of 0, the ball is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import reduce
from typing import Any

import flint

from headrace.verifiers.math.exact import MAX_EXPONENT, value_of
from headrace.verifiers.math.tree import Constant, Number, Operation, Symbol, Tree, Unreadable

Ball = Any  # flint.acb, whose types need the package at type-checking time

NOWHERE: Ball = flint.acb(float("nan"))
"""The ball of what has no value."""


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Compute with so many bits inside the block."""
    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        yield
    finally:
        flint.ctx.prec = before


def ball_of_fraction(value: Fraction) -> Ball:
    """Return the ball around a rational number."""
    return flint.acb(flint.fmpq(value.numerator, value.denominator))


def evaluate(tree: Tree, point: Mapping[str, Ball], *, is_real: bool) -> Ball:
    """Return the ball of ``tree`` where its variables have the values of ``point``.

    ``is_real``: an odd root of a negative number is the real one, as at school; otherwise it is
    the principal root of the complex numbers.
    """
    match tree:
        case Number(value):
            return ball_of_fraction(value)
        case Symbol(name):
            return point[name]
        case Constant(name):
            return _CONSTANTS[name]()
        case Operation("pow" | "root", (base, other)):
            return _power(tree, base, other, point, is_real=is_real)
        case Operation("call", operands):
            return _call(operands, point, is_real=is_real)
        case Operation(name, operands):
            parts = [evaluate(operand, point, is_real=is_real) for operand in operands]
            return _FUNCTIONS[name](parts) if name in _FUNCTIONS else _whole(tree)
    raise AssertionError(tree)


_CONSTANTS: dict[str, Callable[[], Ball]] = {
    "pi": lambda: flint.acb(flint.arb.pi()),
    "e": lambda: flint.acb(flint.arb.const_e()),
    "i": lambda: flint.acb(0, 1),
    "infinity": lambda: NOWHERE,
}


def is_real_ball(ball: Ball) -> bool:
    """Whether a ball is finite and may be of a real number."""
    return bool(ball.is_finite() and ball.imag.contains(0))


def _power(
    tree: Operation, base: Tree, other: Tree, point: Mapping[str, Ball], *, is_real: bool
) -> Ball:
    """Return a power, or a root as the power of 1/degree."""
    below = evaluate(base, point, is_real=is_real)
    exponent = _rational(other)
    if exponent is None or exponent == 0:
        exponent_ball = evaluate(other, point, is_real=is_real)
        if tree.name == "root":
            exponent_ball = 1 / exponent_ball
        # Beyond, what is added to 1 would be lost at any precision that is ever used.
        return below**exponent_ball if abs(exponent_ball) < MAX_EXPONENT else NOWHERE
    if tree.name == "root":
        exponent = 1 / exponent
    if exponent == Fraction(1, 2):
        return below.sqrt()
    if exponent.denominator == 1:
        return (
            below**exponent.numerator
            if abs(exponent) < 2**31
            else below ** ball_of_fraction(exponent)
        )
    is_negative = bool(below.imag.is_zero() and below.real < 0)
    if is_real and is_negative and exponent.denominator % 2 == 1:
        value = (-below) ** ball_of_fraction(exponent)
        return value if exponent.numerator % 2 == 0 else -value
    return below ** ball_of_fraction(exponent)


def _rational(tree: Tree) -> Fraction | None:
    try:
        return value_of(tree)
    except Unreadable:
        return None


def _call(operands: tuple[Tree, ...], point: Mapping[str, Ball], *, is_real: bool) -> Ball:
    """Return some value of a function that nobody defined: one that no rule of algebra changes."""
    name, *arguments = operands
    scale = evaluate(name, point, is_real=is_real)
    return reduce(
        lambda value, argument: (scale * value + evaluate(argument, point, is_real=is_real)).sin(),
        arguments,
        scale,
    )


def _whole(tree: Tree) -> Ball:
    """Return the value of what is defined for whole numbers alone: gcd, lcm, mod."""
    value = _rational(tree)
    return NOWHERE if value is None else ball_of_fraction(value)


def _logarithm(parts: list[Ball]) -> Ball:
    base, argument = parts
    return argument.log() / base.log()


def _binomial(parts: list[Ball]) -> Ball:
    upper, lower = parts
    return (upper + 1).gamma() * (lower + 1).rgamma() * (upper - lower + 1).rgamma()


def _extreme(name: str) -> Callable[[list[Ball]], Ball]:
    def apply(parts: list[Ball]) -> Ball:
        if not all(is_real_ball(part) for part in parts):
            return NOWHERE
        return flint.acb(reduce(lambda a, b: getattr(a, name)(b), (part.real for part in parts)))

    return apply


def _rounded(name: str) -> Callable[[list[Ball]], Ball]:
    def apply(parts: list[Ball]) -> Ball:
        (part,) = parts
        return flint.acb(getattr(part.real, name)()) if is_real_ball(part) else NOWHERE

    return apply


def _quotient(parts: list[Ball]) -> Ball:
    top, low = parts
    return NOWHERE if low.contains(0) else top / low


_FUNCTIONS: dict[str, Callable[[list[Ball]], Ball]] = {
    "add": lambda parts: reduce(lambda left, right: left + right, parts),
    "mul": lambda parts: reduce(lambda left, right: left * right, parts),
    "div": _quotient,
    "neg": lambda parts: -parts[0],
    "abs": lambda parts: flint.acb(abs(parts[0])),
    "log": _logarithm,
    "factorial": lambda parts: (parts[0] + 1).gamma(),
    "binomial": _binomial,
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
    "sgn": lambda parts: parts[0].sgn(),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "sin": lambda parts: parts[0].sin(),
    "cos": lambda parts: parts[0].cos(),
    "tan": lambda parts: parts[0].tan(),
    "cot": lambda parts: parts[0].cot(),
    "sec": lambda parts: parts[0].sec(),
    "csc": lambda parts: parts[0].csc(),
    "arcsin": lambda parts: parts[0].asin(),
    "arccos": lambda parts: parts[0].acos(),
    "arctan": lambda parts: parts[0].atan(),
    "arccot": lambda parts: flint.acb(flint.arb.pi()) / 2 - parts[0].atan(),
    "sinh": lambda parts: parts[0].sinh(),
    "cosh": lambda parts: parts[0].cosh(),
    "tanh": lambda parts: parts[0].tanh(),
    "coth": lambda parts: parts[0].coth(),
    "arsinh": lambda parts: parts[0].asinh(),
    "arcosh": lambda parts: parts[0].acosh(),
    "artanh": lambda parts: parts[0].atanh(),
    "Re": lambda parts: flint.acb(parts[0].real),
    "Im": lambda parts: flint.acb(parts[0].imag),
    "arg": lambda parts: flint.acb(parts[0].arg()),
}
