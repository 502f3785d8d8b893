"""Which part of a completion is its answer.

Pure string work, linear in the text, with a cap on size. The policy is the attacker: a rule that
cannot tell an answer from something else returns None, and None is never equal to anything.
docs/VERIFIERS.md has every rule with examples. What the text means is not decided here.
"""

from __future__ import annotations

import re
import unicodedata
from typing import assert_never

from headrace.config import Extraction
from headrace.verifiers.numbers import DASHES

MAX_COMPLETION_CHARS = 1_000_000
"""A longer completion has no answer."""
MAX_NUMBER_CHARS = 512
"""`final_number` looks at so many characters at the end; a number never needs more."""

_NUMBER = re.compile(
    r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d+)?(?:[eE][+-]?\d{1,4})?|\.\d+(?:[eE][+-]?\d{1,4})?"
)
_NUMBER_AT_END = re.compile(rf"(?:{_NUMBER.pattern})\Z")
_CLOSING_TAG = re.compile(r"</[A-Za-z]{1,16}>\Z")
_OPENING_TAG = re.compile(r"<[A-Za-z]{1,16}>\Z")
_SIGNS = "+" + DASHES
_OPERATORS = frozenset(_SIGNS + "*/^\u00b7%\\&|")
# Mathematical symbols behind which a result stands; behind all others stands an operand.
_LEADS_TO_RESULT = frozenset("=\u2248\u2245\u2243~\u2192\u21d2\u27f6\u27f9\u21a6")
_RESULT_COMMAND = re.compile(
    r"\\(?:approx|simeq|cong|to|(?:long)?rightarrow|(?:Long)?[Rr]ightarrow|implies|therefore|mapsto"
    r"|quad|qquad)\Z"
)
_COMMAND = re.compile(r"\\[A-Za-z]+\Z")
_RELATION = re.compile(r"[!<>/]=\Z|=<\Z|<>\Z")
_ARROW = re.compile(r"[-=]>\Z")
_OPERATOR_WORD = re.compile(
    r"(?i:(?<![A-Za-z])(?:a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|log|ln|lg|exp|sqrt|cbrt"
    r"|mod|modulo|div|plus|minus|negative|times|over|than|least|most|not|never|\w+n['\u2019]t|root|gcd|lcm"
    r"|(?:root|half|log|logarithm|square|cube|factorial|percent|multiple|power) of"
    r"|(?:divided|multiplied|increased|decreased|reduced) by|x))\Z"
)
_LOG_BASE = re.compile(r"log\s*_\s*(?:\w+|\{[^{}]*\})\Z")
_FRACTION_START = re.compile(r"\\(?:[dtc]?frac|[dt]?binom)\s*\w+\Z")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}\Z")
_LATEX_SPACE = re.compile(r"\\[,;:! ]\Z")
_CLOSED_EMPHASIS = re.compile(
    r"(?<![\w)\]}^*_\\])(\*{1,3}|_{1,3})(?=[^\s*_])[^\n]*(?<=[^\s*_])(?P<closing>\1)\Z"
)
_OTHER_BOX = re.compile(r"\\(?:fbox|framebox)(?=\s*\{)")
_BARE_BOX = re.compile(r"\\boxed\s*(-?(?:\d[\d.,/]*\d|\d)|[A-Za-z](?=[\s$.\\)]|\Z))(?![\w{\\^/])")
_LONE_LETTER = re.compile(r"(?<![A-Za-z'\u2019])[A-Za-z]\Z")
_MARKUP = ("**", "*", "__", "_", "`", "$$", "$", '"', "'", "\u201d", "\u2019")
# A bracket must open directly before the number: "(15)" is 15, "(10, 15)" and "f(x, 15)" are not.
_BRACKETS = (
    ("\\)", "\\("),
    ("\\]", "\\["),
    (")", "("),
    ("]", "["),
    ("}", "\\boxed{"),
)
_BEFORE_NUMBER = (*_MARKUP, "\u201c", "\u2018", "\u20ac", "\u00a3", "\\$")
_EMPHASIS = frozenset(("**", "*", "__", "_"))
"""Markup that is also a sign of mathematics: before a number it needs its partner behind it."""


