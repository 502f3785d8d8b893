r"""Bringing one answer into LaTeX that math-verify reads: dollars off, units aside, words found.

math-verify drops what it cannot read and grades the rest: ``4\sqrt(2)`` became 4, ``5 cm`` became
5, ``2 3`` became 5, ``3e0`` became 0. Each such spelling is rewritten or refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`")),
    *(("**", "**"), ("*", "*"), ("__", "__"), ("_", "_")),
)
_TAGGED = re.compile(r"<([A-Za-z]{1,16})>(.*)</\1>", re.DOTALL)
_SPACING = re.compile(r"\\(?:[,;:!> ]|quad\b|qquad\b|displaystyle\b|limits\b|left\b|right\b)")
_BIGGER = re.compile(r"\\(?:[bB]igg?[lr]?)(?![A-Za-z])")
_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u00f7": "/",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
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
_MONEY = re.compile(r"\A\s*(?:\\\$|[$\u20ac\u00a3])\s*(?=[\d.])")
_ALTERNATIVES = re.compile(
    r"\\(?:text|mathrm)\s*\{\s*,?\s*(?:or|and)\s*\}|(?<![A-Za-z])(?:or|and)(?![A-Za-z])"
)
_ADJACENT_NUMBERS = re.compile(r"(?<![\d.,])(\d+(?:\.\d+)?)\s+(?=[\d.])(?!\d+\s*/\s*\d)")
_PLAIN_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]{2,}")
_TEXT_ONLY = re.compile(r"\\(?:text|mathrm|textrm|mbox|textbf)\s*\{([^{}]*)\}")

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
    "inche": "in",
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
    "degree": "degree",
    "percent": "%",
    "\\%": "%",
    "\\degree": "degree",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """One answer, ready to be compared."""

    latex: str
    """The expression, without dollars and unit."""
    unit: str = ""
    """Canonical name with its power, such as ``cm^2``; "" for none."""
    words: str | None = None
    """The folded text, where the answer is words and no expression."""
    is_list: bool = False
    """Several values: separated by commas, ``or`` or ``and``."""
    has_alternatives: bool = False
    """Values are separated by ``or`` or ``and``."""


def spell(text: str) -> Spelling | None:
    """Return how ``text`` is to be read; None where it can only be misread, or is empty."""
    text = _unwrap(text)
    words = _words(text)
    if words:
        return Spelling(latex="", words=words)
    # Signs of several letters first, so that pi is no unit and sqrt no product of letters.
    text = _rewrite(_MONEY.sub("", text))
    text, unit = _split_unit(text)
    listed = _ALTERNATIVES.sub(" , ", text)
    has_alternatives = listed != text
    if not listed.strip() or _ADJACENT_NUMBERS.search(listed):
        return None
    without_groups = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", listed)
    return Spelling(
        latex=listed.strip(),
        unit=unit,
        is_list="," in without_groups.replace("{,}", "") or ";" in listed,
        has_alternatives=has_alternatives,
    )


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
            return text.replace("$", " ").replace("\\(", " ").replace("\\)", " ")


def _words(text: str) -> str | None:
    """Return folded text where the answer is a word: ``listen`` is not a product of letters."""
    only = _TEXT_ONLY.fullmatch(text.strip())
    if only:
        return " ".join(only[1].casefold().split()).strip(" .()") or None
    if _PLAIN_WORDS.fullmatch(text.strip()) and not _FUNCTION.fullmatch(text.strip()):
        return " ".join(text.casefold().split())
    return None


def _rewrite(text: str) -> str:
    text = _BIGGER.sub("", _SPACING.sub(" ", text.translate(_SYMBOLS)))
    text = _CONSTANT.sub(r" \1 ", text.replace("**", "^"))
    text = _FUNCTION.sub(r"\\\1 ", text)
    text = _SCIENTIFIC.sub(_power_of_ten, text)
    text = _ROOT_OF_GROUP.sub(r"\\sqrt{\1}", text)
    text = _ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", text)
    return _POWER_OF_GROUP.sub(r"^{\1}", text)


def _power_of_ten(match: re.Match[str]) -> str:
    return f"({match[1]} \\cdot 10^{{{int(match[2])}}})"


def _split_unit(text: str) -> tuple[str, str]:
    """Return the text without its trailing unit, and the unit's canonical name."""
    if mark := _MARK_UNIT.search(text):
        sign = "%" if "%" in mark[1] else "degree"
        return text[: mark.start()], sign + (mark[2] or "")
    if unit := _TEXT_UNIT.search(text):
        return text[: unit.start()], _unit_name(unit[1], unit[2])
    if unit := _BARE_UNIT.search(text):
        if _ALTERNATIVES.search(unit[0]):
            return text, ""
        return text[: unit.start()], _unit_name(unit[1] or unit[2], unit[3])
    return text, ""


def _unit_name(name: str, power: str | None) -> str:
    folded = " ".join(name.split()).strip(". ")
    lowered = folded.casefold()
    square = next((word for word in ("square ", "sq ", "sq. ") if lowered.startswith(word)), "")
    lowered = lowered.removeprefix(square)
    cubic = lowered.startswith("cubic ")
    lowered = lowered.removeprefix("cubic ")
    singular = lowered.removesuffix("s") if len(lowered) > 1 else folded
    known = _UNIT_NAMES.get(singular, _UNIT_NAMES.get(lowered, singular))
    if square or cubic:
        return f"{known}^{2 if square else 3}"
    digits = re.findall(r"[23]", power or "")
    return known + (f"^{digits[0]}" if digits else "")
