r"""Math as text: which part of a completion is the answer, what is refused, and how it is spelt.

Pure string work in the parent process. Owns the caps that hold before any algebra system sees a
model's text: size, depth, exponents, factorials, sums. A text over a cap is wrong, at once, so
that no answer is paid, or left unscored, for being expensive. What an expression is worth is
`grading`'s business.
"""

from __future__ import annotations

import re
from typing import Literal, assert_never

from headrace.verifiers.extract import MAX_COMPLETION_CHARS, last_boxed, without_thinking

MAX_CHARS = 500
MAX_DEPTH = 8
"""Of brackets. The time of math-verify's parser grows exponentially with it: 1.3 s at 10."""
MAX_BARS = 6
"""Absolute value bars: it is the parser that finds out which of them open."""
MAX_EXPONENT = 10_000
"""Also bounds the product of the numbers in one exponent, and of powers inside powers."""
MAX_FACTORIAL = 5_000
MAX_POWERS = 40

_MARKER = re.compile(r"(?i:(?<![a-z])answer(?![a-z])[*_]*\s*(?:is|:|=)+\s*:?)")
# Markdown opens before a character and closes behind one: "2*3*4" and "2**3" stay products.
_EMPHASIS = re.compile(
    r"(?<![\w)\]}^*_\\])(\*{1,3}|_{1,3})(?=[^\s*_])(.+?)(?<=[^\s*_])\1(?![\w(*])"
)
_LOOPS = re.compile(r"\\(?:sum|prod|i*int|oint|lim|limsup|liminf|frac\s*\{\s*d\s*\})(?![a-z])")
_NESTED_SUBSCRIPT = re.compile(r"_\s*(?:\{[^{}]*_|[^\s{}]\s*_)")
_INTEGER = re.compile(r"\d+")
_PAIRS = {"{": "}", "(": ")", "[": "]"}
_EXPENSIVE_INSIDE_POWER = re.compile(r"!|\\binom|\\exp|\\sum|\\prod|\\int")


def find_answer(completion: str, rule: Literal["answer", "boxed", "whole"]) -> str | None:
    """Return the text of the answer by ``rule``, or None."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return None
    text = without_thinking(completion)
    match rule:
        case "whole":
            return completion
        case "boxed":
            return last_boxed(text)
        case "answer":
            if "\\boxed" in text:
                return last_boxed(text)
            text = _tagged(text)
            return _after_marker(text) or _last_line(text)
        case _:
            assert_never(rule)


def _tagged(text: str) -> str:
    """Return what stands in the last ``<answer>...</answer>``; without a closed one, the text."""
    before, closing, _ = text.rpartition("</answer>")
    return before.rpartition("<answer>")[2] if closing else text


def _after_marker(text: str) -> str | None:
    """Return the rest of the line after the last "answer is" or "answer:"."""
    last = _last_marker(text)
    if last is None:
        return None
    start = text.rfind("\n", 0, last.start()) + 1
    head, rest = text[start : last.end()], text[last.end() :]
    line, _, below = rest.partition("\n")
    if not line.strip(" \t\r*_"):
        # "**Answer:**\n5": the answer stands below.
        return without_emphasis(below.strip().partition("\n")[0])
    plain = without_emphasis(head[-MAX_CHARS:] + line)
    last = _last_marker(plain)
    return (line if last is None else plain[last.end() :]).strip()


def _last_marker(text: str) -> re.Match[str] | None:
    last = None
    for match in _MARKER.finditer(text):
        last = match
    return last


def _last_line(text: str) -> str | None:
    """Return the last line; where it holds exactly one ``$...$``, what stands in it."""
    line = without_emphasis(text.rstrip().rpartition("\n")[2])
    parts = line.split("$")
    one_formula = len(parts) == 3  # noqa: PLR2004 - before, inside and after one pair of dollars
    return parts[1] if one_formula else line or None


def without_emphasis(line: str) -> str:
    """Return a line without Markdown's ``**`` and ``*`` around words and numbers."""
    if len(line) > 2 * MAX_CHARS:
        # No answer is so long, and the search for pairs is quadratic.
        return line
    while (plain := _EMPHASIS.sub(r"\2", line)) != line:
        line = plain
    return line


def has_loops(text: str) -> bool:
    """Whether a sum, product, integral, limit or derivative stands in ``text``."""
    return _LOOPS.search(text) is not None


