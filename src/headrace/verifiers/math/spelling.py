r"""One answer as text: markup off, signs unified, values, units, words and choices told apart.

String work, linear in the text but for nested markup, which is bounded by its length. What an
expression means is `parser`'s business; nothing is dropped here but markup around the whole.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from headrace.verifiers.math import units
from headrace.verifiers.math.symbols import SIGNS
from headrace.verifiers.math.tree import unreadable

_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`")),
    *(("**", "**"), ("*", "*"), ("__", "__"), ("_", "_")),
)
_TAGGED = re.compile(r"<([A-Za-z]{1,16})>(.*)</\1>", re.DOTALL)
_LONE_DOLLAR = re.compile(r"\A(\s*[-+]?\s*)\$(?=\s*[\d.][^$]*\Z)")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()]")
_TEXT_NAMES = r"text|mathrm|textrm|mbox|textbf|mathbf|operatorname|textit|textnormal|hbox"
TEXT_GROUP = re.compile(rf"\\(?:{_TEXT_NAMES})\s*\{{([^{{}}]*)\}}")
_WORDY = re.compile(r"(?![-+(]?\s*[\d.])(?=.*[^\W\d_]{2})[^=^_\\/+<>]*", re.DOTALL)
_PLAIN_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:['-][A-Za-z]+|\s+[A-Za-z]+)*")
_SHORT_WORDS = frozenset(("no", "on", "ok", "up", "so", "if", "or", "of"))
"""Two letters that are a word, and hardly a product."""
_NAMES = "pi|infty|infinity|sqrt|cbrt|log|ln|exp|(?:a|arc)?(?:sin|cos|tan)h?|cot|sec|csc"
_NAME = re.compile(rf"(?<![\\A-Za-z])({_NAMES})(?![A-Za-z])")
_BRACKET_NAME = re.compile(r"(?<![\\A-Za-z])(max|min|gcd|lcm|abs|floor|ceil|sgn)(?=\s*\()")
_CONSTANT = re.compile(r"\\(?:mathrm|text|operatorname|mathit)\s*\{\s*([ei])\s*\}")
# A dot follows "\\left" where nothing is to be drawn.
_BRACKET_SIZE = re.compile(r"\\(?:left|right|middle)(?![A-Za-z])\s*\.?(?=\s|\W|\Z)")
_LEFT = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])")
_DOTS = re.compile(r"\.\s*\.|\\[lc]?dots(?:[cb])?(?![A-Za-z])")
_MARKS_OF_NUMBER = re.compile(r"[\d)}\]]\s*['\"]|\"")
_RATIO = re.compile(r"\w+(?:\.\d+)?(?:\s*:\s*\w+(?:\.\d+)?)+")
_COLON = re.compile(r"\\colon(?![A-Za-z])")
_OUTER_OPEN = re.compile(r"\s*\]([^\[\]]*)\[\s*")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]*\d)")
# Not the last sign of a row's end and what comes behind it.
_SPACE = re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|~")
_NEGATIVE_SPACE = re.compile(r"\\!\s*")
_LOOSE_GROUP = re.compile(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d{3})")
_SPACED = re.compile(r"(?<![\d.,^_])(?<!\d\s)\d{1,3}(?:\s\d{3})+(?!\s*[\d/^!_])")
_SEPARATOR_TEXT = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*(or|and)\s*,?\s*\}|(?<![A-Za-z\\])(or|and)(?![A-Za-z])"
)

_WORD = r"[A-Za-z][A-Za-z. ]*[A-Za-z]|[A-Za-z]"
_EXPONENT = r"(\s*\^\s*\{?\s*[23]\s*\}?)?"
_TEXT_UNIT = re.compile(rf"\\(?:{_TEXT_NAMES})\s*\{{\s*({_WORD})\s*\.?\s*\}}{_EXPONENT}\s*\Z")
_BARE_UNIT = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi))(\s*)([A-Za-z]{2,}(?:\s[A-Za-z]{2,})*|(?<=\s)[mgsLhNJWKCF])"
    + _EXPONENT
    + r"\s*\Z"
)
_MARK_UNIT = re.compile(
    r"\s*(\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z]))\s*(?:\\(?:text|mathrm)\{\s*)?(C|F)?\}?\s*\Z"
)
_BASE = re.compile(r"\s*([0-9A-F]+)\s*_\s*(?:(\d)|\{\s*(\d+)\s*\})\s*")
_MONEY = re.compile(r"\A(\s*[-+]?\s*)(\\\$|[\u20ac\u00a3])\s*(?=[\d.])")
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
_MAX_UNIT_CHARS = 80
_NOUN_LETTERS = 4
"""A word of so many letters behind a number and a space is what was counted, and no product."""
_NOUNS = frozenset(("men", "day", "cup", "box", "car", "pie", "egg", "pen", "way", "kid", "boy"))
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\b\s*)?"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Za-z])(?=[.):,]|\s*\Z))[.):,]?\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_LEAD = re.compile(
    r"(?i:approximately|approx\.|about|roughly|exactly|simply|equal to)\s+(?=[-+]?\s*[\d.\\$])"
)
_CHOICE_LETTER = re.compile(r"([A-Z])\s*[.)]")
_ANOTHER_CHOICE = re.compile(
    r"\(\s*[A-Z]\s*\)|(?<![A-Za-z])[A-Z][.):]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])"
    r"|\A[\s,;/&]*[A-Z](?:[\s,;/&]+[A-Z])*\s*\Z"
)

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_COMPUTING_WORD = re.compile(
    r"\b(?:hundreds?|thousands?|(?:m|b|tr)illions?|half|halves|thirds?|fourths?|fifths?|sixths?"
    r"|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|squared|cubed|factorial"
    r"|percent of"
    r"|plus|minus|divided|than|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|twenty|not|maybe|versus|modulo|mod)\b",
    re.IGNORECASE,
)
"""Behind a number these are no unit: they make another number of it, or name another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A value as text, and its unit."""

    text: str
    unit: str = ""
    """Canonical name; "" for none."""


def refuse_dots(text: str) -> None:
    """Raise Unreadable where dots leave something out: 0.3... is not 0.3."""
    if _DOTS.search(text.translate(SIGNS)):
        unreadable("dots that leave something out")


def unwrap(text: str) -> str:
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
            break
    # "$5" is money; two dollars around a part of the text are LaTeX.
    text = _LONE_DOLLAR.sub(r"\1\\$", text) if text.count("$") == 1 else text
    text = _DELIMITER.sub(" ", text)
    text = _LEAD.sub("", text.strip())
    if lone := _CHOICE_LETTER.fullmatch(text.strip()):
        return lone[1]
    only = TEXT_GROUP.fullmatch(text.strip())
    return only[1].strip() if only and not _WORDY.fullmatch(only[1]) else text


def words_of(text: str) -> str | None:
    """Return folded text where an answer is words: ``listen`` is no product of letters."""
    text = text.strip()
    if only := TEXT_GROUP.fullmatch(text):
        return folded(only[1]) if _WORDY.fullmatch(only[1]) else None
    is_word = _PLAIN_WORDS.fullmatch(text) or text.casefold() in _SHORT_WORDS
    return folded(text) if is_word and not _NAME.fullmatch(text) else None


def folded(text: str) -> str:
    """Return words without case, markup and doubled spaces."""
    plain = TEXT_GROUP.sub(r" \1 ", text)
    return " ".join(plain.casefold().split()).strip(" .()")


def choice_of(text: str) -> str | None:
    """Return the letter of ``(B)``, ``B.``, ``(B) 12``; None where there is none, or several."""
    found = _CHOICE.fullmatch(TEXT_GROUP.sub(r"\1", text).replace("\\", " ").strip())
    if found is None or _ANOTHER_CHOICE.search(found[3]):
        return None
    return str(found[1] or found[2]).upper()


def ratio_of(text: str) -> str | None:
    """Return a time, odds or a proportion, ``12:30``, without spaces: it is no quotient."""
    text = _COLON.sub(":", text).strip()
    return "".join(text.split()) if _RATIO.fullmatch(text) else None


def unified(text: str) -> str:
    """Return ``text`` with one spelling for each sign. Raises Unreadable for stray quotes."""
    if "\x00" in text:
        unreadable("a control character")
    text = _LOOSE_GROUP.sub("{,}", _NEGATIVE_SPACE.sub("", text))
    text = unicodedata.normalize("NFKC", text.translate(SIGNS)).translate(SIGNS)
    text = _SPACE.sub(" ", text)
    text = _LEFT.sub(" ", _BRACKET_SIZE.sub(" ", text)).replace("**", "^")
    text = _BRACKET_NAME.sub(r"\\\1 ", _NAME.sub(r"\\\1 ", _CONSTANT.sub(r" \1 ", text)))
    if _MARKS_OF_NUMBER.search(text):
        unreadable("a quote behind a number")
    if outer := _OUTER_OPEN.fullmatch(text):
        # ]1, 2[ is how some countries write the open interval.
        text = f"({outer[1]})"
    return text


def split_values(text: str, *, grouped: bool) -> tuple[list[str], str]:
    """Return the values of a list and what joins them: "", ",", "or" or "and".

    ``grouped``: a comma before three digits may group thousands; inside brackets it never does.
    """
    text = _without_groups(text) if grouped else text
    text = _SEPARATOR_TEXT.sub(lambda found: f" \x00{found[1] or found[2]}\x00 ", text)
    parts: list[str] = [""]
    joints: list[str] = []
    depth = 0
    position = 0
    while position < len(text):
        char = text[position]
        if char == "\x00":
            end = text.index("\x00", position + 1)
            if depth == 0:
                _cut(parts, joints, text[position + 1 : end])
            else:
                parts[-1] += f"\\text{{{text[position + 1 : end]}}}"
            position = end + 1
            continue
        piece = _piece(text, position)
        depth += _change_of_depth(piece)
        if piece in {",", ";"} and depth <= 0:
            _cut(parts, joints, ",")
        else:
            parts[-1] += piece
        position += len(piece)
    if not all(part.strip() for part in parts):
        unreadable("a list with an empty place")
    joined = next((joint for joint in ("or", "and") if joint in joints), "," if joints else "")
    return parts, joined


def _piece(text: str, position: int) -> str:
    r"""Return the character there, or ``\\{``, ``\\langle`` or ``{,}``, which are one sign."""
    for sign in ("{,}", "\\langle", "\\rangle"):
        if text.startswith(sign, position):
            return sign
    return text[position : position + (2 if text[position] == "\\" else 1)]


def _change_of_depth(piece: str) -> int:
    if piece == "{,}":
        return 0
    opens = piece[-1] in "{([" or piece == "\\langle"
    closes = piece[-1] in "})]" or piece == "\\rangle"
    return opens - closes


def _cut(parts: list[str], joints: list[str], joint: str) -> None:
    """Begin another value; a comma and a word together are one joint."""
    joints.append(joint)
    if joint == "," or parts[-1].strip() or len(parts) == 1:
        parts.append("")


def _without_groups(text: str) -> str:
    """Write ``1,234`` and ``1 234`` as ``1{,}234``, outside of brackets that hold lists."""
    kept: list[str] = []
    start = depth = 0
    for position, char in enumerate(text):
        is_set_brace = char in "{}" and text[position - 1 : position] == "\\"
        change = (char in "([" or (char == "{" and is_set_brace)) - (
            char in ")]" or (char == "}" and is_set_brace)
        )
        if change > 0 and depth == 0:
            kept.append(_grouped(text[start:position]))
            start = position
        depth = max(0, depth + change)
        if change < 0 and depth == 0:
            kept.append(text[start:position])
            start = position
    rest = text[start:]
    kept.append(_grouped(rest) if depth == 0 else rest)
    return "".join(kept)


def _grouped(text: str) -> str:
    text = _GROUPED.sub(lambda found: found[0].replace(",", "{,}"), text)
    return _SPACED.sub(lambda found: re.sub(r"\s", "{,}", found[0]), text)


def split_unit(text: str, *, glued: bool) -> Measured:
    """Return a value without its unit. ``glued``: the ``m`` of ``5m`` is one, not a factor."""
    money = _MONEY.match(text)
    text = _MONEY.sub(r"\1", text)
    measured = _trailing_unit(text, glued=glued)
    if money and not measured.unit:
        return Measured(text=measured.text, unit=_MONEY_NAMES[money[2]])
    return measured


def _trailing_unit(text: str, *, glued: bool) -> Measured:
    if base := _BASE.fullmatch(text):
        # Not a number of its own: 101_2 is compared with other numbers of that base.
        return Measured(text=_digits(base[1]), unit=f"base_{base[2] or base[3]}")
    plain = TEXT_GROUP.sub(r" \1 ", text)
    if unit := _in_tail(_GLUED if glued else _QUOTIENT, plain):
        return Measured(text=plain[: unit.start()], unit=units.quotient_name(unit[1]))
    mark = _in_tail(_MARK_UNIT, text)
    if mark and (("%" in mark[1]) or _is_one_angle(text)):
        sign = "%" if "%" in mark[1] else "degree"
        return Measured(text=text[: mark.start()], unit=sign + (mark[2] or ""))
    if unit := _in_tail(_TEXT_UNIT, text):
        return _counted(text[: unit.start()], unit[1], unit[2])
    if (unit := _in_tail(_BARE_UNIT, text)) and _is_unit_word(unit[2], spaced=unit[1] != ""):
        return _counted(text[: unit.start()], unit[2], unit[3])
    return Measured(text=text)


def _counted(text: str, words: str, power: str | None) -> Measured:
    """Return a value and the unit in ``words``, the ``million`` of ``3 million dollars`` a factor.

    Raises Unreadable for words that compute: ``3 halves`` and ``3 less than ten`` are not 3.
    """
    first, _, rest = words.strip().partition(" ")
    zeros = _SCALES.get(first.casefold())
    if zeros is not None and not power:
        text, words = f"({text})*10^{{{zeros}}}", rest.strip()
    if _COMPUTING_WORD.search(words):
        unreadable(f"a word that computes: {words[:40]!r}")
    return Measured(text=text, unit=units.unit_name(words, power) if words else "")


def _in_tail(unit: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Search for a unit where the text ends: over all of it the time would be quadratic."""
    return unit.search(text, max(0, len(text) - _MAX_UNIT_CHARS))


def _digits(digits: str) -> str:
    return digits if digits.isdigit() else f"D_{{{digits}}}"


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
