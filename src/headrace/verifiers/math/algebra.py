"""Whether two expressions are the same, by their values at many points in balls of high precision.

Runs in a grading process. That two expressions differ is certain: their balls do not meet. That two
numbers made of roots are the same is proven (`separation`). Else it is evidence: the balls of both
meet at every point, in balls so small that two different expressions of this length and with
numbers of this size would hardly meet (`_height`). The points are drawn from both texts, so that no
answer can be made that is right only there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

from headrace.verifiers.math.balls import (
    Ball,
    ball_of_fraction,
    evaluate,
    is_real_ball,
    precision,
)
from headrace.verifiers.math.deciding import ExactDecider, Tolerance
from headrace.verifiers.math.exact import MAX_EXPONENT, bits, value_of
from headrace.verifiers.math.separation import separation_bits
from headrace.verifiers.math.tree import (
    Constant,
    Number,
    Operation,
    Tree,
    Unreadable,
    has_constant,
    symbols,
    unreadable,
)
from headrace.verifiers.math.work import Work

_FIRST_BITS = 192
_LEAST_BITS = 256
_MOST_BITS = 40_000
_MAX_POINTS = 32
_ENOUGH_POINTS = 8
_SCALES = (3, 1, 12, 150)
_MOST_WHOLE = 60
_LEAST_POINTS = 2
_SMALL = Fraction(1, 2**64)
"""Balls that meet are evidence when they are smaller than this share of the value."""
_EXTREME_BITS = 4096
_SYMBOL_HEIGHT = 48
_FUNCTION_HEIGHT = 16


class BallDecider(ExactDecider):
    """Decides everything: by fractions where they do, else by balls. One serves one judgement."""

    def __init__(self, tolerance: Tolerance) -> None:
        super().__init__(tolerance)
        self._work = Work()

    def same_by_algebra(self, gold: Tree, answer: Tree) -> bool:
        """Return whether two expressions are the same."""
        names = sorted(symbols(gold) | symbols(answer))
        is_real = not (has_constant(gold, "i") or has_constant(answer, "i"))
        if not names:
            return self._same_constant(gold, answer, is_real=is_real)
        most = _enough_bits(gold, answer)
        return all(
            _may_agree(
                gold, answer, names, self._work, bits=bits, is_real=is_real, is_last=bits == most
            )
            for bits in (_FIRST_BITS, most)
        )

    def _same_constant(self, gold: Tree, answer: Tree, *, is_real: bool) -> bool:
        difference = Operation("add", (gold, Operation("neg", (answer,))))
        proof = separation_bits(difference) if is_real else None
        if proof is not None and proof > _MOST_BITS:
            proof = None
        enough = max(_enough_bits(gold, answer), 2 * (proof or 0))
        for working in (_FIRST_BITS, enough, min(4 * enough, 4 * _MOST_BITS)):
            self._work.spend(working, gold, answer)
            with precision(working):
                left = evaluate(gold, {}, is_real=is_real)
                right = evaluate(answer, {}, is_real=is_real)
                if not left.is_finite() or not right.is_finite():
                    continue
                verdict = self._close(left, right)
                if verdict is not None:
                    return verdict
                if _is_zero(left - right, proof) or (
                    proof is None and working >= enough and _is_evidence(left, right)
                ):
                    return True
        return False

    def _close(self, gold: Ball, answer: Ball) -> bool | None:
        """Return whether two constants count as one, or None where the balls leave it open."""
        difference = gold - answer
        if self.tolerance.is_exact:
            return None if difference.contains(0) else False
        allowed = ball_of_fraction(self.tolerance.absolute).real
        relative = ball_of_fraction(self.tolerance.relative).real * abs(gold)
        allowed, distance = allowed.max(relative), abs(difference)
        return True if distance < allowed else False if distance > allowed else None

    def order_by_algebra(self, left: Tree, right: Tree) -> int:
        """Return the order of two real constants. Raises Unreadable for what has none."""
        if symbols(left) or symbols(right):
            unreadable("a bound that is no number")
        enough = _enough_bits(left, right)
        for working in (_FIRST_BITS, enough):
            self._work.spend(working, left, right)
            with precision(working):
                first, second = evaluate(left, {}, is_real=True), evaluate(right, {}, is_real=True)
                if not is_real_ball(first) or not is_real_ball(second):
                    continue
                if first.real < second.real or first.real > second.real:
                    return -1 if first.real < second.real else 1
                if working == enough and _is_evidence(first, second):
                    return 0
        msg = "bounds that cannot be put in order"
        raise Unreadable(msg)

    def ratio_by_algebra(self, gold: Tree, answer: Tree) -> int:
        """Return the sign of the constant ratio of two expressions, or 0 without one."""
        names = symbols(gold)
        if names != symbols(answer) or not names:
            return 0
        return _ratio_sign(gold, answer, sorted(names), self._work)


def has_value(tree: Tree, work: Work) -> bool:
    """Whether an expression is a finite number, an infinity, or has variables.

    Raises Refused for one that leaves no work for an answer.
    """
    enough = _enough_bits(tree, tree)
    for _ in range(2 * _ENOUGH_POINTS):
        work.spend(enough, tree)
    if symbols(tree) or has_constant(tree, "infinity"):
        return True
    with precision(enough):
        return bool(evaluate(tree, {}, is_real=not has_constant(tree, "i")).is_finite())


def _may_agree(
    gold: Tree,
    answer: Tree,
    names: Sequence[str],
    work: Work,
    *,
    bits: int,
    is_real: bool,
    is_last: bool,
) -> bool:
    r"""Return False where two expressions differ at a point, or agree at too few of them.

    Real expressions are compared where both are real: ``\sqrt{1/n}`` is ``1/\sqrt{n}``. Where
    there is hardly such a point, the complex values decide.
    """
    with precision(bits):
        common, elsewhere = 0, 0
        for point in _points(gold, answer, names):
            work.spend(bits, gold, answer)
            left = evaluate(gold, point, is_real=is_real)
            right = evaluate(answer, point, is_real=is_real)
            match _seen(left, right, is_real=is_real, is_last=is_last):
                case "different":
                    return False
                case "same":
                    common += 1
                case "same complex":
                    elsewhere += 1
            if common == _ENOUGH_POINTS:
                return True
        return common >= _LEAST_POINTS or (common == 0 and elsewhere >= _ENOUGH_POINTS)


def _seen(
    left: Ball, right: Ball, *, is_real: bool, is_last: bool
) -> Literal["same", "same complex", "different", "nothing"]:
    """Return what the values at one point say; only the last look needs small balls."""
    if not left.is_finite() or not right.is_finite():
        matters = is_last and _one_matters(left, right, is_real=is_real)
        return "different" if matters else "nothing"
    agree = _is_evidence(left, right) if is_last else bool((left - right).contains(0))
    if not is_real or (is_real_ball(left) and is_real_ball(right)):
        return "same" if agree else "different"
    if is_real_ball(left) != is_real_ball(right):
        return "different"
    return "same complex" if agree else "nothing"


def _one_matters(left: Ball, right: Ball, *, is_real: bool) -> bool:
    """Whether one has a value where the other has none, and where only reals count, a real one."""
    if left.is_finite() == right.is_finite():
        return False
    finite = left if left.is_finite() else right
    return (not is_real or is_real_ball(finite)) and not _is_extreme(finite)


def _is_extreme(value: Ball) -> bool:
    r"""Whether a value is so far from 1 that another way to write it may meet the cap on exponents.

    ``e^{80x}`` has no value where its exponent is over the cap, and ``(e^x)^{80}`` has one there.
    """
    size = abs(value)
    far = ball_of_fraction(Fraction(2**_EXTREME_BITS)).real
    return bool(size > far or (size > 0 and size * far < 1))


def _is_zero(difference: Ball, proof: int | None) -> bool:
    """Whether a difference is smaller than it could be without being 0, which proves it 0."""
    if proof is None:
        return False
    return bool(abs(difference) < ball_of_fraction(Fraction(1, 2**proof)).real)


def _is_evidence(left: Ball, right: Ball) -> bool:
    """Whether balls that meet are small enough to be taken for the same number."""
    difference = left - right
    if not difference.contains(0):
        return False
    width = abs(difference).upper()
    size = abs(left).lower()
    if size > 0:
        return bool(width < size * ball_of_fraction(_SMALL).real)
    return bool(width < ball_of_fraction(_SMALL).real ** 2)


def _ratio_sign(gold: Tree, answer: Tree, names: Sequence[str], work: Work) -> int:
    ratios: list[Ball] = []
    enough = _enough_bits(gold, answer)
    with precision(enough):
        for point in _points(gold, answer, names):
            work.spend(enough, gold, answer)
            left, right = evaluate(gold, point, is_real=True), evaluate(answer, point, is_real=True)
            if not is_real_ball(left) or not is_real_ball(right) or left.contains(0):
                continue
            ratios.append(right / left)
            if not _is_evidence(ratios[0], ratios[-1]):
                return 0
            if len(ratios) == _ENOUGH_POINTS:
                break
        if len(ratios) < _LEAST_POINTS or ratios[0].contains(0):
            return 0
        return 1 if ratios[0].real > 0 else -1


def _points(gold: Tree, answer: Tree, names: Sequence[str]) -> Iterator[Mapping[str, Ball]]:
    """Yield values for the variables: no round numbers, both signs, small and large."""
    salt = hashlib.blake2b(repr((gold, answer)).encode(), digest_size=16).digest()
    whole = _signs_depend_on(gold) | _signs_depend_on(answer)
    for index in range(_MAX_POINTS):
        yield {
            name: ball_of_fraction(_coordinate(salt, name, index, place, is_whole=name in whole))
            for place, name in enumerate(names)
        }


def _signs_depend_on(tree: Tree) -> frozenset[str]:
    """Return the variables in exponents of negative numbers: in (-1)^n, n is a whole number."""
    if not isinstance(tree, Operation):
        return frozenset()
    found = frozenset[str]().union(*map(_signs_depend_on, tree.operands))
    if tree.name != "pow":
        return found
    base = value_of(tree.operands[0])
    return found | symbols(tree.operands[1]) if base is not None and base < 0 else found


def _coordinate(salt: bytes, name: str, index: int, place: int, *, is_whole: bool) -> Fraction:
    """Return a number: of four points in a row, two have it positive, and two variables differ."""
    digest = hashlib.blake2b(f"{index}/{name}".encode(), key=salt, digest_size=8).digest()
    if is_whole:
        return Fraction(digest[0] % _MOST_WHOLE + 1)
    share = Fraction(int.from_bytes(digest[:5], "big") | 1, 2**40)
    signs = (1, -1, (-1) ** place, -((-1) ** place))
    return share * signs[index % 4] * _SCALES[index // 2 % 4]


def _enough_bits(gold: Tree, answer: Tree) -> int:
    return min(_LEAST_BITS + 2 * (_height(gold) + _height(answer)), _MOST_BITS)


def _height(tree: Tree) -> int:
    """Return about how many bits it takes to tell an expression from others of its length."""
    match tree:
        case Number(value):
            return bits(value)
        case Constant():
            return 2
        case Operation("pow", (base, exponent)):
            size = _size(exponent)
            return min(_height(base) * size + _height(exponent), _MOST_BITS)
        case Operation("factorial", (number,)):
            known = value_of(tree)
            return _FUNCTION_HEIGHT + _height(number) if known is None else bits(known)
        case Operation(_, operands):
            return _FUNCTION_HEIGHT + sum(map(_height, operands))
        case _:
            return _SYMBOL_HEIGHT


def _size(exponent: Tree) -> int:
    """Return a bound on the absolute value of an exponent; of one with variables, a guess."""
    power = value_of(exponent)
    if power is not None:
        return int(abs(power)) + 1
    if symbols(exponent):
        return _FUNCTION_HEIGHT
    with precision(_FIRST_BITS):
        ball = abs(evaluate(exponent, {}, is_real=True))
        return int(float(ball.upper())) + 1 if ball < MAX_EXPONENT else 1
