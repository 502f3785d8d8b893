"""Which part of a completion is the program, and what is run with it.

Pure string work, linear in the text: a policy's code is never parsed here, let alone run. What is
thought in ``<think>`` is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from headrace.config import CodeExtraction
from headrace.verifiers.code.task import CodeTask
from headrace.verifiers.extract import MAX_COMPLETION_CHARS, without_thinking

_FENCE = re.compile(r"^[ ]{0,3}(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_LANGUAGES = {
    "python": frozenset(("python", "py", "python3", "py3")),
    "cpp": frozenset(("cpp", "c++", "cc", "cxx")),
    "javascript": frozenset(("javascript", "js", "node")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What was found: code, or why there is none."""

    source: str | None
    problem: str = ""
    """One line for people, where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    language: str
    source: str
    is_closed: bool


def find_program(
    completion: str, rule: CodeExtraction, *, language: str, unclosed_is_code: bool
) -> Program:
    """Return the program that ``completion`` is, or holds between fences.

    A block counts if its tag names ``language``; where none does, those without a tag count. A
    block of another language never does.
    """
    if len(completion) > MAX_COMPLETION_CHARS:
        return Program(source=None, problem=f"longer than {MAX_COMPLETION_CHARS} characters")
    text = without_thinking(completion)
    blocks = _of_language(_blocks(text), language)
    problem = "" if rule == "whole" else _fault(blocks, rule, language, unclosed_is_code)
    if problem:
        return Program(source=None, problem=problem)
    match rule:
        case "whole":
            source = text
        case "last_block":
            source = blocks[-1].source
        case "first_block" | "only_block":
            source = blocks[0].source
        case _:
            assert_never(rule)
    if not source.strip():
        return Program(source=None, problem="the code is empty")
    return Program(source=source)


def defines(source: str, name: str) -> bool:
    """Whether ``source`` has a line that defines ``name`` at its top level, or assigns it."""
    name = re.escape(name)
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*(?::[^=\n]*)?=[^=]"
    return re.search(pattern, source, re.MULTILINE) is not None


def assembled(task: CodeTask, program: str) -> str:
    """Return what is run: the task's prelude, its header where that is needed, the program."""
    parts = [task.prelude, program]
    if task.header:
        entry_point = task.entry_point or ""
        continues = not (defines(program, entry_point) or defines(program, "Solution"))
        parts = [task.prelude, task.header + program if continues else f"{task.header}\n{program}"]
    return "\n".join(part for part in parts if part)


def found_as(function: str, source: str) -> str:
    """Return the method of ``class Solution`` where only that can be meant."""
    if "." not in function and not defines(source, function) and defines(source, "Solution"):
        return f"Solution.{function}"
    return function


def _fault(
    blocks: Sequence[_Block], rule: CodeExtraction, language: str, unclosed_is_code: bool
) -> str:
    """Return why none of ``blocks`` is the program, or the empty text."""
    if not unclosed_is_code and any(not block.is_closed for block in blocks):
        return "a code block is not closed"
    if not blocks:
        return f"no code block of {language} or without a language"
    if rule == "only_block" and len(blocks) > 1:
        return f"{len(blocks)} code blocks where one is asked"
    return ""


def _blocks(text: str) -> list[_Block]:
    """Return the fenced blocks of ``text`` in order; a fence is closed by one at least as long."""
    found: list[_Block] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        marks, info = fence["marks"], fence["info"].strip()
        if opened is None:
            # Markdown: what is opened by backticks has none in its tag; "```x```" is inline code.
            opened = None if marks[0] == "`" and "`" in info else fence
        elif not info and marks.startswith(opened["marks"]):
            found.append(_block(opened, text[opened.end() + 1 : fence.start()], is_closed=True))
            opened = None
    if opened is not None:
        found.append(_block(opened, text[opened.end() + 1 :], is_closed=False))
    return found


def _block(opened: re.Match[str], source: str, *, is_closed: bool) -> _Block:
    words = opened["info"].replace("{", " ").replace("}", " ").replace(".", " ").split()
    language = words[0].lower() if words else ""
    return _Block(language=language, source=source, is_closed=is_closed)


def _of_language(blocks: Sequence[_Block], language: str) -> list[_Block]:
    names = _LANGUAGES.get(language, frozenset((language,)))
    tagged = [block for block in blocks if block.language in names]
    return tagged or [block for block in blocks if not block.language]
