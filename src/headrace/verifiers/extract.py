"""Which part of a completion is its answer.

Pure string work, linear in the text, with a cap on size. The policy is the attacker: a rule that
cannot tell an answer from something else returns None, and None is never equal to anything.
docs/VERIFIERS.md has every rule with examples. What the text means is not decided here.
"""

from __future__ import annotations

import re
from typing import assert_never

from headrace.config import Extraction

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
_SIGNS = "+-\u2212"
_OPERATORS = frozenset("+-\u2212*/^\u00d7\u00f7\u00b7%")
_MARKUP = ("**", "*", "__", "_", "`", "$$", "$", '"', "'", "\u201d", "\u2019")
# A bracket must open directly before the number: "(15)" is 15, "(10, 15)" and "f(x, 15)" are not.
_BRACKETS = (
    ("\\)", "\\("),
    ("\\]", "\\["),
    (")", "("),
    ("]", "["),
    ("}", "\\boxed{"),
)
_BEFORE_NUMBER = (*_MARKUP, "\u201c", "\u2018", "\u20ac", "\u00a3")


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
            return last_boxed(without_thinking(text))
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
    if start and text[start - 1] in _SIGNS and not _is_operand(text[max(0, start - 2) : start - 1]):
        start -= 1
    return text[start : last.end()]


def final_number(text: str) -> str | None:
    """Return the number that ``text`` ends with, sign included, or None.

    Behind it may stand only white space, a full stop or exclamation mark, and closing markup.
    Before it may not stand an operator, a letter, or a digit with a comma: then the text ends
    with an expression, a name or a list.
    """
    head, closers = _peel_end(text.rstrip()[-MAX_NUMBER_CHARS:])
    match = _NUMBER_AT_END.search(head)
    if match is None or (match.start() == 0 and len(text.rstrip()) > MAX_NUMBER_CHARS):
        return None
    before = head[: match.start()]
    unsigned, sign = _split_sign(before)
    if sign is None:
        return None
    context = _peel_openers(unsigned, closers)
    if context is None or _continues(context, signed=bool(sign)):
        return None
    return sign + match.group()


def _peel_end(text: str) -> tuple[str, list[str]]:
    """Return ``text`` without closing markup, and the openers its brackets need, innermost last."""
    openers: list[str] = []
    while True:
        text = text.rstrip()
        if tag := _CLOSING_TAG.search(text):
            text = text[: tag.start()]
        elif text.endswith((".", "!")):
            text = text[:-1]
        elif bracket := next((pair for pair in _BRACKETS if text.endswith(pair[0])), None):
            text = text.removesuffix(bracket[0])
            openers.append(bracket[1])
        elif markup := next((mark for mark in _MARKUP if text.endswith(mark)), None):
            text = text.removesuffix(markup)
        else:
            return text, openers


def _split_sign(before: str) -> tuple[str, str | None]:
    """Split the text before a number into what precedes its sign and the sign.

    The sign is "" where there is none, and None where it is an operator.
    """
    head = before.rstrip(" ")
    if not head or head[-1] not in _SIGNS:
        return before, ""
    detached = head != before
    ahead = head[:-1]
    operand = ahead.rstrip()
    if detached:
        # "- 5" is a sign only where nothing could be subtracted from.
        is_sign = not operand or operand[-1] in "=:" or ahead.endswith("\n")
    else:
        is_sign = not _is_operand(operand[-1:]) or (operand != ahead and operand[-1].isalpha())
    sign = "" if head[-1] == "+" else "-"
    return ahead, sign if is_sign else None


def _is_operand(char: str) -> bool:
    return char != "" and (char.isalnum() or char in ")]}%_." or char in _OPERATORS)


def _peel_openers(before: str, brackets: list[str]) -> str | None:
    """Return ``before`` without opening markup; None where a bracket did not open just here."""
    wanted = list(brackets)
    while True:
        before_space = before.rstrip(" ")
        if wanted and before_space.endswith(wanted[-1]):
            before = before_space.removesuffix(wanted.pop())
        elif tag := _OPENING_TAG.search(before):
            before = before[: tag.start()]
        elif mark := next((mark for mark in _BEFORE_NUMBER if before.endswith(mark)), None):
            before = before.removesuffix(mark)
        else:
            return None if wanted else before


def _continues(before: str, *, signed: bool) -> bool:
    """Whether the number goes on with ``before`` as one expression, name or list."""
    if not before or before[-1] == "\n":
        return False
    last, head = before[-1], before.rstrip()
    if last.isalnum() or last in "_.)]}\\":
        return True
    if last in ",:" and before[-2:-1].isdigit():
        return True
    return not signed and head[-1:] in _OPERATORS
