"""A place among tokens, and how deep the reader has gone."""

from __future__ import annotations

from headrace.verifiers.math.lexer import Token
from headrace.verifiers.math.tree import Refused, unreadable

MAX_NESTING = 60
MAX_CHAIN = 60
"""Of quotients, powers and set operations in one answer: each makes the expression deeper."""


class Cursor:
    """Reads tokens one after the other."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.nesting = 0
        self.chained = 0

    @property
    def token(self) -> Token:
        """The one that comes next."""
        return self.tokens[self.at]

    def at_a(self, kind: str, *texts: str) -> bool:
        """Return whether one of that kind, and of these texts, comes next."""
        token = self.token
        return token.kind == kind and (not texts or token.text in texts)

    def take(self, kind: str, *texts: str) -> Token | None:
        """Read one of that kind, and of these texts, if it comes next."""
        if not self.at_a(kind, *texts):
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def need(self, kind: str, *texts: str) -> Token:
        """Read one of that kind. Raises Unreadable where another comes next."""
        token = self.take(kind, *texts)
        if token is None:
            wanted = " or ".join(texts) or kind
            found = self.token.text or "the end"
            unreadable(f"{found!r} where {wanted!r} belongs")
        return token

    def deeper(self) -> None:
        """Count a level. Raises Refused at one too many."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            msg = f"nested deeper than {MAX_NESTING}"
            raise Refused(msg)

    def chain(self) -> None:
        """Count a link of a chain. Raises Refused at one too many."""
        self.chained += 1
        if self.chained > MAX_CHAIN:
            msg = f"a chain of more than {MAX_CHAIN} quotients, powers or sets"
            raise Refused(msg)
