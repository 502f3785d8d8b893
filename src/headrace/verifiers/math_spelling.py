r"""Bringing one answer into LaTeX that math-verify reads: dollars off, units aside, words found.

math-verify drops what it cannot read and grades the rest: ``4\sqrt(2)`` became 4, ``5 cm`` became
5, ``2 3`` became 5, ``3 1/2`` became 2, ``3e0`` became 0, ``12:30`` became 2/5. Each such spelling
is rewritten, kept as text or refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from headrace.verifiers.numbers import DASHES

_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`")),
    *(("**", "**"), ("*", "*"), ("__", "__"), ("_", "_")),
)
_TAGGED = re.compile(r"<([A-Za-z]{1,16})>(.*)</\1>", re.DOTALL)
_SPACING = re.compile(r"\\(?:[,;:!> ]|quad\b|qquad\b|displaystyle\b|limits\b|left\b|right\b)")
_BIGGER = re.compile(r"\\(?:[bB]igg?[lr]?)(?![A-Za-z])")
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys(DASHES, "-"),
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u00f7": "/",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u2205": "\\emptyset ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u00b0": "^\\circ",
        "\u00a0": " ",
        "\n": " ",
    }
)
_CONSTANT = re.compile(r"\\(?:mathrm|text|operatorname|mathit)\s*\{\s*([ei])\s*\}")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sqrt|log|ln|sin|cos|tan|exp|pi|infty)(?![A-Za-z])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,5})(?![\w.])")
_ROOT_OF_GROUP = re.compile(r"(?:\\sqrt|\u221a)\s*\(([^()]*)\)")
_ROOT_OF_NUMBER = re.compile(r"(?:\\sqrt\s*|\u221a\s*)(\d+)")
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])")
# The parser takes a capital gamma for the constant of the small one, and I for the root of -1.
_CAPITAL_GAMMA = re.compile(r"\\Gamma(?![A-Za-z])(?!\s*(?:\\left\s*)?\()")
_CAPITAL_I = re.compile(r"(\\[A-Za-z]+(?:\s*\{I\})?)|I")
# The parser drops dots, so that 0.3... would be 0.3, and quotes, so that f' would be f.
_DOTS = re.compile(r"\.\s*\.|\u2026|\\[lc]?dots(?:[cb])?(?![A-Za-z])")
_PRIMES = re.compile(r"(?<=[A-Za-z])\s*('+)")
_MARKS_OF_NUMBER = re.compile(r"[\d)}\]]\s*['\"\u2032\u2033]|[\u2032\u2033]")
_LOG_BASE = re.compile(r"\\log\s*_\s*([0-9A-Za-z])\s*")
# In TeX "\\frac123" is 3/2; the parser says 1/23. Only what both read alike is rewritten.
_FRACTION_OF_DIGITS = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\s*\d)")
_FRACTION_OF_DIGIT = re.compile(r"\\[dtc]?frac\s*(\d)\s*\{")
_BARE_FRACTION = re.compile(r"\\[dtc]?frac\s*\d")
_MIXED = re.compile(r"(?<![\d.^_,}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\s*[\d./^!])")
_RATIO = re.compile(r"\w+(?:\.\d+)?(?:\s*:\s*\w+(?:\.\d+)?)+")
_POWER_OF_GROUP = re.compile(r"\^\s*\(([^()]*)\)")
_WORD = r"[A-Za-z][A-Za-z. ]*[A-Za-z]|[A-Za-z]"
_TEXT_UNIT = re.compile(
    rf"\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{{\s*({_WORD})\s*\.?\s*\}}"
    r"(\s*\^\s*\{?\s*[23]\s*\}?)?\s*\Z"
)
_BARE_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:([A-Za-z]{2,}(?:\s[A-Za-z]{2,})*)|(?<=\s)([mgsLhNJWKCF]))"
    r"(\s*\^\s*\{?\s*[23]\s*\}?)?\s*\Z"
)
_MARK_UNIT = re.compile(r"\s*(\\%|%|\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(C|F)?\s*\Z")
_BASE = re.compile(r"\s*([0-9A-F]+)\s*_\s*(?:(\d)|\{\s*(\d+)\s*\})\s*")
_MONEY = re.compile(r"\A(\s*[-+]?\s*)(\\\$|[\u20ac\u00a3])\s*(?=[\d.])")
_LONE_DOLLAR = re.compile(r"\A(\s*[-+]?\s*)\$(?=\s*[\d.][^$]*\Z)")
_MONEY_NAMES = {"\\$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling"}
_ALTERNATIVES = re.compile(
    r"\\(?:text|mathrm)\s*\{\s*,?\s*(?:or|and)\s*\}|(?<![A-Za-z])(?:or|and)(?![A-Za-z])"
)
_ADJACENT_NUMBERS = re.compile(r"(?<![\d.,])(\d+(?:\.\d+)?)\s+(?=[\d.])")
_MISREAD = (_ADJACENT_NUMBERS, _BARE_FRACTION, _MARKS_OF_NUMBER)
_PLAIN_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:['-][A-Za-z]+|\s+[A-Za-z]+)*")
_SHORT_WORDS = frozenset(("no", "on", "ok", "up", "so", "if", "or", "of"))
"""Two letters that are a word, and hardly a product."""
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
_WORDY = re.compile(r"(?![-+(]?\s*[\d.])(?=.*[^\W\d_]{2})[^=^_\\/+<>]*", re.DOTALL)
_CHOICE = re.compile(r"\(\s*([A-Z])\s*\)|([A-Z])\s*\)?")

_UNIT_NAMES = {
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "millimetre": "mm",
    "kilometer": "km",
    "kilometre": "km",
    "meter": "m",
    "metre": "m",
    "inch": "in",
    "inches": "in",
    "foot": "ft",
    "feet": "ft",
    "yard": "yd",
    "mile": "mi",
    "gram": "g",
    "kilogram": "kg",
    "pound": "lb",
    "lb": "lb",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "min": "min",
    "dollar": "dollar",
    "cent": "cent",
    "degree": "degree",
    "percent": "%",
    "\\%": "%",
    "\\degree": "degree",
}
_FOLDED_SYMBOLS = frozenset(("cm", "kg", "km", "ft", "lb", "in", "yd", "mi", "hr", "sec"))
"""Whatever their case: no other unit is written with these letters."""
_MAX_MIXED_DIGITS = 30
_LONG_NAME = 5
"""Of so many letters a unit is a word, whose case and plural mean nothing; ms and MW are not."""
_UNIT_IN_FRACTION = (
    r"(?:(?:kilo|centi|milli)?(?:meter|metre|gram)s?|miles?|feet|foot|inch(?:es)?|yards?|pounds?"
    r"|hours?|minutes?|seconds?|liters?|litres?|dollars?|cents?|[kcdm]?m|[km]?g|[km]?[NJWVA]|[km]?Pa"
    r"|sec|s|min|hr|h|C|K|k?mol|[mM]?L|ml|ft|in|mi|yd|lbs?|rad)(?:\s*\^\s*(?:\d|\{\s*\d\s*\}))?"
)
_UNIT_FRACTION = re.compile(
    rf"(?<=[\d}}])\s*((?<=\s){_UNIT_IN_FRACTION}(?:\s*(?:/|\bper\b)\s*{_UNIT_IN_FRACTION})+)\s*\Z"
)
_GLUED_UNIT = re.compile(
    rf"(?<=[\d}}])\s*({_UNIT_IN_FRACTION}(?:\s*(?:/|\bper\b)\s*{_UNIT_IN_FRACTION})*)\s*\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """One answer, ready to be compared."""

    latex: str
    """The expression, without dollars and unit."""
    unit: str = ""
    """Canonical name with its power, such as ``cm^2``; "" for none."""
    words: str | None = None
    """The folded text, where the answer is words and no expression; or the letter of a choice,
    which may be an expression too."""
    is_list: bool = False
    """Several values: separated by commas, ``or`` or ``and``."""
    has_alternatives: bool = False
    """Values are separated by ``or`` or ``and``."""


def spell(text: str, *, has_unit: bool = False) -> Spelling | None:
    """Return how ``text`` is to be read; None where it can only be misread, or is empty.

    ``has_unit``: the expected answer has a unit, so that the ``m`` of ``5m`` is one, too.
    """
    if _DOTS.search(text):
        return None
    text = _unwrap(text)
    only = _TEXT.fullmatch(text)
    if only and not _WORDY.fullmatch(only[1]):
        text = only[1].strip()
    if choice := _CHOICE.fullmatch(_TEXT.sub(r"\1", text).strip()):
        letter = choice[1] or choice[2]
        return Spelling(latex=_rewrite(letter).strip(), words=letter)
    words = _words(text)
    if words:
        return Spelling(latex="", words=words)
    # Signs of several letters first, so that pi is no unit and sqrt no product of letters.
    money = _MONEY.match(text)
    text, unit = _split_unit(_rewrite(_MONEY.sub(r"\1", text)), glued=has_unit)
    unit = unit or (_MONEY_NAMES[money[2]] if money else "")
    if _RATIO.fullmatch(text.strip()):
        # A time, odds or a proportion: no quotient, so that only the same text is the same.
        return Spelling(latex="", unit=unit, words="".join(text.split()))
    listed = _ALTERNATIVES.sub(" , ", text)
    has_alternatives = listed != text
    if not listed.strip() or any(shape.search(listed) for shape in _MISREAD):
        return None
    without_groups = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", listed)
    return Spelling(
        latex=listed.strip(),
        unit=unit,
        is_list="," in without_groups.replace("{,}", "") or ";" in listed,
        has_alternatives=has_alternatives,
    )


def same_words(gold: Spelling, answer: Spelling) -> bool | None:
    """Return whether two answers of which one is words are the same; None where algebra decides."""
    if gold.words is not None and answer.words is not None:
        return gold.words == answer.words
    words = gold.words or answer.words
    if words is None or len(words) == 1:
        return None
    # "Al" may be a product, but not of the letters of \\text{La}.
    return words == _folded(gold.latex + answer.latex)


def _unwrap(text: str) -> str:
    """Take away white space, markup around the whole, and the full stop of a sentence."""
    while True:
        before = text
        text = text.strip()
        if text.endswith((".", ",", ";")):
            text = text[:-1]
        if tagged := _TAGGED.fullmatch(text):
            text = tagged[2]
        for opener, closer in _WRAPPERS:
            long_enough = len(text) > len(opener) + len(closer)
            inner = text[len(opener) : -len(closer)]
            if text.startswith(opener) and text.endswith(closer) and closer not in inner:
                text = inner if long_enough else ""
        if text.startswith("\\boxed{") and text.endswith("}"):
            text = text[len("\\boxed{") : -1]
        if text == before:
            # "$5" is money; two dollars around a part of the text are LaTeX.
            text = _LONE_DOLLAR.sub(r"\1\\$", text) if text.count("$") == 1 else text
            return re.sub(r"(?<!\\)\$|\\[()]", " ", text)


def _words(text: str) -> str | None:
    """Return folded text where the answer is a word: ``listen`` is not a product of letters."""
    text = text.strip()
    if only := _TEXT.fullmatch(text):
        return _folded(only[1]) or None
    is_word = _PLAIN_WORDS.fullmatch(text) or text.casefold() in _SHORT_WORDS
    return _folded(text) if is_word and not _FUNCTION.fullmatch(text) else None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .()")


def _rewrite(text: str) -> str:
    text = _BIGGER.sub("", _SPACING.sub(" ", text.translate(_SYMBOLS)))
    text = _CONSTANT.sub(r" \1 ", text.replace("**", "^"))
    text = _FUNCTION.sub(r"\\\1 ", text)
    text = _EMPTY_SET.sub(r"\\emptyset ", text.replace("\\colon", ":"))
    text = _CAPITAL_GAMMA.sub(r"\\mathit{GAMMA}", text)
    text = _PRIMES.sub(lambda match: f"_{{{'prime' * len(match[1])}}}", text)
    text = _CAPITAL_I.sub(lambda match: match[1] or "\\mathit{I}", text)
    text = _LOG_BASE.sub(r"\\log_{\1} ", text)
    text = _FRACTION_OF_DIGIT.sub(r"\\frac{\1}{", text)
    text = _MIXED.sub(_mixed_number, _FRACTION_OF_DIGITS.sub(r"\\frac{\1}{\2}", text))
    text = _SCIENTIFIC.sub(_power_of_ten, text)
    text = _ROOT_OF_GROUP.sub(r"\\sqrt{\1}", text)
    text = _ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", text)
    return _POWER_OF_GROUP.sub(r"^{\1}", text)


def _power_of_ten(match: re.Match[str]) -> str:
    return f"({match[1]} \\cdot 10^{{{int(match[2])}}})"


def _mixed_number(match: re.Match[str]) -> str:
    """Write ``3 1/2`` as the parser reads it; what is no proper fraction stays, and is refused."""
    whole, numerator, denominator = match.groups()
    is_short = len(numerator + denominator) < _MAX_MIXED_DIGITS
    is_proper = is_short and int(numerator) < int(denominator)
    return f"{whole}\\frac{{{numerator}}}{{{denominator}}}" if is_proper else match[0]


def _split_unit(text: str, *, glued: bool) -> tuple[str, str]:
    """Return the text without its trailing unit, and the unit's canonical name."""
    if base := _BASE.fullmatch(text):
        # The parser drops it: 101_2 would be 101_3.
        return base[1], f"base {base[2] or base[3]}"
    plain = _TEXT.sub(r" \1 ", text)
    if unit := (_GLUED_UNIT if glued else _UNIT_FRACTION).search(plain):
        return plain[: unit.start()], _fraction_name(unit[1])
    if mark := _MARK_UNIT.search(text):
        sign = "%" if "%" in mark[1] else "degree"
        return text[: mark.start()], sign + (mark[2] or "")
    if unit := _TEXT_UNIT.search(text):
        return text[: unit.start()], _unit_name(unit[1], unit[2])
    if (unit := _BARE_UNIT.search(text)) and not _ALTERNATIVES.search(unit[0]):
        return text[: unit.start()], _unit_name(unit[1] or unit[2], unit[3])
    return text, ""


