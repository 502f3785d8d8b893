"""Whether two expressions are the same, as far as rational arithmetic can tell.

`ExactDecider` runs anywhere and answers at once, or raises `NeedsAlgebra`; `algebra.BallDecider`,
which takes over then, runs in a grading process alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from headrace.verifiers.math.exact import value_of
from headrace.verifiers.math.tree import Number, Symbol, Tree, infinite_sign


class NeedsAlgebra(Exception):
    """Rational arithmetic cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far numbers may differ; the larger of the two counts. Zero is exact."""

    absolute: Fraction = Fraction(0)
    relative: Fraction = Fraction(0)
    """As a share of the expected number."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is allowed."""
        return not self.absolute and not self.relative

    def allowed(self, gold: Fraction) -> Fraction:
        """Return the largest difference from ``gold`` that counts as none."""
        return max(self.absolute, self.relative * abs(gold))


class Decider(Protocol):
    """Tells whether expressions are the same."""

    def same(self, gold: Tree, answer: Tree) -> bool:
        """Return whether two expressions have the same value, for all values of variables."""
        ...

    def order(self, left: Tree, right: Tree) -> int:
        """Return -1, 0 or 1 as one constant is below, equal to or above another.

        Raises Unreadable where they have no order.
        """
        ...

    def ratio_sign(self, gold: Tree, answer: Tree) -> int:
        """Return the sign of c where ``answer`` is c times ``gold``, c constant; 0 without one."""
        ...


class ExactDecider:
    """Decides what needs no more than fractions; raises NeedsAlgebra for the rest."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance

    def same(self, gold: Tree, answer: Tree) -> bool:
        """Return whether two expressions are the same."""
        if gold == answer:
            return True
        if infinite_sign(gold) or infinite_sign(answer):
            return infinite_sign(gold) == infinite_sign(answer)
        left, right = value_of(gold), value_of(answer)
        if left is not None and right is not None:
            return abs(left - right) <= self.tolerance.allowed(left)
        if isinstance(gold, Symbol | Number) and isinstance(answer, Symbol | Number):
            return False
        return self.same_by_algebra(gold, answer)

    def order(self, left: Tree, right: Tree) -> int:
        """Return the order of two constants."""
        if left == right:
            return 0
        below, above = infinite_sign(left), infinite_sign(right)
        if below or above:
            return (below > above) - (below < above)
        first, second = value_of(left), value_of(right)
        if first is not None and second is not None:
            return (first > second) - (first < second)
        return self.order_by_algebra(left, right)

    def ratio_sign(self, gold: Tree, answer: Tree) -> int:
        """Return the sign of the constant ratio, or 0."""
        return 1 if gold == answer else self.ratio_by_algebra(gold, answer)

    def same_by_algebra(self, gold: Tree, answer: Tree) -> bool:  # noqa: ARG002 - what takes over needs them
        """Decide what fractions cannot."""
        raise NeedsAlgebra

    def order_by_algebra(self, left: Tree, right: Tree) -> int:  # noqa: ARG002 - what takes over needs them
        """Decide what fractions cannot."""
        raise NeedsAlgebra

    def ratio_by_algebra(self, gold: Tree, answer: Tree) -> int:  # noqa: ARG002 - what takes over needs them
        """Decide what fractions cannot."""
        raise NeedsAlgebra
