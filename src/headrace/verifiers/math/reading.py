r"""An answer as it is read: its values, their units, and what joins them.

The same reading serves expected answers and completions, here and in the grading processes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.verifiers.math import spelling
from headrace.verifiers.math.exact import value_of
from headrace.verifiers.math.measuring import split_unit
from headrace.verifiers.math.parser import parse
from headrace.verifiers.math.rewriting import rewritten
from headrace.verifiers.math.tree import (
    EMPTY_SET,
    Braces,
    Bracketed,
    Matrix,
    NamedSet,
    Number,
    Operation,
    Refused,
    Relation,
    SetOperation,
    Tree,
    Value,
    Words,
    both_signs,
    is_tree,
    unreadable,
    without_approximation,
)
from headrace.verifiers.numbers import parse_number

if TYPE_CHECKING:
    from headrace.config import AnswerType

MAX_CHARS = 1_000
MAX_DEPTH = 20
"""Of brackets."""
MAX_VALUES = 64
"""Of a list, or the entries of a matrix."""
_COMMAS_SEPARATE: frozenset[str] = frozenset(("set", "tuple", "interval"))
"""Types in whose answers a comma never groups the digits of a number."""

_ALL_REALS = re.compile(r"(?:all|any|every) (?:real numbers?|reals?)|(?:the )?real numbers")
_NOTHING = re.compile(
    r"(?:there (?:is|are|exists?) )?no (?:such )?(?:real )?(?:solutions?|roots?|values?|numbers?)"
    r"(?: exists?)?|(?:the )?empty set|none"
)
_ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBERS: dict[str, int] = {
    **{word: number for number, word in enumerate(("zero", *_ONES, *_TEENS))},
    **{word: 10 * number for number, word in enumerate(_TENS, 2)},
    **{
        f"{tens}-{ones}": 10 * number + one
        for number, tens in enumerate(_TENS, 2)
        for one, ones in enumerate(_ONES, 1)
    },
    "one hundred": 100,
}
"""How numbers are written as words where people write them so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One value and its unit."""

    value: Value
    unit: str = ""
    """Canonical name; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an answer says."""

    text: str
    """Without markup."""
    unified: str = ""
    """With one spelling for each sign; "" for words and plain numbers."""
    items: tuple[Item, ...]
    """More than one for a list without brackets, and for plus-or-minus."""
    joined: str = ""
    """``,``, ``or``, ``and``, ``pm``; "" for a single value."""

    @property
    def only(self) -> Item | None:
        """The value of an answer that has just one."""
        return self.items[0] if len(self.items) == 1 else None


@lru_cache(maxsize=2048)
def read(text: str, answer_type: AnswerType, *, has_unit: bool = False) -> Reading:
    """Return what ``text`` says.

    ``has_unit``: the expected answer has a unit, so that the ``m`` of ``5m`` is one, too.
    Raises Unreadable, or Refused where it is over a cap. What was read has no part that is.
    """
    _refuse_large(text)
    spelling.refuse_dots(text)
    plain = spelling.unwrap(rewritten(text)).strip()
    if not plain:
        unreadable("an empty answer")
    if answer_type == "text":
        return _single(plain, Words(spelling.folded(plain)))
    if answer_type == "choice":
        letter = spelling.choice_of(plain)
        if letter is None:
            unreadable("no letter of a choice, or more than one")
        return _single(plain, Words(letter, is_choice=True))
    if "," not in plain or answer_type not in _COMMAS_SEPARATE:
        # Most answers are a plain number: read in a tenth of the time.
        number = parse_number(plain)
        if number is not None:
            is_decimal = any(char in ".eE" for char in plain)
            return _single(plain, Number(number, is_decimal))
    if (words := spelling.words_of(plain)) is not None:
        return _single(plain, _in_words(words))
    if (ratio := spelling.ratio_of(plain)) is not None:
        value, half_of_day = ratio
        return Reading(text=plain, items=(Item(value=Words(value), unit=half_of_day),))
    return _values(plain, grouped=answer_type not in _COMMAS_SEPARATE, has_unit=has_unit)


def _in_words(words: str) -> Value:
    """Return the number or the set that words name, or the words."""
    if (number := _NUMBERS.get(words)) is not None:
        return Number(Fraction(number))
    if _ALL_REALS.fullmatch(words):
        return NamedSet("R")
    return EMPTY_SET if _NOTHING.fullmatch(words) else Words(words)


def _refuse_large(text: str) -> None:
    if len(text) > MAX_CHARS:
        msg = f"{len(text)} characters; at most {MAX_CHARS} are read"
        raise Refused(msg)
    depth = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        if depth > MAX_DEPTH:
            msg = f"brackets deeper than {MAX_DEPTH}"
            raise Refused(msg)


def _single(text: str, value: Value) -> Reading:
    return Reading(text=text, items=(Item(value=value),))


def _values(plain: str, *, grouped: bool, has_unit: bool) -> Reading:
    unified = spelling.unified(plain)
    # Compatibility signs are longer than what they stand for.
    _refuse_large(unified)
    parts, joined = spelling.split_values(unified, grouped=grouped)
    if len(parts) > MAX_VALUES:
        msg = f"a list of {len(parts)}; at most {MAX_VALUES} are read"
        raise Refused(msg)
    items = [item for part in parts for item in _items(part, has_unit=has_unit)]
    joined = joined or ("pm" if len(items) > 1 else "")
    return Reading(text=plain, unified=unified, items=tuple(items), joined=joined)


def _items(part: str, *, has_unit: bool) -> list[Item]:
    if words := spelling.words_of(part):
        return [Item(value=_in_words(words))]
    measured = split_unit(part, glued=has_unit)
    value = without_approximation(parse(measured.text))
    _refuse_costly(value)
    return [Item(value=one, unit=measured.unit) for one in _with_both_signs(value)]


def _with_both_signs(value: Value) -> list[Value]:
    """Return both values of one with plus-or-minus, on its own or behind ``x =``."""
    if isinstance(value, Relation) and value.signs[-1] == "=" and is_tree(value.sides[-1]):
        lasts = both_signs(value.sides[-1])
        return [Relation((*value.sides[:-1], last), value.signs) for last in lasts]
    if isinstance(value, Braces):
        return [Braces(tuple(one for item in value.items for one in _with_both_signs(item)))]
    return list(both_signs(value)) if is_tree(value) else [value]


def _refuse_costly(value: Value) -> None:
    """Raise where some expression in ``value`` is over a cap, or has no value at all."""
    for tree in trees(value):
        value_of(tree)


def trees(value: Value) -> list[Tree]:
    """Return every expression in ``value``."""
    if is_tree(value):
        return [value]
    return [tree for part in parts_of(value) for tree in trees(part)]


def parts_of(value: Value) -> tuple[Value, ...]:
    """Return the values that a shape holds; none for an expression and for words."""
    match value:
        case Bracketed(_, items, _) | Braces(items):
            return items
        case SetOperation(_, left, right):
            return (left, right)
        case Matrix(rows):
            return tuple(entry for row in rows for entry in row)
        case Relation(sides, _):
            return sides
        case _:
            return ()


def has_decimal(tree: Tree) -> bool:
    """Whether some number in an expression is written with a point."""
    match tree:
        case Number(_, is_decimal):
            return is_decimal
        case Operation(_, operands):
            return any(map(has_decimal, operands))
        case _:
            return False


def as_text(value: Value) -> str:  # noqa: PLR0911 - one for each shape
    """Return what was read, in brackets that leave no doubt; for people."""
    match value:
        case Number(number):
            return _number_text(number)
        case Operation(name, operands):
            return f"{name}({', '.join(map(as_text, operands))})"
        case Bracketed(left, items, right):
            return f"{left}{', '.join(map(as_text, items))}{right}"
        case Braces(items):
            return f"{{{', '.join(map(as_text, items))}}}"
        case SetOperation(name, left, right):
            return f"{name}({as_text(left)}, {as_text(right)})"
        case Matrix(rows):
            return f"matrix[{'; '.join(', '.join(map(as_text, row)) for row in rows)}]"
        case Relation(sides, signs):
            rest = zip(signs, sides[1:], strict=True)
            return " ".join([as_text(sides[0]), *(f"{s} {as_text(v)}" for s, v in rest)])
        case Words(text, is_choice):
            return f"choice {text}" if is_choice else f"words {text!r}"
        case _:
            return value.name


_MAX_SHOWN_DIGITS = 40


def _number_text(number: Fraction) -> str:
    digits = max(number.numerator.bit_length(), number.denominator.bit_length()) * 0.302
    return str(number) if digits < _MAX_SHOWN_DIGITS else f"a number of {digits:.0f} digits"