def over_cap(text: str, *, loops_allowed: bool) -> str | None:
    """Return what makes ``text`` too expensive to look at, or None.

    ``loops_allowed``: sums, products, integrals and limits may stand in it, because the expected
    answer has one too.
    """
    if len(text) > MAX_CHARS:
        return f"{len(text)} characters; at most {MAX_CHARS} are read"
    if _depth(text) > MAX_DEPTH:
        return f"brackets deeper than {MAX_DEPTH}"
    if not loops_allowed and has_loops(text):
        return "an unevaluated sum, product, integral, limit or derivative"
    return _parser_over_cap(text) or _power_over_cap(text) or _factorial_over_cap(text)


def _parser_over_cap(text: str) -> str | None:
    """Name what makes math-verify's parser or evaluation slow, other than numbers."""
    if text.count("|") > MAX_BARS:
        return f"more than {MAX_BARS} bars"
    if len(_LOOPS.findall(text)) > 1:
        return "a sum, product, integral, limit or derivative of another"
    if text.count("\\exp") > 1 or _NESTED_SUBSCRIPT.search(text):
        return "an exponential of an exponential, or a subscript of a subscript"
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    return deepest


def _power_over_cap(text: str) -> str | None:
    if text.count("^") > MAX_POWERS:
        return f"more than {MAX_POWERS} powers"
    nested = False
    product = 1
    for position in (index for index, char in enumerate(text) if char == "^"):
        exponent, end = _group_after(text, position + 1)
        size = _product(exponent)
        if size > MAX_EXPONENT:
            return f"an exponent above {MAX_EXPONENT}"
        if _EXPENSIVE_INSIDE_POWER.search(exponent) or _is_tower(exponent):
            return "a tower of powers"
        if text[end:].lstrip().startswith("^"):
            return "a tower of powers"
        nested = nested or "^" in _group_before(text, position)
        product *= size
    if nested and product > MAX_EXPONENT:
        return "powers of powers"
    return None


def _is_tower(exponent: str) -> bool:
    """Whether an exponent has a power in it, unless that is of a letter, as in ``e^{x^2}``."""
    inner = [index for index, char in enumerate(exponent) if char == "^"]
    if len(inner) > 1:
        return True
    return any(not exponent[:index].rstrip()[-1:].isalpha() for index in inner)


def _factorial_over_cap(text: str) -> str | None:
    for position in (index for index, char in enumerate(text) if char == "!"):
        operand = _group_before(text, position)
        if "!" in operand or "^" in operand or text[position + 1 :].lstrip().startswith("!"):
            return "a factorial of a factorial or of a power"
        if _product(operand) > MAX_FACTORIAL:
            return f"a factorial above {MAX_FACTORIAL}"
    for match in re.finditer(r"\\[dt]?binom", text):
        upper, end = _group_after(text, match.end())
        lower, _ = _group_after(text, end)
        if "^" in upper + lower or "!" in upper + lower or _product(upper) > MAX_FACTORIAL:
            return f"a binomial coefficient above {MAX_FACTORIAL}"
    return None


def _product(text: str) -> int:
    """Return the product of the integers in ``text``, as a bound on what it is worth."""
    product = 1
    for match in _INTEGER.finditer(text):
        digits = match.group()
        product *= max(1, int(digits)) if len(digits) < len(str(MAX_EXPONENT)) + 1 else 10**9
        if product > MAX_EXPONENT:
            return product
    return product


def _group_after(text: str, start: int) -> tuple[str, int]:
    """Return the bracketed group, number or single character at ``start``, and where it ends."""
    while start < len(text) and text[start] in " -+":
        start += 1
    if start >= len(text):
        return "", start
    if text[start] in _PAIRS:
        return _balanced(text, start)
    match = re.compile(r"\d+(?:\.\d+)?|\\[A-Za-z]+|.", re.DOTALL).match(text, start)
    assert match is not None
    return match.group(), match.end()


def _balanced(text: str, start: int) -> tuple[str, int]:
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "{([") - (text[position] in "})]")
        if depth == 0:
            return text[start + 1 : position], position + 1
    return text[start + 1 :], len(text)


def _group_before(text: str, end: int) -> str:
    """Return the bracketed group or number that ends before ``end``."""
    head = text[:end].rstrip()
    if not head or head[-1] not in "})]":
        match = re.search(r"(?:\d+|[A-Za-z])\Z", head[-MAX_CHARS:])
        return match.group() if match else ""
    depth = 0
    for position in range(len(head) - 1, -1, -1):
        depth += (head[position] in "})]") - (head[position] in "{([")
        if depth == 0:
            return head[position + 1 : -1]
    return head
