"""Which part of a completion is its answer.

Pure string work, linear in the completion but for lines no answer is as long as.
"""

from __future__ import annotations

import re
from typing import Literal, assert_never

from headrace.verifiers.extract import MAX_COMPLETION_CHARS, last_boxed, without_thinking

MAX_LINE = 1_000
"""Markup of a longer line stays: no answer is so long, and the search for pairs is quadratic."""
_MARKER = re.compile(r"(?i:(?<![a-z])answer(?![a-z])[*_]*\s*(?:is|:|=)+\s*:?)")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;]|\\\(|\\\)|\\q?quad(?![a-z])|\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|and|or)+"
)
_MAX_BOXES = 20
# What few-shot prompts of mathematics teach policies to say behind an answer.
_HOPE = re.compile(r"\.?\s*I hope (?:it|this) is correct\.?\s*\Z")
# Markdown opens before a character and closes behind one: "2*3*4" and "2**3" stay products.
_EMPHASIS = re.compile(
    r"(?<![\w)\]}^*_\\])(\*{1,3}|_{1,3})(?=[^\s*_])(.+?)(?<=[^\s*_])\1(?![\w(*])"
)


def find_answer(completion: str, rule: Literal["answer", "boxed", "whole"]) -> str | None:
    """Return the text of the answer by ``rule``, or None."""
    if len(completion) > MAX_COMPLETION_CHARS:
        return None
    text = without_thinking(completion)
    match rule:
        case "whole":
            return completion
        case "boxed":
            return _last_boxes(text)
        case "answer":
            if "\\boxed" in text:
                return _last_boxes(text)
            text = _tagged(text)
            return _after_marker(text) or _last_line(text)
        case _:
            assert_never(rule)


def _last_boxes(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{}``, or in all that it ends a list with.

    ``\boxed{1} and \boxed{2}`` says two values, of which the second alone is not the answer.
    """
    contents: list[str] = []
    end = len(text)
    for _ in range(_MAX_BOXES):
        start = text.rfind("\\boxed", 0, end)
        content = last_boxed(text[start:end]) if start >= 0 else None
        if content is None:
            return ", ".join(contents) if contents else None
        behind = text.index("{", start) + len(content) + 2
        if contents and not _BETWEEN_BOXES.fullmatch(text, behind, end):
            break
        if content not in contents:
            contents.insert(0, content)
        end = start
    return ", ".join(contents)


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
    line = _HOPE.sub("", line)
    if not line.strip(" \t\r*_"):
        # "**Answer:**\n5": the answer stands below.
        return without_emphasis(below.strip().partition("\n")[0])
    plain = without_emphasis(head[-MAX_LINE // 2 :] + line)
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
    if len(line) > MAX_LINE:
        return line
    while (plain := _EMPHASIS.sub(r"\2", line)) != line:
        line = plain
    return line
