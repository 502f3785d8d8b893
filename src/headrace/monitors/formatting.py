"""How numbers, durations and foreign text are shown to people.

Owns one rule: text that a model or a data file wrote never reaches a terminal with control
characters in it, because an escape sequence could rewrite the screen. HTML is escaped elsewhere,
by the template engine.
"""

from __future__ import annotations

import unicodedata

_SECONDS_PER_MINUTE = 60
_SECONDS_PER_HOUR = 3600
_SHORT_MINUTES = 10
_LAYOUT = frozenset("\n\t")
# Cc: control codes such as ESC; Cf: formats such as right-to-left; Cs: lone surrogates.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs"})


def printable(text: str) -> str:
    """Return ``text`` with every control character but newline and tab spelled out, ESC as x1b."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in _LAYOUT or unicodedata.category(character) not in _UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


def encodable(text: str) -> str:
    """Return ``text`` as UTF-8 can hold it: a lone surrogate, which JSON allows, becomes ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


def clipped(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text`` and say how many were left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit:,} more characters]"


def duration(seconds: float) -> str:
    """Return ``seconds`` as ``0.82 s``, ``8.2 s``, ``1 min 02 s`` or ``3 h 07 min``."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < _SECONDS_PER_MINUTE:
        return f"{seconds:.1f} s" if seconds < _SHORT_MINUTES else f"{whole} s"
    if whole < _SECONDS_PER_HOUR:
        return f"{whole // _SECONDS_PER_MINUTE} min {whole % _SECONDS_PER_MINUTE:02d} s"
    minutes = whole // _SECONDS_PER_MINUTE
    return f"{minutes // _SECONDS_PER_MINUTE} h {minutes % _SECONDS_PER_MINUTE:02d} min"


def number(value: float) -> str:
    """Return ``value`` with about three significant digits: ``0.213``, ``12.4``, ``8.1k``."""
    magnitude = abs(value)
    for limit, factor, suffix in ((1e9, 1e-9, "G"), (1e6, 1e-6, "M"), (1e4, 1e-3, "k")):
        if magnitude >= limit:
            return f"{value * factor:.1f}{suffix}"
    if magnitude >= 100:  # noqa: PLR2004 - three digits before the point need none after it
        return f"{value:,.0f}"
    return f"{value:.3g}" if magnitude < 1 else f"{value:.2f}"


def percent(share: float) -> str:
    """Return a share of 0..1 as ``87.5 %``."""
    return f"{share * 100:.1f} %"
