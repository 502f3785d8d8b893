"""Pays for a number equal to the expected one, compared as exact fractions.

Runs in this process: `numbers` caps what is read before any arithmetic.
"""

from __future__ import annotations

from fractions import Fraction

from headrace.config import NumericConfig
from headrace.types import Prompt
from headrace.verifiers.component import Score, no_answer_to_compare, right_or_wrong, shown
from headrace.verifiers.extract import extract
from headrace.verifiers.numbers import parse_number


class NumericComponent:
    """Compares number with number within a declared tolerance."""

    def __init__(self, config: NumericConfig) -> None:
        self._config = config

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return 1 where the extracted number lies within the tolerance of the expected one."""
        if prompt.answer is None:
            return no_answer_to_compare(prompt)
        expected = parse_number(prompt.answer)
        if expected is None:
            return no_answer_to_compare(prompt)
        found = extract(completion, self._config.extract, marker=self._config.marker)
        number = None if found is None else parse_number(found)
        return right_or_wrong(
            right=number is not None and self._close(number, expected),
            detail=f"{shown(found)} against {shown(prompt.answer)}",
        )

    async def close(self) -> None:
        """Nothing was started."""

    def _close(self, number: Fraction, expected: Fraction) -> bool:
        allowed = max(
            Fraction(self._config.absolute_tolerance),
            Fraction(self._config.relative_tolerance) * abs(expected),
        )
        return abs(number - expected) <= allowed
