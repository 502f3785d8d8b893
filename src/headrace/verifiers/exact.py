"""Pays for the expected text, character by character. Runs in this process: it is string work."""

from __future__ import annotations

from headrace.config import ExactConfig
from headrace.types import Prompt
from headrace.verifiers.component import Score, no_answer_to_compare, right_or_wrong, shown
from headrace.verifiers.extract import extract


class ExactComponent:
    """Compares text with text; nothing is folded but white space, and that only if declared."""

    def __init__(self, config: ExactConfig) -> None:
        self._config = config

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return 1 where the extracted text is the expected one; an empty answer is wrong."""
        if prompt.answer is None:
            return no_answer_to_compare(prompt)
        found = extract(completion, self._config.extract, marker=self._config.marker)
        answer, expected = self._tidy(found or ""), self._tidy(prompt.answer)
        return right_or_wrong(
            right=answer == expected and answer != "",
            detail=f"{shown(found)} against {shown(prompt.answer)}",
        )

    async def close(self) -> None:
        """Nothing was started."""

    def _tidy(self, text: str) -> str:
        if not self._config.strip:
            return text
        return text.replace("\r\n", "\n").replace("\r", "\n").strip()