def extract(text: str, rule: Extraction, *, marker: str = ":") -> str | None:
    """Return the part of ``text`` that is its answer by ``rule``, or None if it has none."""
    if len(text) > MAX_COMPLETION_CHARS:
        return None
    match rule:
        case "whole":
            return text
        case "after_last_marker":
            return after_last_marker(without_thinking(text), marker)
        case "last_number":
            return last_number(without_thinking(text))
        case "final_number":
            return final_number(without_thinking(text))
        case "boxed":
            return last_boxed(with_braces(without_thinking(text)) or "")
        case _:
            assert_never(rule)


def without_thinking(text: str) -> str:
    """Return ``text`` without what stands in ``<think>``, closed or not.

    A chat template may have put the opening tag into the prompt, so a lone ``</think>`` ends the
    thinking too.
    """
    _, _, after = text.rpartition("</think>")
    return after.partition("<think>")[0]


def after_last_marker(text: str, marker: str) -> str:
    """Return what follows the last ``marker``; the whole text where there is none."""
    return text.rpartition(marker)[2]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``; None if there is none or it never closes."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    rest = text[start + len("\\boxed") :].lstrip(" ")
    if not rest.startswith("{"):
        return None
    depth = 0
    escaped = False
    for position, char in enumerate(rest):
        if escaped or char == "\\":
            escaped = not escaped
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return rest[1:position]
    return None


def with_braces(text: str) -> str | None:
    r"""Return ``text`` with one way to box: ``\boxed{5}`` for ``\boxed 5`` and ``\fbox{5}``.

    None where nothing is boxed.
    """
    if "\\boxed" not in text and "\\fbox" not in text and "\\framebox" not in text:
        return None
    return _BARE_BOX.sub(r"\\boxed{\1}", _OTHER_BOX.sub(r"\\boxed", text))


def last_number(text: str) -> str | None:
    """Return the last number anywhere in ``text``.

    A sign counts unless it stands directly behind something it could subtract from: ``10-5``
    gives 5. Loose: text behind the number, and a list of guesses, are both accepted.
    """
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    start = last.start()
    # The "**" of "**-5**" is nothing to subtract from.
    head = text[max(0, start - 9) : max(0, start - 1)].rstrip("*_`$\"'")
    if start and text[start - 1] in _SIGNS and not _is_operand(head[-1:]):
        start -= 1
    return text[start : last.end()]


def final_number(text: str) -> str | None:
    """Return the number that ``text`` ends with, sign included, or None.

    Behind it may stand only white space, a full stop or exclamation mark, and closing markup.
    Before it may not stand an operator, a relation other than equality, a function, a letter, or
    a digit with a comma: then the text ends with an expression, a name or a list.
    """
    head, closers, emphasis = _peel_end(text.rstrip()[-MAX_NUMBER_CHARS:])
    match = _NUMBER_AT_END.search(head)
    if match is None or (match.start() == 0 and len(text.rstrip()) > MAX_NUMBER_CHARS):
        return None
    number = match.group()
    context, sign = _split_sign(head[: match.start()], closers, emphasis)
    if context is None or _continues(context, number):
        return None
    return sign + number


def _peel_end(text: str) -> tuple[str, list[str], list[str]]:
    """Return ``text`` without closing markup.

    Then the openers its brackets need, innermost last, and the emphasis it closes.
    """
    openers: list[str] = []
    emphasis: list[str] = []
    while True:
        text = text.rstrip()
        if tag := _CLOSING_TAG.search(text):
            text = text[: tag.start()]
        elif text.endswith((".", "!")) and not text.endswith(".."):
            text = text[:-1]
        elif bracket := next((pair for pair in _BRACKETS if text.endswith(pair[0])), None):
            text = text.removesuffix(bracket[0])
            openers.append(bracket[1])
        elif markup := next((mark for mark in _MARKUP if text.endswith(mark)), None):
            text = text.removesuffix(markup)
            emphasis.extend([markup] if markup in _EMPHASIS else [])
        else:
            return text, openers, emphasis


def _split_sign(before: str, brackets: list[str], emphasis: list[str]) -> tuple[str | None, str]:
    r"""Split the text before a number into what precedes it, markup off, and its sign.

    The sign may stand inside or outside of markup: ``**-5**``, ``-\boxed{5}``, ``-$5``. The text
    is None where the sign is an operator, or where a bracket did not open just here.
    """
    signs = ""
    openers, marks = list(brackets), list(emphasis)
    while True:
        before = _peel_openers(before, openers, marks)
        head = before.rstrip(" ")
        if head[-1:] not in _SIGNS or not head:
            return (None if openers else before), signs
        # An inner sign is judged by what stands before the markup around it.
        outside = _peel_openers(head[:-1], list(openers), list(marks))
        if signs or not _is_sign(outside, detached=head != before):
            return None, ""
        signs = "+" if head[-1] == "+" else "-"
        before = head[:-1]


