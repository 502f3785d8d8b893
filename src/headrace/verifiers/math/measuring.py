"""A value's unit told from the value: in words, symbols, quotients, marks, money and bases.

String work on one value of an answer. What units convert into each other, `units` knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.verifiers.math import units
from headrace.verifiers.math.spelling import TEXT_GROUP, TEXT_NAMES
from headrace.verifiers.math.tree import unreadable

_WORD = r"[A-Za-z][A-Za-z. ]*[A-Za-z]|[A-Za-z]"
_EXPONENT = r"(\s*\^\s*\{?\s*[23]\s*\}?)?"
_TEXT_UNIT = re.compile(
    rf"\\(?:{TEXT_NAMES})\s*\{{\s*({_WORD})\s*\.?\s*(?:\^([23]))?\s*\}}{_EXPONENT}\s*\Z"
)
_BARE_UNIT = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi))(\s*)([A-Za-z]{2,}(?:\s[A-Za-z]{2,})*|(?<=\s)[mgsLhNJWKCF])"
    + _EXPONENT
    + r"\s*\Z"
)
_MARK_UNIT = re.compile(
    r"\s*(\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z]))\s*(?:\\(?:text|mathrm)\{\s*)?(C|F)?\}?\s*\Z"
)
_BASE = re.compile(
    r"\s*[({]?\s*(?P<digits>[0-9A-Za-z]+)\s*[)}]?\s*"
    r"(?:_\s*(?:\{\s*(?P<group>\d{1,2}|[a-z]{3,11})\s*\}|(?P<bare>\d{1,2}))"
    r"|\(?\s*base\s*(?P<word>\d{1,2}|[a-z]{3,11})\s*\)?)\s*"
)
_PREFIXED = re.compile(r"\s*0([xXbBoO])([0-9A-Fa-f]+)\s*")
_PREFIX_BASES = {"x": 16, "b": 2, "o": 8}
_BASES_IN_WORDS = {
    "two": 2,
    "bin": 2,
    "binary": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "oct": 8,
    "octal": 8,
    "nine": 9,
    "ten": 10,
    "dec": 10,
    "decimal": 10,
    "twelve": 12,
    "sixteen": 16,
    "hex": 16,
    "hexadecimal": 16,
}
_MONEY = re.compile(r"\A(\s*[-+]?\s*)(?:US\s*)?(\\\$|[\u20ac\u00a3])\s*(?=[\d.])")
_MONEY_BEHIND = re.compile(r"(?<=[\d.])\s*(\\\$|[\u20ac\u00a3])\s*\Z")
_MONEY_NAMES = {"\\$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling"}
_UNIT_IN_QUOTIENT = (
    r"(?:(?:kilo|centi|milli)?(?:meter|metre|gram)s?|miles?|feet|foot|inch(?:es)?|yards?|pounds?"
    r"|hours?|minutes?|seconds?|liters?|litres?|dollars?|cents?|[kcdm]?m|[km]?g|[km]?[NJWVA]|[km]?Pa"
    r"|sec|s|min|hr|h|C|K|k?mol|[mM]?L|ml|ft|in|mi|yd|lbs?|rad)(?:\s*\^\s*(?:\d|\{\s*\d\s*\}))?"
)
_QUOTIENT = re.compile(
    rf"(?<=[\d}}])\s*((?<=\s){_UNIT_IN_QUOTIENT}(?:\s*(?:/|\bper\b)\s*{_UNIT_IN_QUOTIENT})+)\s*\Z"
)
_GLUED = re.compile(
    rf"(?<=[\d}}])\s*({_UNIT_IN_QUOTIENT}(?:\s*(?:/|\bper\b)\s*{_UNIT_IN_QUOTIENT})*)\s*\Z"
)
_UNIT_FRACTION = re.compile(
    rf"\\[dt]?frac\s*\{{\s*({_UNIT_IN_QUOTIENT})\s*\}}\s*\{{\s*({_UNIT_IN_QUOTIENT})\s*\}}\s*\Z"
)
_NEGATIVE_POWER = re.compile(
    rf"(?<=[A-Za-z\d])\s*(?:\\cdot|\*|\s)\s*({_UNIT_IN_QUOTIENT})\s*\^\s*\{{?\s*-\s*(\d)\s*\}}?"
)
_POWER_WORD = re.compile(r"(.*\S)\s+(squared|cubed)\Z", re.IGNORECASE)
_OPERATOR_END = re.compile(r"(?:[-+*/=<>^_(,]|\\(?:cdot|times|div|pm|mp))\s*\Z")
_MAX_UNIT_CHARS = 80
_NOUN_LETTERS = 4
"""A word of so many letters behind a number and a space is what was counted, and no product."""
_NOUNS = frozenset(("men", "day", "cup", "box", "car", "pie", "egg", "pen", "way", "kid", "boy"))
_SCALES = {
    "hundred": "10^{2}",
    "thousand": "10^{3}",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
    "dozen": "12",
    "dozens": "12",
}
_COMPUTING_WORD = re.compile(
    r"\b(?:hundreds?|thousands?|(?:m|b|tr)illions?|dozens?|half|halves|thirds?|fourths?|fifths?|sixths?"
    r"|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|squared|cubed|factorial"
    r"|percent of"
    r"|plus|minus|divided|than|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|twenty|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:thir|for|fif|six|seven|eigh|nine)ty|twice"
    r"|thrice|negative|without|except|unless|if|when|otherwise|instead|not|maybe|versus|modulo|mod)\b",
    re.IGNORECASE,
)
"""Behind a number these are no unit: they make another number of it, or name another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A value as text, and its unit."""

    text: str
    unit: str = ""
    """Canonical name; "" for none."""


def split_unit(text: str, *, glued: bool) -> Measured:
    """Return a value without its unit. ``glued``: the ``m`` of ``5m`` is one, not a factor."""
    if before := _MONEY.match(text):
        measured = _trailing_unit(_MONEY.sub(r"\1", text), glued=glued)
        return Measured(text=measured.text, unit=measured.unit or _MONEY_NAMES[before[2]])
    if behind := _in_tail(_MONEY_BEHIND, text):
        return Measured(text=text[: behind.start()], unit=_MONEY_NAMES[behind[1]])
    return _trailing_unit(text, glued=glued)


def with_base(text: str, unit: str) -> str:
    """Return digits alone as digits of the expected base: the ``2A`` of ``2A_{16}``."""
    plain = TEXT_GROUP.sub(r"\1", text).strip()
    base = int(unit.removeprefix("base_"))
    return f"{plain}_{{{base}}}" if _are_digits(plain, base) else text


def _trailing_unit(text: str, *, glued: bool) -> Measured:
    if based := _based(text, glued=glued):
        return based
    plain = TEXT_GROUP.sub(r" \1 ", text)
    if glued or plain != text:
        plain = _UNIT_FRACTION.sub(r" \1/\2", plain)
        plain = _NEGATIVE_POWER.sub(r"/\1^\2", plain)
    if unit := _in_tail(_GLUED if glued else _QUOTIENT, plain):
        return Measured(text=plain[: unit.start()], unit=units.quotient_name(unit[1]))
    mark = _in_tail(_MARK_UNIT, text)
    if mark and (("%" in mark[1]) or _is_one_angle(text)):
        sign = "%" if "%" in mark[1] else "degree"
        return Measured(text=text[: mark.start()], unit=sign + (mark[2] or ""))
    if (unit := _in_tail(_TEXT_UNIT, text)) and not _OPERATOR_END.search(text[: unit.start()]):
        return _counted(text[: unit.start()], unit[1], unit[2] or unit[3])
    if (unit := _in_tail(_BARE_UNIT, text)) and _is_unit_word(unit[2], spaced=unit[1] != ""):
        return _counted(text[: unit.start()], unit[2], unit[3])
    return Measured(text=text)


def _counted(text: str, words: str, power: str | None) -> Measured:
    """Return a value and the unit in ``words``, the ``million`` of ``3 million dollars`` a factor.

    Raises Unreadable for words that compute: ``3 halves`` and ``3 less than ten`` are not 3.
    """
    first, _, rest = words.strip().partition(" ")
    scale = _SCALES.get(first.casefold())
    if scale is not None and not power:
        text, words = f"({text})*{scale}", rest.strip()
    raised = _POWER_WORD.fullmatch(words)
    if raised and not power and units.is_known(units.unit_name(raised[1], None)):
        words, power = raised[1], "2" if raised[2].casefold() == "squared" else "3"
    if _COMPUTING_WORD.search(words):
        unreadable(f"a word that computes: {words[:40]!r}")
    return Measured(text=text, unit=units.unit_name(words, power) if words else "")


def _in_tail(unit: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Search for a unit where the text ends: over all of it the time would be quadratic."""
    return unit.search(text, max(0, len(text) - _MAX_UNIT_CHARS))


