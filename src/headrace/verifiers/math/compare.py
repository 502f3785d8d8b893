r"""Whether two readings say the same, by the type of answer that the task declares.

The shape of the expected answer decides where no type is declared. Owns: a list is as long as the
expected one, brackets are of the same kind, a label such as ``x =`` adds nothing and an equation
is not its right side. Whether two expressions are the same, `Decider` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from headrace.verifiers.math.deciding import Decider, Tolerance
from headrace.verifiers.math.integration import with_constant_of
from headrace.verifiers.math.kinds import (
    as_set,
    assigned,
    differ_in_style,
    element_items,
    entries_of,
    is_region,
    is_same_label,
    is_set,
    is_vector,
    may_be_region,
    places_of,
    rows_of,
    sides_of,
    type_problem,
)
from headrace.verifiers.math.reading import Item, Reading, as_text
from headrace.verifiers.math.regions import (
    Combined,
    Region,
    is_empty,
    region_of,
    same_region,
    variables_of,
)
from headrace.verifiers.math.spelling import folded
from headrace.verifiers.math.tree import (
    Braces,
    Bracketed,
    Constant,
    Matrix,
    NamedSet,
    Number,
    Operation,
    Relation,
    SetOperation,
    Tree,
    Unreadable,
    Value,
    Words,
    is_label,
    is_tree,
    symbols,
)
from headrace.verifiers.math.units import measure

if TYPE_CHECKING:
    from headrace.config import AnswerForm, AnswerType, UnitRule

_EXACT = Tolerance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a task declares about its answers."""

    answer_type: AnswerType = "auto"
    units: UnitRule = "same"
    form: AnswerForm = "any"
    tolerance: Tolerance = _EXACT

    def to_json(self) -> dict[str, str]:
        """Return what `from_json` reads again."""
        return {
            "answer_type": self.answer_type,
            "units": self.units,
            "form": self.form,
            "absolute": str(self.tolerance.absolute),
            "relative": str(self.tolerance.relative),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Rules:
        """Return the rules of a job."""
        tolerance = Tolerance(
            absolute=Fraction(fields["absolute"]), relative=Fraction(fields["relative"])
        )
        return cls(
            answer_type=fields["answer_type"],
            units=fields["units"],
            form=fields["form"],
            tolerance=tolerance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Whether an answer is right, and the rule that said so."""

    right: bool
    rule: str


class Comparison:
    """Compares readings by one set of rules, with one way to decide about expressions."""

    def __init__(self, rules: Rules, decide: Decider) -> None:
        self._rules = rules
        self._decide = decide

    def compare(self, gold: Reading, answer: Reading) -> Finding:
        """Return whether ``answer`` says what ``gold`` says. Raises NeedsAlgebra."""
        problem = type_problem(answer, self._rules.answer_type)
        if problem is not None:
            return Finding(right=False, rule=problem)
        try:
            return self._compared(gold, answer)
        except Unreadable as reason:
            return Finding(right=False, rule=f"cannot be compared: {reason}")

    def _compared(self, gold: Reading, answer: Reading) -> Finding:
        match self._rules.answer_type:
            case "interval":
                return self._regions(gold, answer)
            case "set":
                return self._elements(gold, answer)
            case "tuple":
                return self._in_order(places_of(gold), places_of(answer))
            case _:
                return self._by_shape(gold, answer)

    def _by_shape(self, gold: Reading, answer: Reading) -> Finding:
        if (finding := self._by_names(gold, answer)) is not None:
            return finding
        one, other = gold.only, answer.only
        if one is None or (isinstance(one.value, Braces) and not is_set(other)):
            if is_region(gold) or (one is not None and is_region(answer)):
                return self._regions(gold, answer)
            return self._elements(gold, answer)
        if other is None:
            return self._several(gold, one, answer)
        if isinstance(one.value, Words) != isinstance(other.value, Words):
            return Finding(right=_same_text(gold, answer), rule="words are compared as text")
        right = self._same_item(one, other)
        return Finding(right=right, rule=_RULES.get(type(one.value), "same expression"))

    def _several(self, gold: Reading, one: Item, answer: Reading) -> Finding:
        """Compare one expected value with several: a set in parts, or its forms."""
        if is_region(gold) and is_region(answer):
            return self._regions(gold, answer)
        if answer.joined == "or" and all(self._same_item(one, item) for item in answer.items):
            return Finding(right=True, rule="the same value in several forms")
        return Finding(right=False, rule=f"{len(answer.items)} values for one")

    def _by_names(self, gold: Reading, answer: Reading) -> Finding | None:
        """Compare ``x = 1, y = 2`` by names, or in order with what has none.

        The order of names is that of the expected answer; without one there, the alphabet's.
        """
        ours, theirs = assigned(gold), assigned(answer)
        if ours is not None and theirs is not None:
            right = ours.keys() == theirs.keys() and all(
                self._same(value, theirs[name]) for name, value in ours.items()
            )
            return Finding(right=right, rule="the same value for each name")
        if ours is not None:
            places = [item.value for item in places_of(answer)]
            right = not any(isinstance(place, Relation) for place in places)
            right = right and self._each(list(ours.values()), places)
        elif theirs is not None and is_vector(gold.only):
            places = [item.value for item in places_of(gold)]
            right = self._each(places, [theirs[name] for name in sorted(theirs)])
        else:
            return None
        return Finding(right=right, rule="the same values in the order of their names")

    def _same_item(self, gold: Item, answer: Item) -> bool:
        """Return whether value and unit are the same; an expected value without unit allows any."""
        rule = self._rules.units
        if gold.unit.startswith("base_"):
            return answer.unit in {"", gold.unit} and self._same(gold.value, answer.value)
        is_free = rule == "ignore" or gold.unit == answer.unit or not (gold.unit and answer.unit)
        if is_free and self._same(gold.value, answer.value):
            return True
        return rule == "convert" and self._same_converted(gold, answer)

    def _same_converted(self, gold: Item, answer: Item) -> bool:
        one, other = measure(gold.unit), measure(answer.unit)
        if one.dimensions != other.dimensions:
            return False
        return self._same(_scaled(gold), _scaled(answer))

    def _same(self, gold: Value, answer: Value) -> bool:
        """Return whether two values are the same, whatever their shapes."""
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._same_relation(gold, answer)
        gold, answer = self._without_label(gold), self._without_label(answer)
        if is_tree(gold) and (sides := sides_of(answer)):
            # Of "x^2 - 1 = (x - 1)(x + 1)" every side has to be right.
            return all(self._decide.same(gold, with_constant_of(gold, side)) for side in sides)
        if may_be_region(gold) and may_be_region(answer) and type(gold) is not type(answer):
            return self._same_regions([gold], "", [answer], "")
        return self._same_shape(gold, answer)

    def _same_shape(self, gold: Value, answer: Value) -> bool:
        match gold, answer:
            case Bracketed(left, ours, right), Bracketed(other_left, theirs, other_right):
                same_kind = (left, right) == (other_left, other_right)
                return (same_kind or differ_in_style(gold, answer)) and self._each(ours, theirs)
            case Braces(ours), Braces(theirs):
                return self._partners(ours, theirs)
            case Matrix(rows), _ if (others_rows := rows_of(answer)) is not None:
                same_shape = [len(row) for row in rows] == [len(row) for row in others_rows]
                return same_shape and all(map(self._each, rows, others_rows))
            case (Matrix(), Bracketed("(" | "<")) | (Bracketed("(" | "<"), Matrix()):
                entries, others = entries_of(gold), entries_of(answer)
                are_vectors = entries is not None and others is not None
                return are_vectors and self._each(entries or (), others or ())
            case SetOperation(), SetOperation():
                return gold == answer or self._same_regions([gold], "", [answer], "")
            case _:
                return gold == answer

    def _each(self, gold: Sequence[Value], answer: Sequence[Value]) -> bool:
        return len(gold) == len(answer) and all(map(self._same, gold, answer))

    def _partners(self, gold: Sequence[Value], answer: Sequence[Value]) -> bool:
        """Return whether every element has a partner of its own, in any order."""
        items = [Item(value=value) for value in answer]
        return self._item_partners([Item(value=value) for value in gold], items)

    def _item_partners(self, gold: Sequence[Item], answer: Sequence[Item]) -> bool:
        if len(gold) != len(answer):
            return False
        left = list(answer)
        for element in gold:
            partner = next((other for other in left if self._same_item(element, other)), None)
            if partner is None:
                return False
            left.remove(partner)
        return True

    def _elements(self, gold: Reading, answer: Reading) -> Finding:
        ours, theirs = element_items(gold), element_items(answer)
        if len(ours) != len(theirs):
            return Finding(right=False, rule=f"{len(theirs)} values for {len(ours)}")
        right = self._item_partners(ours, theirs)
        return Finding(right=right, rule="the same elements in any order")

    def _in_order(self, gold: Sequence[Item], answer: Sequence[Item]) -> Finding:
        right = len(gold) == len(answer) and all(map(self._same_item, gold, answer))
        return Finding(right=right, rule="the same elements in order")

    def _regions(self, gold: Reading, answer: Reading) -> Finding:
        ours, theirs = ([item.value for item in reading.items] for reading in (gold, answer))
        right = ours == theirs or self._same_regions(ours, gold.joined, theirs, answer.joined)
        return Finding(right=right, rule="the same set of real numbers")

    def _same_regions(
        self, gold: Sequence[Value], joined: str, answer: Sequence[Value], other_joined: str
    ) -> bool:
        ours = frozenset().union(*map(variables_of, gold))
        theirs = frozenset().union(*map(variables_of, answer))
        if ours and theirs and ours != theirs:
            return False
        left, right = self._region(gold, joined), self._region(answer, other_joined)
        return same_region(left, right, self._decide)

    def _region(self, values: Sequence[Value], joined: str) -> Region:
        """Return one set of several: conditions hold together, unless "or" stands between them."""
        regions = [region_of(as_set(value)) for value in values]
        are_conditions = all(isinstance(value, Relation) for value in values)
        together = _combined("intersection", regions)
        if joined == "and" and are_conditions:
            return together
        if joined == "," and are_conditions and not is_empty(together, self._decide):
            return together
        return _combined("union", regions)

    def _without_label(self, value: Value) -> Value:
        """Return the right side of ``x = 5`` and of ``2 + 3 = 5`` whose sides really agree.

        An equation such as ``2x + 1 = 0`` stays one: its right side is not its value.
        """
        if not isinstance(value, Relation):
            return value
        if value.signs == ("in",) and is_label(value.sides[0]):
            return value.sides[1]
        if set(value.signs) != {"="}:
            return value
        sides = value.sides[1:] if is_label(value.sides[0]) else value.sides
        if len(sides) == 1:
            return sides[0]
        constants = all(is_tree(side) and not symbols(side) for side in sides)
        is_chain = is_label(value.sides[0]) or constants
        agree = is_chain and all(self._same(sides[0], side) for side in sides[1:])
        return sides[-1] if agree else value

    def _same_relation(self, gold: Relation, answer: Relation) -> bool:
        """Return whether two relations hold for the same values, or give one name one value.

        ``y = 2x + 1`` is ``y - 2x - 1 = 0``; ``f(x) = 2x`` is ``y = 2x``;
        ``y = 5`` is not ``x = 5``.
        """
        value, other = self._without_label(gold), self._without_label(answer)
        if value is not gold and other is not answer and is_same_label(gold, answer):
            return self._same(value, other)
        if may_be_region(gold) and may_be_region(answer):
            if self._holds_alike(gold, answer):
                return True
            return gold.signs != ("=",) and self._same_regions([gold], "", [answer], "")
        return self._holds_alike(gold, answer)

    def _holds_alike(self, gold: Relation, answer: Relation) -> bool:
        """Compare ``a < b`` with ``c > d`` as ``0 < b - a`` with a positive multiple of it."""
        if len(gold.signs) != 1 or len(answer.signs) != 1:
            return len(gold.sides) == len(answer.sides) and (
                gold.signs == answer.signs and self._each(gold.sides, answer.sides)
            )
        one, other = _difference(gold), _difference(answer)
        if one is None or other is None or one[0] != other[0]:
            return False
        sign = self._decide.ratio_sign(one[1], other[1])
        return sign > 0 or (sign < 0 and one[0] in {"=", "!="})


def _difference(relation: Relation) -> tuple[str, Tree] | None:
    """Return ``<``, ``<=``, ``=`` or ``!=`` and the expression that it puts below 0, or at it."""
    left, right = relation.sides
    if not is_tree(left) or not is_tree(right):
        return None
    sign = relation.signs[0]
    if sign in {">", ">="}:
        left, right, sign = right, left, {">": "<", ">=": "<="}[sign]
    minus = Operation("neg", (right,))
    return sign, Operation("add", (left, minus))


def _combined(name: str, regions: Sequence[Region]) -> Region:
    whole = regions[0]
    for region in regions[1:]:
        whole = Combined(name=name, left=whole, right=region)
    return whole


def _scaled(item: Item) -> Value:
    """Return a value in base units; what is no expression has none, and stays."""
    if not is_tree(item.value):
        return item.value
    one = measure(item.unit)
    parts: list[Tree] = [item.value]
    if one.factor != Fraction(1):
        parts.append(Number(one.factor))
    if one.has_pi:
        parts.append(Constant("pi"))
    return parts[0] if len(parts) == 1 else Operation("mul", tuple(parts))


def _same_text(gold: Reading, answer: Reading) -> bool:
    """Compare words with what was read as a product of letters, or as their choice."""
    texts = ["".join(folded(reading.text).split()) for reading in (gold, answer)]
    words = next(
        item.value.text
        for reading in (gold, answer)
        for item in reading.items
        if isinstance(item.value, Words)
    )
    return len(words) > 1 and texts[0] == texts[1]


_RULES: dict[type, str] = {
    Words: "words are compared as text",
    Matrix: "the same entries",
    Bracketed: "the same entries in order, or the same set",
    Braces: "the same elements in any order",
    Relation: "the same relation, or the same right side",
    SetOperation: "the same set of real numbers",
    NamedSet: "the same set of numbers",
}


def shown(reading: Reading) -> str:
    """Return a reading as text; for people."""
    parts = [
        as_text(item.value) + (f" [{item.unit}]" if item.unit else "") for item in reading.items
    ]
    return f" {reading.joined} ".join(parts) if len(parts) > 1 else parts[0]