def _is_sign(ahead: str, *, detached: bool) -> bool:
    """Whether a plus or minus behind ``ahead`` is the number's own, and no operator."""
    operand = _without_closing(ahead.rstrip())
    if detached:
        # "- 5" is a sign only where nothing could be subtracted from.
        return not operand or operand[-1] in "=:" or ahead.endswith("\n")
    if not _is_operand(operand[-1:]):
        return True
    # "is -5" has a sign; "x -5" may be a difference.
    return ahead != ahead.rstrip() and operand[-1].isalpha() and not _LONE_LETTER.search(operand)


def _without_closing(head: str) -> str:
    """Return ``head`` without the last ``**`` of ``**Answer:**``."""
    closed = _CLOSED_EMPHASIS.search(head)
    return head[: closed.start("closing")] if closed else head


def _is_operand(char: str) -> bool:
    return char != "" and (char.isalnum() or char in ")]}%_." or _is_operator(char))


def _is_operator(char: str) -> bool:
    is_symbol = unicodedata.category(char) == "Sm" and char not in _LEADS_TO_RESULT
    return char in _OPERATORS or is_symbol


def _peel_openers(before: str, brackets: list[str], emphasis: list[str]) -> str:
    """Return ``before`` without opening markup; takes what was opened out of the two lists."""
    while True:
        before_space = before.rstrip(" ")
        marks = (mark for mark in _BEFORE_NUMBER if before.endswith(mark))
        mark = next((mark for mark in marks if mark not in _EMPHASIS or mark in emphasis), None)
        if brackets and before_space.endswith(brackets[-1]):
            before = before_space.removesuffix(brackets.pop())
        elif tag := _OPENING_TAG.search(before):
            before = before[: tag.start()]
        elif mark is not None:
            before = before.removesuffix(mark)
            if mark in _EMPHASIS:
                emphasis.remove(mark)
        else:
            return before


def _continues(before: str, number: str) -> bool:
    """Whether ``number`` goes on with ``before`` as one expression, name or list."""
    while space := _LATEX_SPACE.search(before):
        before = before[: space.start()] + " "
    if not before:
        return False
    last, head = before[-1], _without_closing(before.rstrip())
    if last.isalnum() or last in "_.)]}\\!":
        return True
    if last in ",:" and before[-2:-1].isdigit():
        return True
    if "\n" in before[len(before.rstrip()) :]:
        # Markdown may end a line with "**" or "---", and a quote may begin with ">".
        if head[-1:] in DASHES:
            ahead = head[:-1].rstrip()
            return ahead != "" and ahead[-1] not in DASHES and _is_operand(ahead[-1])
        return head[-1:] not in {"", "*", ">", "|"} and _is_operator(head[-1])
    return _is_operand_of(head) or _is_part_of_number(head, number)


def _is_operand_of(head: str) -> bool:
    """Whether ``head`` ends with an operator, a relation or a function of what follows."""
    if not head or _ARROW.search(head):
        return False
    if _COMMAND.search(head):
        return _RESULT_COMMAND.search(head) is None
    if _OPERATOR_WORD.search(head) or _LOG_BASE.search(head) or _FRACTION_START.search(head):
        return True
    if _RELATION.search(head):
        return True
    is_ratio = (
        head[-1] == ":" and head[:-1] != head[:-1].rstrip() and head[:-1].rstrip()[-1:].isdigit()
    )
    return is_ratio or _is_operator(head[-1])


def _is_part_of_number(head: str, number: str) -> bool:
    """Whether a number and a space stand before: of ``12 000`` or of ``1 1/2``."""
    if not head[-1:].isdecimal():
        # "\u00bd" is numeric, and belongs to what follows.
        return head[-1:].isnumeric()
    whole = re.match(r"\d*", number)
    assert whole is not None
    is_group = len(whole.group()) == 3 and _THOUSANDS.search(head) is not None  # noqa: PLR2004 - digits of a group
    return is_group or "/" in number or number.startswith(".")