def _based(text: str, *, glued: bool) -> Measured | None:
    """Return digits and the base behind them, or None where there is none.

    Not a number of its own: 101_2 is compared with other numbers of that base.
    """
    if prefixed := _PREFIXED.fullmatch(text):
        base, digits = _PREFIX_BASES[prefixed[1].lower()], prefixed[2]
        return _digits_in(base, digits) if _are_digits(digits, base) else None
    found = _BASE.fullmatch(TEXT_GROUP.sub(r"\1", text))
    if found is None:
        return None
    named = found["group"] or found["bare"] or found["word"]
    base = int(named) if named.isdigit() else _BASES_IN_WORDS.get(named, 0)
    digits = found["digits"]
    # A letter with a subscript is a letter: of digits alone only capitals are, which have no other
    # use; small ones are where a base is expected.
    is_number = digits[0].isdigit() and (glued or digits == digits.upper())
    is_number = is_number or (not found["bare"] and digits == digits.upper())
    return _digits_in(base, digits) if is_number and _are_digits(digits, base) else None


def _digits_in(base: int, digits: str) -> Measured:
    plain = digits.upper()
    text = plain if plain.isdigit() else f"D_{{{plain}}}"
    return Measured(text=text, unit=f"base_{base}")


def _are_digits(text: str, base: int) -> bool:
    if not 2 <= base <= 36 or not (text.isascii() and text.isalnum()):  # noqa: PLR2004 - what int() knows
        return False
    return all(int(char, 36) < base for char in text)


def _is_one_angle(text: str) -> bool:
    """Whether a degree sign is of the whole: not of the argument of a function, or of a term."""
    return text.count("\\circ") + text.count("\\degree") == 1 and not re.search(
        r"\\(?:sin|cos|tan|cot|sec|csc)", text
    )


def _is_unit_word(words: str, *, spaced: bool) -> bool:
    """Whether letters behind a number are its unit, and no product of variables."""
    if units.is_known(units.unit_name(words, None)):
        return len(words) > 1 or spaced
    first = words.split(maxsplit=1)[0]
    return spaced and (len(first) >= _NOUN_LETTERS or first.casefold().removesuffix("s") in _NOUNS)
