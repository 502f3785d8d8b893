r"""From text to tokens.

Linear in the text. Owns: what is no token of mathematics raises `Unreadable`; nothing is skipped
but white space, spacing commands and the sizes of brackets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headrace.verifiers.math import symbols
from headrace.verifiers.math.tree import unreadable

Kind = Literal[
    "number", "letter", "constant", "function", "open", "close", "bar",
    "operator", "relation", "command", "environment", "separator", "end",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of an answer."""

    kind: Kind
    text: str
    """What it stands for, by the tables of `symbols`: ``\\leq`` is ``<=``."""
    spaced: bool = False
    """Whether white space stands before it."""


_SPACE = re.compile(r"(?:\s|~)+")
NUMBER = re.compile(
    r"(?:(?:\d{1,3}(?:\{,\}\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
    r"(?P<repeating>(?<=[.\d])(?:\\(?:overline|bar|dot)\s*\{?\d{1,40}\}?|\(\d{1,40}\)))?"
    r"(?P<exponent>[eE][+-]?\d+(?![\w.]))?"
)
_WORD = re.compile(r"[A-Za-z]+")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_GROUP = re.compile(r"\s*\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\s*\{\s*([a-z]+)\*?\s*\}(?:\s*\{[lcr|\s]*\})?")
_BLACKBOARD = re.compile(r"\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))")
_LETTER = re.compile(r"\s*([A-Za-z])")
_LETTERS = re.compile(r"\s*([A-Za-z]+)")
_RELATION = re.compile(r"<=|>=|=<|!=|==|[<>=]")
_PRIMES = re.compile(r"'+")
MAX_PRODUCT_LETTERS = 8
"""A longer run of letters is a word, and no product."""
_MATRICES = frozenset(
    ("matrix", "pmatrix", "bmatrix", "vmatrix", "Bmatrix", "smallmatrix", "array")
)
_STRUCTURES = (
    symbols.FRACTIONS | symbols.BINOMIALS | symbols.EMPTY | {"\\\\", "degree", "circ", "prime"}
)


