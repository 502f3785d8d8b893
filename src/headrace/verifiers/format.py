"""Pays for the declared form: tags once and in order, a regular expression, or both.

A pattern is matched outside of the event loop and within a deadline, because it is the user's and
the text is the policy's: together they can take for ever. Tags are string work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import regex

from headrace.config import FormatConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.component import Score, right_or_wrong

PATTERN_SECONDS = 5.0
"""For one match. One that takes longer pays 0: not scored, a policy could choose to be left out."""


class FormatComponent:
    """Looks at the form alone, whatever the text says."""

    def __init__(self, config: FormatConfig) -> None:
        self._config = config
        pattern = config.pattern
        self._pattern = None if pattern is None else regex.compile(pattern, regex.DOTALL)

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return 1 for the form, and 0 with the first thing that is not as declared."""
        del prompt
        text = self._config.prefix + completion
        fault = next(_tag_faults(text, self._config), None)
        if fault is None and self._pattern is not None:
            try:
                # Without the interpreter's lock, which it would hold for all threads.
                match = await asyncio.to_thread(
                    self._pattern.fullmatch, text, concurrent=True, timeout=PATTERN_SECONDS
                )
            except TimeoutError:
                detail = f"the pattern did not come to an end within {PATTERN_SECONDS:g} s"
                return Score(outcome=Outcome.TIMEOUT_WALL, reward=0.0, detail=detail)
            fault = "does not match the pattern" if match is None else None
        return right_or_wrong(right=fault is None, detail=fault or "has the form")

    async def close(self) -> None:
        """Nothing was started."""


def _tag_faults(text: str, config: FormatConfig) -> Iterator[str]:
    """Yield what is not as declared. Each tag is found once, so the text is read a few times."""
    end = 0
    for tag in config.tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        for mark in (opening, closing):
            if (count := text.count(mark)) != 1:
                yield f"{mark} stands {count} times and not once"
                return
        start, stop = text.index(opening), text.index(closing)
        if start < end or stop < start:
            yield f"{opening}...{closing} is out of order"
            return
        if not text[start + len(opening) : stop].strip():
            yield f"{opening}...{closing} is empty"
        if config.outside == "space" and text[end:start].strip():
            yield f"there is text before {opening}"
        end = stop + len(closing)
    if config.tags and config.outside == "space" and text[end:].strip():
        yield f"there is text behind </{config.tags[-1]}>"
