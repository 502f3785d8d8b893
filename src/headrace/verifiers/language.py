"""Takes for letters of other scripts than the declared ones.

Counts by Unicode's Script property, which the `regex` package knows; no model guesses a language.
Runs in this process: two linear passes over the text.
"""

from __future__ import annotations

import regex

from headrace.config import LanguageConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.component import Score

_LETTERS = regex.compile(r"\p{L}+")


class LanguageComponent:
    """Pays 0 while nearly every letter belongs to a declared script, and less otherwise."""

    def __init__(self, config: LanguageConfig) -> None:
        self._tolerance = config.tolerance
        # Letters that scripts share, such as the long vowel sign of kana, belong to all.
        scripts = "".join(rf"\p{{Script_Extensions={name.title()}}}" for name in config.scripts)
        self._foreign = regex.compile(rf"[\p{{L}}--[{scripts}\p{{Script=Common}}]]+", regex.V1)

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return minus the share of foreign letters; 0 for a completion without letters."""
        del prompt
        num_letters = _count(_LETTERS, completion)
        share = _count(self._foreign, completion) / num_letters if num_letters else 0.0
        lost = share if share > self._tolerance else 0.0
        outcome = Outcome.WRONG if lost else Outcome.PASS
        detail = f"{share:.1%} of {num_letters} letters are of another script"
        return Score(outcome=outcome, reward=-lost if lost else 0.0, detail=detail)

    async def close(self) -> None:
        """Nothing was started."""


def _count(pattern: regex.Pattern[str], text: str) -> int:
    return sum(match.end() - match.start() for match in pattern.finditer(text))
