"""The constant of an indefinite integral: any letter will do, ``+ c`` for ``+ C``."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.verifiers.math.tree import Operation, Symbol, Tree, symbols

_OTHER_NAMES = {
    "C": frozenset(("C", "c", "K", "k", "C_1", "c_1", "C_0", "c_0")),
    "K": frozenset(("K", "k")),
}
"""What an expected constant may be called; a small letter may be a parameter of the task."""
_VARIABLES = frozenset(("x", "y", "z", "t", "u", "v", "r", "s", "theta"))
"""Of which integrals are taken."""


def with_constant_of(gold: Tree, answer: Tree) -> Tree:
    """Return ``answer`` with the name that the expected answer gives to its constant.

    Only where either has one: a lone term of a sum, of a name that stands nowhere else in it and
    that the other does not use.
    """
    ours = _constant(gold, frozenset(_OTHER_NAMES))
    theirs = _constant(answer, _OTHER_NAMES.get(ours or "", frozenset()))
    if ours is None or theirs is None or ours == theirs:
        return answer
    if ours in symbols(answer) or theirs in symbols(gold):
        return answer
    return _renamed(answer, {theirs: ours})


def _constant(tree: Tree, allowed: frozenset[str]) -> str | None:
    """Return the name of the one term that may be a constant of integration."""
    if not (isinstance(tree, Operation) and tree.name == "add"):
        return None
    names = [term.name for term in tree.operands if isinstance(term, Symbol)]
    found = [name for name in names if name in allowed]
    rest = [term for term in tree.operands if term != Symbol(found[0])] if len(found) == 1 else []
    varies = any(symbols(term) & _VARIABLES for term in rest)
    is_alone = varies and not any(found[0] in symbols(term) for term in rest)
    return found[0] if is_alone else None


def _renamed(tree: Tree, names: Mapping[str, str]) -> Tree:
    match tree:
        case Symbol(name):
            return Symbol(names.get(name, name))
        case Operation(name, operands):
            return Operation(name, tuple(_renamed(operand, names) for operand in operands))
        case _:
            return tree
