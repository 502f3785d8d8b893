"""Units of measure: one name for each, and what converts into what.

A unit is text until two are compared: ``cm^2``, ``km h^-1``, ``%``, ``dollar``, ``apple``. A name
that is in no table is a unit of its own kind, which only itself converts into.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

_NAMES = {
    "inche": "in",
    "inch": "in",
    "foot": "ft",
    "feet": "ft",
    "yard": "yd",
    "mile": "mi",
    "pound": "lb",
    "lb": "lb",
    "ounce": "oz",
    "sec": "s",
    "second": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "min": "min",
    "dollar": "dollar",
    "usd": "dollar",
    "cent": "cent",
    "degree": "degree",
    "deg": "degree",
    "radian": "rad",
    "percent": "%",
    "percentage": "%",
    "pct": "%",
    "kmph": "h^-1 km",
    "kph": "h^-1 km",
    "mph": "h^-1 mi",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year",
    "kilo": "kg",
    "ton": "t",
    "tonne": "t",
    "\\%": "%",
    "\\degree": "degree",
}
_STEMS = {
    "meter": "m",
    "metre": "m",
    "gram": "g",
    "liter": "L",
    "litre": "L",
    "watt": "W",
    "joule": "J",
    "newton": "N",
    "volt": "V",
    "pascal": "Pa",
    "hertz": "Hz",
    "ampere": "A",
    "mole": "mol",
    "ohm": "Ohm",
}
_PREFIX_WORDS = {
    "kilo": "k",
    "centi": "c",
    "milli": "m",
    "deci": "d",
    "micro": "u",
    "mega": "M",
    "giga": "G",
    "nano": "n",
}
_FOLDED_SYMBOLS = frozenset(("cm", "kg", "km", "ft", "lb", "in", "yd", "mi", "hr", "sec"))
"""Whatever their case: no other unit is written with these letters."""
_LONG_NAME = 5
"""Of so many letters a unit is a word, whose case and plural mean nothing; ms and MW are not."""

_Dimensions = dict[str, int]
_BASE: dict[str, tuple[Fraction, _Dimensions]] = {
    "m": (Fraction(1), {"m": 1}),
    "g": (Fraction(1, 1000), {"kg": 1}),
    "s": (Fraction(1), {"s": 1}),
    "A": (Fraction(1), {"A": 1}),
    "K": (Fraction(1), {"K": 1}),
    "mol": (Fraction(1), {"mol": 1}),
    "N": (Fraction(1), {"kg": 1, "m": 1, "s": -2}),
    "J": (Fraction(1), {"kg": 1, "m": 2, "s": -2}),
    "W": (Fraction(1), {"kg": 1, "m": 2, "s": -3}),
    "Pa": (Fraction(1), {"kg": 1, "m": -1, "s": -2}),
    "Hz": (Fraction(1), {"s": -1}),
    "V": (Fraction(1), {"kg": 1, "m": 2, "s": -3, "A": -1}),
    "Ohm": (Fraction(1), {"kg": 1, "m": 2, "s": -3, "A": -2}),
    "L": (Fraction(1, 1000), {"m": 3}),
    "l": (Fraction(1, 1000), {"m": 3}),
}
_OTHERS: dict[str, tuple[Fraction, _Dimensions]] = {
    "min": (Fraction(60), {"s": 1}),
    "h": (Fraction(3600), {"s": 1}),
    "day": (Fraction(86400), {"s": 1}),
    "week": (Fraction(604800), {"s": 1}),
    "in": (Fraction(254, 10000), {"m": 1}),
    "ft": (Fraction(3048, 10000), {"m": 1}),
    "yd": (Fraction(9144, 10000), {"m": 1}),
    "mi": (Fraction(1609344, 1000), {"m": 1}),
    "lb": (Fraction(45359237, 100000000), {"kg": 1}),
    "oz": (Fraction(45359237, 1600000000), {"kg": 1}),
    "t": (Fraction(1000), {"kg": 1}),
    "dollar": (Fraction(1), {"dollar": 1}),
    "cent": (Fraction(1, 100), {"dollar": 1}),
    "%": (Fraction(1, 100), {}),
    "dozen": (Fraction(12), {}),
    "rad": (Fraction(1), {}),
}
_PREFIXES = {
    "k": Fraction(1000),
    "c": Fraction(1, 100),
    "m": Fraction(1, 1000),
    "d": Fraction(1, 10),
    "u": Fraction(1, 10**6),
    "n": Fraction(1, 10**9),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
}
_POWER = re.compile(r"(.*?)(?:\^(-?\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What one of a unit is."""

    factor: Fraction
    """In base units, and in parts of pi for a degree."""
    has_pi: bool
    dimensions: tuple[tuple[str, int], ...]
    """Base unit -> power, sorted, without zeros."""


