"""What a judge's answer says, if it says it in the agreed form.

Owns: nothing is guessed. An answer is one JSON object with exactly the agreed keys and whole
numbers in range; anything else has no meaning, and a judge that writes the word it must never
write has been taken over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.config.judge import REASON
from headrace.types import Outcome
from headrace.verifiers.component import shown
from headrace.verifiers.extract import without_thinking
from headrace.verifiers.judge.question import Criterion

MAX_CHARS = 100_000
"""A longer answer is not read."""
CANARY_LABEL = "judge_taken_over"
SILENCED_LABEL = "judge_silenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One answer of a judge."""

    points: Mapping[str, int] | None
    """Criterion -> points; None where there is no vote."""
    outcome: Outcome = Outcome.ABSTAIN
    """Why there is none: ABSTAIN where the answer has no meaning, else our own failure."""
    is_refused: bool = False
    """Whether the endpoint took this question in no form, which others may still be."""
    detail: str = ""
    labels: tuple[str, ...] = field(default=())


def read_vote(content: str, criteria: Mapping[str, Criterion], *, canary: str) -> Vote:
    """Return what ``content`` says; a vote without points where it is not in the agreed form."""
    # A judge that thinks may go through its instructions, the word among them.
    if canary in without_thinking(content):
        return Vote(
            points=None,
            detail="the judge wrote what it must never write: the completion has taken it over",
            labels=(CANARY_LABEL,),
        )
    fields = _object(content)
    if fields is None:
        return Vote(points=None, detail=f"the judge's answer is no JSON object: {shown(content)}")
    if set(fields) != {REASON, *criteria}:
        return Vote(points=None, detail=f"the judge's answer has other keys: {shown(content)}")
    reason = fields[REASON]
    points = {name: _points(fields[name], criterion) for name, criterion in criteria.items()}
    read = {name: value for name, value in points.items() if value is not None}
    if len(read) < len(points) or not isinstance(reason, str):
        return Vote(points=None, detail=f"the judge's answer has other values: {shown(content)}")
    return Vote(points=read, outcome=Outcome.PASS, detail=shown(reason, 160))


def _object(content: str) -> dict[str, object] | None:
    """Return the JSON object that all of ``content`` is, thinking and a code fence aside."""
    if len(content) > MAX_CHARS:
        return None
    text = without_thinking(content).strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`").removeprefix("json").strip()
    try:
        found = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        msg = "a key stands twice, so which one counts is anybody's guess"
        raise ValueError(msg)
    return fields


def _points(value: object, criterion: Criterion) -> int | None:
    """Return ``value`` as points; true and false are 1 and 0 where it is yes or no."""
    if isinstance(value, bool):
        return int(value) if criterion.points == 1 else None
    if isinstance(value, int) and 0 <= value <= criterion.points:
        return value
    return None
