r"""The worker's side of `math`: both answers are parsed, and this decides if they are equal.

Owns: two numbers are equal only if they agree to 30 significant digits, and two letters only if
they are of one case. math-verify 0.9 compares differences with 0 at 15 decimals, so that
``1/2^{98}`` equals ``1/2^{99}``, rounds decimals, so that ``3.14159265`` equals pi, and has its
parser (latex2sympy2_extended) turn ``R`` into ``r``: so the parser is called directly.
Runs only in a process that may be killed: nothing in here has a time limit of its own. It has no
say over size: `math_text` refused what is too big.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And as LatexAnd
from sympy import And, Basic, Eq, Expr, FiniteSet, Float, Interval, MatrixBase, Rational, Set, Tuple
from sympy.core.relational import Relational

from headrace.verifiers import frames

_SIGNIFICANT_DIGITS = 30
_WORKING_DIGITS = 50
_SAMPLES = tuple(Rational(*pair) for pair in ((37, 29), (-53, 31), (113, 17), (-7, 41), (2, 97)))
"""Where expressions with variables are compared: no round numbers, both signs, small and large."""
_MIN_COMMON_POINTS = 2
_CONDITIONS = (Relational, And, LatexAnd)
_NORMALIZATION = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=False,
    boxed="none",
    equations=False,
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_BINDERS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)

Value = Any  # sympy has no types of its own: an Expr, a Set, a Relational, a MatrixBase, ...


def handle(job: frames.Message) -> frames.Message:
    """Answer whether ``answer`` equals ``gold``; without one, whether ``gold`` is readable."""
    gold = _read(job["gold"])
    if gold is None:
        return {"status": "ok", "value": "unreadable gold"}
    if "answer" not in job:
        return {"status": "ok", "value": "readable"}
    answer = _read(job["answer"])
    if answer is None:
        return {"status": "ok", "value": "unreadable"}
    try:
        right = equal(gold, answer)
    # sympy raises anything at all on odd input; that is no equality, and no failure of ours.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        return {"status": "ok", "value": "unequal", "detail": type(error).__name__}
    except (ValueError, NotImplementedError) as error:
        return {"status": "ok", "value": "unequal", "detail": type(error).__name__}
    return {"status": "ok", "value": "equal" if right else "unequal"}


@lru_cache(maxsize=256)
def _read(latex: str) -> Value | None:
    """Return what ``latex`` says, decimals as fractions; None for what is invalid or unreadable."""
    value = _parsed(latex, is_real=True)
    if not isinstance(value, Basic | MatrixBase):
        return None
    if _I in value.free_symbols and not value.has(*_BINDERS):
        value = _with_imaginary_unit(_parsed(latex, is_real=None))
    value = value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})
    return None if value.has(sympy.nan, sympy.zoo) else value


def _parsed(latex: str, *, is_real: bool | None) -> Value | None:
    """Return what the parser makes of ``latex``; None where it cannot read it."""
    try:
        return latex2sympy(
            latex,
            is_real=is_real,
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    # The parser raises plain Exception for bad syntax, and anything at all on odd input.
    except Exception:  # noqa: BLE001 - see the line above
        return None


_I = sympy.Symbol("i", real=True)


def _with_imaginary_unit(value: Value) -> Value:
    """Read the letter i as the imaginary unit; the other variables are real."""
    names = {symbol: sympy.Symbol(symbol.name, real=True) for symbol in value.free_symbols}
    return value.xreplace(
        {symbol: sympy.I if symbol.name == "i" else real for symbol, real in names.items()}
    )


def equal(gold: Value, answer: Value) -> bool:
    """Return whether two readings are of one kind and mean the same."""
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _same_equation(gold, answer)
    gold, answer = _without_name(gold), _without_name(answer)
    if isinstance(gold, Set) and isinstance(answer, _CONDITIONS):
        answer = answer.as_set()
    elif isinstance(answer, Set) and isinstance(gold, _CONDITIONS):
        gold = gold.as_set()
    for kind, same in _SAME:
        if isinstance(gold, kind) and isinstance(answer, kind):
            return same(gold, answer)
    return False


def _without_name(value: Value) -> Value:
    """Return the right side of ``x = 5`` and of a chain ``2 + 3 = 5`` whose parts really agree.

    An equation such as ``2x + 1 = 0`` stays one: its right side is not its value.
    """
    if not isinstance(value, Eq):
        return value
    left, right = value.lhs, value.rhs
    if isinstance(right, Eq):
        right = _without_name(right)
    named = left.is_Symbol or (left.is_Function and all(arg.is_Symbol for arg in left.args))
    if named or (not left.free_symbols and not isinstance(right, Eq) and equal(left, right)):
        return right
    return value


def _same_equation(gold: Eq, answer: Eq) -> bool:
    """Return whether two equations hold for the same values, or give one name the same value.

    ``y = 2x + 1`` is ``y - 2x - 1 = 0``, ``f(x) = 2x`` is ``y = 2x``; ``y = 5`` is not ``x = 5``.
    """
    value, other = _without_name(gold), _without_name(answer)
    both_named = value is not gold and other is not answer
    if both_named and (gold.lhs == answer.lhs or _is_same_label(gold, answer)):
        return equal(value, other)
    sides = (gold.lhs, gold.rhs, answer.lhs, answer.rhs)
    return all(isinstance(side, Expr) for side in sides) and _same_relation(gold, answer)


def _is_same_label(gold: Eq, answer: Eq) -> bool:
    """Whether the left sides are but a label: ``f(x)`` and ``y``; ``X`` and ``x`` of a number."""
    if not (gold.lhs.is_Symbol and answer.lhs.is_Symbol):
        return True
    same_letter = gold.lhs.name.casefold() == answer.lhs.name.casefold()
    return same_letter and not gold.rhs.free_symbols and not answer.rhs.free_symbols


def same_expression(gold: Expr, answer: Expr) -> bool:
    """Return whether two expressions have the same value wherever both have one.

    With variables this is evidence, not proof: they agree to 30 digits at every sample point
    where the expected one is real, and there are at least two such points.
    """
    if gold == answer:
        return True
    gold, answer = gold.doit(), answer.doit()
    if gold == answer or answer.has(sympy.nan, sympy.zoo):
        return bool(gold == answer)
    if isinstance(gold, Rational) and isinstance(answer, Rational):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return _same_number(gold, answer)
    return _same_at_samples(gold, answer, symbols)


def _same_at_samples(gold: Expr, answer: Expr, symbols: Sequence[Basic]) -> bool:
    common = 0
    for shift in range(len(_SAMPLES)):
        values = itertools.islice(itertools.cycle(_SAMPLES), shift, shift + len(symbols))
        # Two variables must not share a value, or x - y would be 0 everywhere.
        point = {
            symbol: value + 3 * k
            for k, (symbol, value) in enumerate(zip(symbols, values, strict=True))
        }
        left, right = gold.subs(point), answer.subs(point)
        left_is_real, right_is_real = _is_finite_real(left), _is_finite_real(right)
        if left_is_real != right_is_real:
            return False
        if left_is_real and not _same_number(left, right):
            return False
        common += left_is_real
    return common >= _MIN_COMMON_POINTS


def _is_finite_real(value: Expr) -> bool:
    number = value.evalf(_WORKING_DIGITS)
    return bool(number.is_Number and number.is_finite)


def _same_number(gold: Expr, answer: Expr) -> bool:
    """Return whether two constants agree to 30 significant digits, real and imaginary part."""
    left, right = gold.evalf(_WORKING_DIGITS), answer.evalf(_WORKING_DIGITS)
    if left == right:
        return True
    if left.free_symbols or right.free_symbols or not (left.is_number and right.is_number):
        return bool(sympy.simplify(gold - answer) == 0)
    size = max(abs(left), abs(right))
    if left == 0 or right == 0:
        # No relative difference to 0: only algebra can tell a zero from something small.
        return bool(sympy.simplify(gold - answer) == 0)
    return bool(abs(left - right) < size * Rational(1, 10**_SIGNIFICANT_DIGITS))


def _same_set(gold: Set, answer: Set) -> bool:
    if isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet):
        return _same_elements(gold.args, answer.args)
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        same_ends = gold.left_open == answer.left_open and gold.right_open == answer.right_open
        return same_ends and _same_in_order((gold.start, gold.end), (answer.start, answer.end))
    if isinstance(gold, FiniteSet) or isinstance(answer, FiniteSet):
        return False
    return bool(gold == answer or gold.symmetric_difference(answer).is_empty)


def _same_in_order(gold: Sequence[Value], answer: Sequence[Value]) -> bool:
    return len(gold) == len(answer) and all(map(equal, gold, answer))


def _same_elements(gold: Sequence[Value], answer: Sequence[Value]) -> bool:
    """Return whether every element has its own partner, in any order."""
    left = list(answer)
    for element in gold:
        partner = next((other for other in left if equal(element, other)), None)
        if partner is None:
            return False
        left.remove(partner)
    return not left


def _same_relation(gold: Relational, answer: Relational) -> bool:
    """Compare ``a < b`` with ``c > d`` as ``0 < b - a`` with a positive multiple of it."""
    if isinstance(gold, Eq) != isinstance(answer, Eq):
        return False
    gold, answer = gold.canonical, answer.canonical
    if type(gold) is not type(answer):
        answer = answer.reversed
    if type(gold) is not type(answer):
        return False
    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    if same_expression(left, right):
        return True
    if left.free_symbols != right.free_symbols:
        return False
    ratio = sympy.simplify(right / left)
    is_factor = ratio.is_number and ratio.is_finite and ratio != 0
    return bool(is_factor and (isinstance(gold, Eq) or ratio.is_positive))


def _same_conjunction(gold: Basic, answer: Basic) -> bool:
    return _same_elements(gold.args, answer.args)


def _same_tuple(gold: Tuple, answer: Tuple) -> bool:
    return _same_in_order(gold.args, answer.args)


def _same_matrix(gold: MatrixBase, answer: MatrixBase) -> bool:
    return bool(gold.shape == answer.shape) and _same_in_order(gold.flat(), answer.flat())


_SAME: tuple[tuple[Any, Callable[[Any, Any], bool]], ...] = (
    ((And, LatexAnd), _same_conjunction),
    (Relational, _same_relation),
    (MatrixBase, _same_matrix),
    (Tuple, _same_tuple),
    (Set, _same_set),
    (Expr, same_expression),
)
