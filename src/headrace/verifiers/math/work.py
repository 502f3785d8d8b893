"""How much computing the balls of one judgement take, and the cap on it.

Owns: the cap is counted, not timed, so that an answer is over it on every machine or on none. A
policy can write an answer that would take minutes, such as sixty gamma functions over a quotient
that is never finite: it is wrong, and not a grading that ran out of time.
"""

from __future__ import annotations

import math

from headrace.verifiers.math.tree import Operation, Refused, Tree

MAX_WORK = 800_000
"""Of one judgement, in about microseconds of one core."""
_GAMMA = 0.25e-3
"""For the square of the bits. Measured with python-flint 0.9, of complex numbers, rounded up."""
_ELEMENTARY = 6e-4
"""For the bits to the power of 3/2: logarithms, powers, sines and the like."""
_ARITHMETIC = 0.01
"""For a bit."""
_GAMMAS = {"factorial": 1, "binomial": 3}
_CHEAP = frozenset(("add", "mul", "div", "neg", "abs", "sgn", "max", "min", "floor", "ceil"))


class Work:
    """What one judgement has left."""

    def __init__(self) -> None:
        self._left = float(MAX_WORK)

    def spend(self, bits: int, *trees: Tree) -> None:
        """Count one evaluation of each tree with so many bits. Raises Refused over the cap."""
        self._left -= sum(work_of(tree, bits) for tree in trees)
        if self._left < 0:
            msg = "more computing than a comparison may take"
            raise Refused(msg)


def work_of(tree: Tree, bits: int) -> float:
    """Return about how long one evaluation takes."""
    if not isinstance(tree, Operation):
        return _ARITHMETIC * bits
    below = sum(work_of(operand, bits) for operand in tree.operands)
    if tree.name in _GAMMAS:
        return below + _GAMMAS[tree.name] * _GAMMA * bits**2
    if tree.name in _CHEAP:
        return below + _ARITHMETIC * bits * len(tree.operands)
    return below + _ELEMENTARY * bits * math.sqrt(bits)
