"""What belongs to a letter: its subscript and its primes."""

from __future__ import annotations

from headrace.verifiers.math.cursor import Cursor
from headrace.verifiers.math.tree import unreadable


def suffix(cursor: Cursor) -> str:
    """Read the subscript and the primes of a letter, and return them as one text."""
    return _subscript(cursor) + _primes(cursor)


def _subscript(cursor: Cursor) -> str:
    if not cursor.take("operator", "_"):
        return ""
    if not cursor.take("open", "{"):
        token = cursor.take("number") or cursor.take("letter") or cursor.need("constant")
        return f"_{token.text}"
    parts = []
    while not cursor.take("close", "}"):
        token = cursor.tokens[cursor.at]
        if token.kind in {"end", "open", "close", "environment"} or token.text == "_":
            unreadable("a subscript that is more than a name")
        parts.append(token.text)
        cursor.at += 1
    return f"_{''.join(parts)}"


def _primes(cursor: Cursor) -> str:
    if cursor.token.kind == "operator" and cursor.token.text.startswith("'"):
        cursor.at += 1
        return cursor.tokens[cursor.at - 1].text
    primes = 0
    if cursor.at_a("operator", "^") and _is_prime(cursor, cursor.at + 1):
        cursor.at += 1
        while _is_prime(cursor, cursor.at):
            cursor.at += 1
            primes += 1
    elif (
        cursor.at_a("operator", "^")
        and cursor.tokens[cursor.at + 1].text == "{"
        and _is_prime(cursor, cursor.at + 2)
    ):
        cursor.at += 2
        while _is_prime(cursor, cursor.at):
            cursor.at += 1
            primes += 1
        cursor.need("close", "}")
    return "'" * primes


def _is_prime(cursor: Cursor, at: int) -> bool:
    return cursor.tokens[at].kind == "command" and cursor.tokens[at].text == "prime"
