"""Which part of a completion is its answer.

Pure string work, linear in the completion but for lines no answer is as long as.
"""

from __future__ import annotations

import re
from typing import Literal, assert_never

from headrace.verifiers.extract import (
    MAX_COMPLETION_CHARS,
    last_boxed,
    with_braces,
    without_thinking,
)
from headrace.verifiers.math.sentences import MAX_LINE, answer_of, without_reason

_MARKER = re.compile(
    r"(?i:(?<![a-z])answer(?![a-z])[*_]*\s*"
    r"(?:(?P<verb>(?:is|equals|(?:should|would|must|will|can only) be)(?![a-z])):?|[:=\uff1a]+)"
    # Chinese for "answer", and for "is".
    r"\s*:?)|\u7b54\u6848\s*(?:[:=\uff1a]|[\u662f\u4e3a]\s*[:\uff1a]?)"
)
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;]|\\\(|\\\)|\\q?quad(?![a-z])|\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|and|or)*"
)
_MAX_BOXES = 20
_NAMED = re.compile(r"\s*[A-Za-z]\s*=?\s*")
_HASHES = re.compile(r"#{4}\s*([^#\s].*)")
_BLOCK_AT_END = re.compile(
    r"(?:\\\[\s*([^\n]+?)\s*\\\]|\$\$\s*\n\s*([^\n$]+?)\s*\$\$|```[a-z]*\s*([^\n`]+?)\s*```)[.\s]*\Z"
)
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
            return _last_boxes(with_braces(text) or text)
        case "answer":
            if (boxes := with_braces(text)) is not None:
                return _last_boxes(boxes)
            text = _without_fence(_tagged(text))
            return _after_hashes(text) or _after_marker(text) or _last_line(text)
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
    for name in ("ANSWER", "Answer"):
        text = text.replace(f"<{name}>", "<answer>").replace(f"</{name}>", "</answer>")
    before, closing, _ = text.rpartition("</answer>")
    return before.rpartition("<answer>")[2] if closing else text


def _without_fence(text: str) -> str:
    """Return the content of a display or code block that ends the text, else the text."""
    plain = text.rstrip()
    block = _BLOCK_AT_END.search(plain, max(0, len(plain) - MAX_LINE))
    if block is None:
        return text
    return f"{plain[: block.start()]}\n{block[1] or block[2] or block[3]}"


def _after_hashes(text: str) -> str | None:
    """Return what stands behind the ``####`` of the last line, as GSM8K writes answers."""
    hashed = _HASHES.fullmatch(text.rstrip().rpartition("\n")[2].strip())
    if hashed is None or _MARKER.search(hashed[1]):
        return None
    return answer_of(without_emphasis(hashed[1]))


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
    if last is None:
        return line.strip()
    # What opened before the marker closes behind it: "\\text{Answer: }5$".
    said = plain[last.end() :].strip().removeprefix("}").strip()
    said = said.removesuffix("}") if said.count("}") > said.count("{") else said
    said = said.removesuffix("$") if said.count("$") % 2 and said.endswith("$") else said
    return _said(said, is_sentence=last["verb"] is not None)


def _said(text: str, *, is_sentence: bool) -> str:
    """Return the answer in what follows a marker; a formula alone is as it stands."""
    if len(text) > MAX_LINE:
        return text
    parts = text.split("$")
    if len(parts) == 3 and not parts[2].strip(" .!"):  # noqa: PLR2004 - before, inside and after one pair of dollars
        return text if parts[0].strip() else parts[1]
    return answer_of(without_reason(text), is_sentence=is_sentence)


def _last_marker(text: str) -> re.Match[str] | None:
    last = None
    if "answer" not in text.casefold() and "\u7b54\u6848" not in text:
        return None  # looked for at once: a pattern is tried at every character
    for match in _MARKER.finditer(text):
        last = match
    return last


def _last_line(text: str) -> str | None:
    """Return the last line; where it holds exactly one ``$...$``, what stands in it."""
    line = without_emphasis(text.rstrip().rpartition("\n")[2])
    parts = line.split("$")
    if len(parts) == 3 and not _NAMED.fullmatch(parts[1]):  # noqa: PLR2004 - before, inside and after one pair of dollars
        return parts[1]
    # "$x$ = 5" is one formula, too.
    plain = line.replace("$", "") if len(parts) == 3 else line  # noqa: PLR2004 - as above
    return answer_of(plain) or None


def without_emphasis(line: str) -> str:
    """Return a line without Markdown's ``**`` and ``*`` around words and numbers."""
    if len(line) > MAX_LINE:
        # No answer is so long, and the search for pairs is quadratic.
        return line
    while (plain := _EMPHASIS.sub(r"\2", line)) != line:
        line = plain
    return line
