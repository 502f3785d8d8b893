"""Math answers for a benchmark: each group has one expected answer and eight of a policy.

Every number differs from group to group, so that nothing that was read before helps; half of the
answers are right and half are not, and which is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class MathTask:
    """One expected answer and what a group of rollouts says."""

    gold: str
    answers: tuple[tuple[str, bool], ...]
    """LaTeX without dollars, and whether it is right."""


def number_tasks(count: int) -> list[MathTask]:
    """Return groups about whole numbers, decimals and fractions."""
    return [_whole(index) if index % 2 else _fraction(index) for index in range(count)]


def symbolic_tasks(count: int) -> list[MathTask]:
    """Return groups about roots, constants, polynomials, powers and trigonometry."""
    return [_SYMBOLIC[index % len(_SYMBOLIC)](index) for index in range(count)]


def _task(gold: str, right: Sequence[str], wrong: Sequence[str]) -> MathTask:
    answers = [(text, True) for text in right] + [(text, False) for text in wrong]
    return MathTask(gold=gold, answers=tuple(answers))


def _whole(index: int) -> MathTask:
    n = 1000 + 37 * index
    right = [str(n), f"{n:,}", f"{n}.0", rf"\frac{{{3 * n}}}{{3}}"]
    return _task(str(n), right, [str(n + 1), f"-{n}", f"{n}.5", rf"\frac{{{n}}}{{7}}"])


def _fraction(index: int) -> MathTask:
    value = Fraction(2 * index + 3, 64)
    top, low = value.numerator, value.denominator
    right = [f"{top}/{low}", rf"\frac{{{top}}}{{{low}}}", rf"\dfrac{{{2 * top}}}{{{2 * low}}}"]
    right.append(f"{float(value)}")
    wrong = [f"{low}/{top}", rf"\frac{{{top + 1}}}{{{low}}}", rf"-\frac{{{top}}}{{{low}}}"]
    return _task(rf"\frac{{{top}}}{{{low}}}", right, [*wrong, f"{float(value) + 0.001}"])


def _root(index: int) -> MathTask:
    n = index + 3
    right = [rf"\frac{{{n}}}{{\sqrt{{{n}}}}}", rf"{n}^{{1/2}}", rf"\frac{{\sqrt{{{4 * n}}}}}{{2}}"]
    wrong = [rf"\sqrt{{{n + 1}}}", rf"-\sqrt{{{n}}}", rf"\frac{{\sqrt{{{n}}}}}{{2}}", f"{n}"]
    return _task(rf"\sqrt{{{n}}}", [*right, rf"\sqrt{{{n}}}"], wrong)


def _constant(index: int) -> MathTask:
    n = index + 2
    right = [rf"\pi/{n}", rf"\frac{{1}}{{{n}}}\pi", rf"\frac{{2\pi}}{{{2 * n}}}"]
    wrong = [rf"\frac{{\pi}}{{{n + 1}}}", rf"{n}\pi", f"{3.14159265 / n:.8f}", r"\pi"]
    return _task(rf"\frac{{\pi}}{{{n}}}", [*right, rf"\frac{{\pi}}{{{n}}}"], wrong)


def _polynomial(index: int) -> MathTask:
    n = index + 2
    right = [rf"(x-{n})(x+{n})", rf"-{n * n}+x^2", rf"(x+{n})^2-{2 * n}(x+{n})", rf"x^2-{n * n}"]
    wrong = [rf"(x-{n})^2", rf"x^2+{n * n}", rf"(x-{n})(x+{n + 1})", rf"x^2-{n}"]
    return _task(rf"x^2-{n * n}", right, wrong)


def _power(index: int) -> MathTask:
    n = index + 2
    right = [rf"e^{{{n}x}}", rf"(e^x)^{{{n}}}", rf"e^x e^{{{n - 1}x}}", rf"\exp({n}x)"]
    wrong = [rf"e^{{{n + 1}x}}", rf"e^{{x^{{{n}}}}}", rf"{n}e^x", rf"e^{{{n}}}x"]
    return _task(rf"e^{{{n}x}}", right, wrong)


def _wave(index: int) -> MathTask:
    n = index + 1
    right = [rf"{2 * n}\sin x\cos x", rf"\sin(2x)\cdot {n}", rf"{n}\sin 2x"]
    wrong = [rf"{n}\sin x\cos x", rf"{n}\cos 2x", rf"-{n}\sin 2x", rf"{n + 1}\sin 2x"]
    return _task(rf"{n}\sin 2x", [*right, rf"2\cdot{n}\cos x\sin x"], wrong)


_SYMBOLIC: tuple[Callable[[int], MathTask], ...] = (_root, _constant, _polynomial, _power, _wave)