def tokenize(text: str) -> list[Token]:
    """Return the tokens of ``text``, an ``end`` last. Raises Unreadable."""
    return list(_Lexer(text).tokens())


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._out: list[Token] = []
        self._spaced = False

    def tokens(self) -> list[Token]:
        while self._at < len(self._text):
            if space := _SPACE.match(self._text, self._at):
                self._at = space.end()
                self._spaced = True
                continue
            self._next()
        self._emit("end", "")
        return self._out

    def _emit(self, kind: Kind, text: str) -> None:
        self._out.append(Token(kind, text, self._spaced))
        self._spaced = False

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _next(self) -> None:
        char = self._text[self._at]
        if char == "\\":
            command = self._take(_COMMAND)
            if command is None:
                unreadable("a backslash at the end")
            self._command(command[1] if command[1].isalpha() else command[0])
        elif number := self._number():
            self._emit("number", number)
        elif word := self._take(_WORD):
            self._word(word[0])
        elif relation := self._take(_RELATION):
            self._emit("relation", symbols.RELATIONS[relation[0]])
        elif primes := self._take(_PRIMES):
            self._emit("operator", "'" * len(primes[0]))
        else:
            self._at += 1
            self._character(char)

    def _number(self) -> str | None:
        found = NUMBER.match(self._text, self._at)
        if found is None:
            return None
        end = found.end()
        if found["repeating"] and "." not in found[0][: found.start("repeating") - found.start()]:
            # "3(4)" is a product, and a bar over digits is no repeating decimal without a point.
            end = found.start("repeating")
        self._at = end
        return self._text[found.start() : end]

    def _character(self, char: str) -> None:
        if char in "+-*/^_!%":
            self._emit("operator", char)
        elif char in symbols.OPENERS:
            self._emit("open", symbols.OPENERS[char])
        elif char in symbols.CLOSERS:
            self._emit("close", symbols.CLOSERS[char])
        elif char == "|":
            self._emit("bar", "|")
        elif char in ",;&:":
            self._emit("separator", char)
        else:
            unreadable(f"{char!r} is no sign of mathematics")

    def _word(self, word: str) -> None:
        known = symbols.ALIASES.get(word, word)
        if known in symbols.FUNCTIONS:
            self._emit("function", known)
        elif word in symbols.WORD_CONSTANTS:
            self._emit("constant", symbols.WORD_CONSTANTS[word])
        elif word in symbols.GREEK and len(word) > 2:  # noqa: PLR2004 - "mu" is a product, too
            self._emit("letter", word)
        elif len(word) > MAX_PRODUCT_LETTERS:
            unreadable(f"the word {word[:40]!r}")
        else:
            for letter in word:
                self._emit("constant" if letter in "ei" else "letter", letter)

    def _command(self, name: str) -> None:
        if name in symbols.SPACES:
            self._space(name)
        elif name in symbols.OPERATORS:
            self._emit("operator", symbols.OPERATORS[name])
        elif name in symbols.RELATIONS:
            self._emit("relation", symbols.RELATIONS[name])
        elif name in symbols.OPENERS:
            self._emit("open", symbols.OPENERS[name])
        elif name in symbols.CLOSERS:
            self._emit("close", symbols.CLOSERS[name])
        elif name in symbols.BARS:
            self._emit("bar", "|")
        elif symbols.ALIASES.get(name, name) in symbols.FUNCTIONS:
            self._emit("function", symbols.ALIASES.get(name, name))
        elif name in symbols.WORD_CONSTANTS:
            self._emit("constant", symbols.WORD_CONSTANTS[name])
        elif name in symbols.GREEK:
            self._emit("letter", name)
        else:
            self._structure(name)

    def _space(self, name: str) -> None:
        self._spaced = True
        if name in {"left", "right", "middle"} and self._text[self._at : self._at + 1] == ".":
            self._at += 1

    def _structure(self, name: str) -> None:
        """Take a command that stands for more than one sign. Raises Unreadable for others."""
        if name in symbols.TEXTS:
            self._texts(name)
        elif name in symbols.ACCENTS:
            self._accent(name, _LETTER)
        elif name in symbols.PREFIXES:
            self._accent(name, _LETTERS)
        elif name == "mathbb" and (letter := self._take(_BLACKBOARD)):
            self._emit("letter", f"mathbb {letter[1] or letter[2]}")
        elif name in {"begin", "end"} and (found := self._take(_ENVIRONMENT)):
            if found[1] not in _MATRICES:
                unreadable(f"the environment {found[1]}")
            self._emit("environment", f"{name} {found[1]}")
        elif name in _STRUCTURES:
            self._emit("command", name)
        elif name in {"%", "\\%"}:
            self._emit("operator", "%")
        else:
            unreadable(f"the command {name if name.startswith(chr(92)) else chr(92) + name}")

    def _texts(self, name: str) -> None:
        """Take text in a group: letters of a formula, or words."""
        group = self._take(_GROUP)
        if group is None:
            if name in {"rm", "bf", "it"}:
                return
            unreadable(f"\\{name} without a group")
        content = group[1].strip()
        if content in {"and", "or"}:
            self._emit("separator", content)
        elif _WORD.fullmatch(content):
            self._word(content)
        elif content:
            # Such as "\\mathbf{0}" or "\\text{ cm}^2"; what is no formula is found unreadable.
            inner = tokenize(content)[:-1]
            self._out.extend(inner)

    def _accent(self, name: str, letters: re.Pattern[str]) -> None:
        group = self._take(_GROUP) or self._take(letters)
        if group is None or not group[1].strip():
            unreadable(f"\\{name} without letters")
        name = {"bar": "overline", "widehat": "hat", "widetilde": "tilde"}.get(name, name)
        self._emit("letter", f"{name} {''.join(group[1].split())}")