def unit_name(name: str, power: str | None) -> str:
    """Return the canonical name of one unit, ``square`` and ``cubic`` as a power."""
    folded = " ".join(name.split()).strip(". ")
    lowered = folded.casefold()
    square = next((word for word in ("square ", "sq ", "sq. ") if lowered.startswith(word)), "")
    cubic = "cubic " if lowered.startswith("cubic ") else ""
    known = _simple_name(folded[len(square + cubic) :])
    if square or cubic:
        return f"{known}^{2 if square else 3}"
    digits = re.findall(r"[23]", power or "")
    return known + (f"^{digits[0]}" if digits else "")


def quotient_name(text: str) -> str:
    """Return the canonical name of ``m/s/s``, ``m/s^2``, ``miles per hour``, or of one unit."""
    powers: Counter[str] = Counter()
    for index, part in enumerate(re.split(r"/|\bper\b", text)):
        name, _, power = part.partition("^")
        digits = re.findall(r"\d", power)
        powers[unit_name(name, None)] += (-1 if index else 1) * int(digits[0] if digits else 1)
    return _joined(powers)


def _joined(powers: Counter[str]) -> str:
    return " ".join(
        f"{name}^{power}" if power != 1 else name for name, power in sorted(powers.items()) if power
    )


def _simple_name(name: str) -> str:
    """Return the canonical name: words without case and plural, symbols as they are."""
    lowered = name.casefold()
    if len(lowered) > 1:
        singular = lowered.removesuffix("s") if len(lowered) > 2 else lowered  # noqa: PLR2004 - "ms"
        known = _NAMES.get(lowered, _NAMES.get(singular)) or _with_prefix_word(singular)
        if known is not None:
            return known
        if singular in _FOLDED_SYMBOLS:
            return singular
    return lowered.removesuffix("s") if len(lowered) >= _LONG_NAME else name


def _with_prefix_word(word: str) -> str | None:
    """Return ``km`` for ``kilometer``."""
    for prefix, symbol in ({"": ""} | _PREFIX_WORDS).items():
        stem = word.removeprefix(prefix)
        if word.startswith(prefix) and stem in _STEMS:
            return symbol + _STEMS[stem]
    return None


def measure(unit: str) -> Measure:
    """Return what one of ``unit`` is, by the canonical name; "" is a plain number."""
    factor, has_pi = Fraction(1), False
    dimensions: Counter[str] = Counter()
    for part in unit.split():
        found = _POWER.fullmatch(part)
        assert found is not None
        power = int(found[2] or 1)
        one, parts = _one(found[1])
        factor *= one**power
        has_pi = has_pi or found[1] == "degree"
        for name, exponent in parts.items():
            dimensions[name] += exponent * power
    kept = tuple(sorted((name, power) for name, power in dimensions.items() if power))
    return Measure(factor=factor, has_pi=has_pi, dimensions=kept)


def _one(name: str) -> tuple[Fraction, _Dimensions]:
    if name == "degree":
        return Fraction(1, 180), {}
    if name in _OTHERS:
        return _OTHERS[name]
    if name in _BASE:
        return _BASE[name]
    if name[:1] in _PREFIXES and name[1:] in _BASE:
        factor, dimensions = _BASE[name[1:]]
        return factor * _PREFIXES[name[0]], dimensions
    return Fraction(1), {name: 1}


def is_known(unit: str) -> bool:
    """Whether every unit in a canonical name is in the tables."""
    return all(_is_known(part.partition("^")[0]) for part in unit.split())


def _is_known(name: str) -> bool:
    is_prefixed = name[:1] in _PREFIXES and name[1:] in _BASE
    return name in _OTHERS or name in _BASE or is_prefixed or name in {"degree", "month", "year"}
