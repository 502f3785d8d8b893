"""A number in digits, with thousands, point, repeating decimals and a power of ten.

Owns the caps on digits and exponent, before any arithmetic.
"""

from __future__ import annotations

import re
from fractions import Fraction

from headrace.verifiers.math.tree import Number, Refused
from headrace.verifiers.numbers import MAX_DIGITS, MAX_EXPONENT

_PARTS = re.compile(
    r"(?P<whole>\d*)(?P<point>\.?)(?P<decimals>\d*)"
    r"(?:\D+(?P<repeating>\d+)\D*)?"
)
_EXPONENT = re.compile(r"[eE]([+-]?\d+)\Z")


def number_of(text: str) -> Number:
    """Return the number of a token. Raises Refused over a cap."""
    if len(text) > MAX_DIGITS:
        msg = f"a number of {len(text)} digits; at most {MAX_DIGITS} are read"
        raise Refused(msg)
    power = _EXPONENT.search(text)
    plain = text[: power.start()] if power else text
    parts = _PARTS.fullmatch(plain.replace("{,}", ""))
    assert parts is not None, text
    exponent = _exponent(power[1]) if power else 0
    decimals = parts["decimals"]
    value = Fraction(int((parts["whole"] + decimals) or "0"), 10 ** len(decimals))
    if parts["repeating"]:
        # Of 0.1(6) the cycle is 6, worth 6/9 of the last decimal.
        cycle = parts["repeating"]
        value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(decimals))
    is_decimal = bool(parts["point"]) or power is not None
    return Number(value * Fraction(10) ** exponent, is_decimal)


def _exponent(digits: str) -> int:
    if len(digits) > len(str(MAX_EXPONENT)) + 1 or abs(int(digits)) > MAX_EXPONENT:
        msg = f"a power of ten above {MAX_EXPONENT}"
        raise Refused(msg)
    return int(digits)