def _fraction_name(text: str) -> str:
    """Return the canonical name of ``m/s/s``, ``m/s^2``, ``miles per hour``, or of one unit."""
    powers: Counter[str] = Counter()
    for index, part in enumerate(re.split(r"/|\bper\b", text)):
        name, _, power = part.partition("^")
        digits = re.findall(r"\d", power)
        powers[_unit_name(name, None)] += (-1 if index else 1) * int(digits[0] if digits else 1)
    return " ".join(
        f"{name}^{power}" if power != 1 else name for name, power in sorted(powers.items()) if power
    )


def _unit_name(name: str, power: str | None) -> str:
    folded = " ".join(name.split()).strip(". ")
    lowered = folded.casefold()
    square = next((word for word in ("square ", "sq ", "sq. ") if lowered.startswith(word)), "")
    cubic = "cubic " if lowered.startswith("cubic ") else ""
    known = _simple_unit_name(folded[len(square + cubic) :])
    if square or cubic:
        return f"{known}^{2 if square else 3}"
    digits = re.findall(r"[23]", power or "")
    return known + (f"^{digits[0]}" if digits else "")


def _simple_unit_name(name: str) -> str:
    """Return the canonical name: words without case and plural, symbols as they are."""
    lowered = name.casefold()
    if len(lowered) > 1:
        singular = lowered.removesuffix("s") if len(lowered) > 2 else lowered  # noqa: PLR2004 - "ms"
        known = _UNIT_NAMES.get(lowered, _UNIT_NAMES.get(singular))
        if known is not None:
            return known
        if singular in _FOLDED_SYMBOLS:
            return singular
    return lowered.removesuffix("s") if len(lowered) >= _LONG_NAME else name
