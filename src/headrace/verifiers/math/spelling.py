r"""One answer as text: markup off, signs unified, values, units, words and choices told apart.

String work, linear in the text but for nested markup, which is bounded by its length. What an
expression means is `parser`'s business; nothing is dropped here but markup around the whole.
"""

from __future__ import annotations

import re
import unicodedata

from headrace.verifiers.math.rewriting import with_round_brackets
from headrace.verifiers.math.symbols import SIGNS
from headrace.verifiers.math.tree import unreadable

_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`")),
    *(("**", "**"), ("*", "*"), ("__", "__"), ("_", "_")),
    *(('"', '"'), ("\u201c", "\u201d"), ("\u2018", "\u2019"), ("'", "'")),
)
_SPACE_BEHIND = re.compile(r"(?:\\[,;:! ]|\\q?quad)\s*\Z")
_TAGGED = re.compile(r"<([A-Za-z]{1,16})>(.*)</\1>", re.DOTALL)
_LONE_DOLLAR = re.compile(r"\A(\s*[-+]?\s*)\$(?=\s*[\d.][^$]*\Z)")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()]")
TEXT_NAMES = r"text|mathrm|textrm|mbox|textbf|mathbf|operatorname|textit|textnormal|hbox"
TEXT_GROUP = re.compile(rf"\\(?:{TEXT_NAMES})\s*\{{([^{{}}]*)\}}")
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
_RATIO_WORD = re.compile(
    r"\A\s*(\d{1,9})\s*(?:\\text\s*\{\s*to\s*\}|(?<=\s)to(?=\s))\s*(\d{1,9})\s*\Z"
)
_HALF_OF_DAY = re.compile(r"(?<=:\d\d)\s*(?:\\text\s*\{\s*)?([aApP])\.?\s?[mM]\.?\s*\}?\s*\Z")
_COLON = re.compile(r"\\colon(?![A-Za-z])")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]*\d)")
# Not the last sign of a row's end and what comes behind it.
_SPACE = re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|~")
_NEGATIVE_SPACE = re.compile(r"\\!\s*")
_LOOSE_GROUP = re.compile(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d{3})")
_SPACED = re.compile(r"(?<![\d.,^_])(?<!\d\s)\d{1,3}(?:\s\d{3})+(?!\s*[\d/^!_])")
_SEPARATOR_TEXT = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*(or|and)\s*,?\s*\}|(?<![A-Za-z\\])(or|and)(?![A-Za-z])"
)

_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\b\s*)?"
    r"(?:\(\s*([A-Za-z])\s*\)|[\[{]\s*([A-Za-z])\s*[\]}]|([A-Za-z])(?=[.):,]|\s*\Z))[.):,]?\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_GOES_ON = re.compile(r"[-+*/=<>^_!]")
"""Behind a letter: then it is a formula that begins with it."""
_IS_CORRECT = re.compile(
    r"\s+is\s+(?:the\s+)?(?:correct|right|true|best)(?:\s+(?:answer|choice|option|one))?[.!]?\Z",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?i:approximately|approx\.|about|roughly|exactly|simply|equal to)\s+(?=[-+]?\s*[\d.\\$])"
)
_CHOICE_LETTER = re.compile(r"([A-Z])\s*[.)]")
_ANOTHER_CHOICE = re.compile(
    r"\(\s*[A-Z]\s*\)|(?<![A-Za-z])[A-Z][.):]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])"
    r"|\A[\s,;/&]*[A-Z](?:[\s,;/&]+[A-Z])*\s*\Z"
)


def refuse_dots(text: str) -> None:
    """Raise Unreadable where dots leave something out: 0.3... is not 0.3."""
    if _DOTS.search(text.translate(SIGNS)):
        unreadable("dots that leave something out")


def unwrap(text: str) -> str:
    """Take away white space, markup around the whole, and the full stop of a sentence."""
    while True:
        before = text
        text = _SPACE_BEHIND.sub("", text.strip("\u3002 \t\r\n"))
        if text.endswith((".", ",", ";")) and not text.endswith("\\right."):
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
    text = text.removesuffix("!")
    is_word = _PLAIN_WORDS.fullmatch(text) or text.casefold() in _SHORT_WORDS
    return folded(text) if is_word and not _NAME.fullmatch(text) else None


def folded(text: str) -> str:
    """Return words without case, markup and doubled spaces."""
    plain = TEXT_GROUP.sub(r" \1 ", text)
    return " ".join(plain.casefold().split()).strip(" .!()")


def choice_of(text: str) -> str | None:
    """Return the letter of ``(B)``, ``B.``, ``(B) 12``; None where there is none, or several."""
    letter = letter_of(text)
    return None if letter is None else letter.upper()


def letter_of(text: str) -> str | None:
    """Do the same with the letter as it is written."""
    plain = _IS_CORRECT.sub("", TEXT_GROUP.sub(r"\1", text).replace("\\", " ").strip())
    found = _CHOICE.fullmatch(plain)
    if found is None or _ANOTHER_CHOICE.search(found[4]) or _GOES_ON.match(found[4]):
        return None
    return str(found[1] or found[2] or found[3])


def ratio_of(text: str) -> tuple[str, str] | None:
    """Return a time, odds or a proportion, ``12:30``, without spaces: it is no quotient.

    Then the half of the day that stands behind a time: "am", "pm" or "".
    """
    text = _RATIO_WORD.sub(r"\1:\2", _COLON.sub(":", text)).strip()
    half = ""
    if found := _HALF_OF_DAY.search(text):
        text, half = text[: found.start()], f"{found[1].lower()}m"
    return ("".join(text.split()), half) if _RATIO.fullmatch(text) else None


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
    # ]1, 2[ is how some countries write the open interval.
    return with_round_brackets(text)


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
