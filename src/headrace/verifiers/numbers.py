"""Reading a number exactly, or not at all.

Owns the caps on digits and exponent, applied before any arithmetic: `Fraction("1e999999999")`
would never return. ``True``, NaN and infinities are no numbers here. Which part of a completion
to read is `extract`'s business.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 1000
"""Of the whole number, all parts together."""
MAX_EXPONENT = 400
"""Of a power of ten in scientific notation, either sign."""

DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u207b\u208b\u2212\u2796\u02d7\ufe58\ufe63\uff0d"
"""Hyphens, dashes and minus signs: any of them before a number is its minus."""
TO_MINUS = str.maketrans(dict.fromkeys(DASHES, "-"))

_SHAPE = re.compile(
    r"(?P<sign>[+-]?)\s*"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)"
    r"(?:\.(?P<decimals>[0-9]*)|/(?P<denominator>[0-9]+))?"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,4}))?"
)


def parse_number(text: str) -> Fraction | None:
    """Return the number ``text`` spells, or None.

    Accepts ``-5``, ``1,234``, ``3.50``, ``.5``, ``3/4``, ``3e0``; every Unicode dash is a minus.
    """
    text = text.strip().translate(TO_MINUS)
    if len(text) > MAX_DIGITS:
        return None
    match = _SHAPE.fullmatch(text)
    if match is None:
        return None
    whole = match["whole"].replace(",", "")
    decimals = match["decimals"] or ""
    exponent = int(match["exponent"] or 0)
    if not whole + decimals or abs(exponent) > MAX_EXPONENT:
        return None
    denominator = int(match["denominator"] or 1)
    if denominator == 0 or (match["denominator"] and (not whole or match["exponent"])):
        return None
    value = Fraction(int(whole + decimals), denominator) * Fraction(10) ** (
        exponent - len(decimals)
    )
    return -value if match["sign"] == "-" else value
