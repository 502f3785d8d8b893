"""A component that a language model scores: by points, or by a rubric.

Owns: what the judge does not clearly say is no reward, and a completion that keeps it from saying
anything is worth 0. Votes run side by side, each in a place of its own; those that can change
nothing any more are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import assert_never

from headrace.config import JudgeConfig, RubricConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.component import Score, no_answer_to_compare
from headrace.verifiers.extract import without_thinking
from headrace.verifiers.judge.answer import CANARY_LABEL, SILENCED_LABEL, Vote, read_vote
from headrace.verifiers.judge.ballot import Points, decided, is_over
from headrace.verifiers.judge.endpoint import (
    Endpoint,
    LateError,
    MisunderstoodError,
    NoAnswerError,
)
from headrace.verifiers.judge.question import (
    Case,
    Criterion,
    answer_schema,
    messages,
    new_secret,
)
from headrace.verifiers.judge.standing import WINDOW, Standing
from headrace.verifiers.slots import Slots

_LOG = logging.getLogger(__name__)
_POINTS = "points"
"""The one criterion of a judge without a rubric."""


class JudgeComponent:
    """Asks for votes and pays what they come to."""

    def __init__(self, config: JudgeConfig | RubricConfig, api_key: str | None) -> None:
        self.slots = Slots(config.max_concurrent)
        self._config = config
        self._criteria = _criteria(config)
        self._standing = Standing()
        self._endpoint = Endpoint(config, api_key, self.slots.note_retry)
        # Not told to anyone else: a completion that makes the judge write it has reached the judge.
        self._canary = new_secret()
        has_schema = config.response_format in {"auto", "json_schema"}
        self._format = "json_schema" if has_schema else config.response_format

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return what the judge gives, in 0..1; None where its votes decide nothing."""
        config = self._config
        if config.uses_answer and prompt.answer is None:
            return no_answer_to_compare(prompt)
        seen = completion if config.sees == "whole" else without_thinking(completion)
        if len(seen) > config.max_characters or not seen.strip():
            detail = f"{len(seen)} characters; judged are 1 to {config.max_characters}"
            return Score(outcome=Outcome.WRONG, reward=0.0, detail=detail)
        expected = prompt.answer if config.uses_answer else None
        case = Case(task=prompt.text, completion=seen, expected=expected, nonce=new_secret())
        return self._score(await self._votes(case))

    async def close(self) -> None:
        """Close every connection."""
        await self._endpoint.close()

    async def _votes(self, case: Case) -> Sequence[Vote]:
        """Return votes until they decide, or all of them. Each has a deadline of its own."""
        config, votes = self._config, list[Vote]()
        tasks = [asyncio.create_task(self._vote(case)) for _ in range(config.votes)]
        try:
            for task in asyncio.as_completed(tasks):
                votes.append(await task)
                if is_over(votes, config.votes, config.rule):
                    break
        finally:
            for open_task in tasks:
                open_task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return votes

    async def _vote(self, case: Case) -> Vote:
        try:
            async with self.slots.taken():
                content = await self._ask(case)
        except LateError as error:
            return Vote(points=None, outcome=Outcome.TIMEOUT_WALL, detail=str(error))
        except NoAnswerError as error:
            is_refused = isinstance(error, MisunderstoodError)
            return Vote(
                points=None, outcome=Outcome.INFRA, detail=str(error), is_refused=is_refused
            )
        vote = read_vote(content, self._criteria, canary=self._canary)
        # One that was taken over is understood only too well.
        self._standing.note(readable=vote.points is not None or CANARY_LABEL in vote.labels)
        return vote

    async def _ask(self, case: Case) -> str:
        asked_with = self._format
        try:
            return await self._endpoint.ask(self._body(case, asked_with))
        except MisunderstoodError as error:
            if self._config.response_format != "auto" or asked_with == "none":
                raise
            content = await self._endpoint.ask(self._body(case, "none"))
            # Only now: a question that is too long is refused in the same way.
            if self._format != "none":
                self._format = "none"
                _LOG.warning("the judge is asked without response_format from now on: %s", error)
            return content

    def _body(self, case: Case, response_format: str) -> dict[str, object]:
        config = self._config
        asked = messages(self._criteria, case, canary=self._canary)
        body: dict[str, object] = {
            "model": config.model,
            "messages": asked,
            "max_tokens": config.max_tokens,
        }
        if config.temperature is not None:
            body["temperature"] = config.temperature
        match response_format:
            case "json_schema":
                schema = {"name": "grade", "strict": True, "schema": answer_schema(self._criteria)}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            case "json_object":
                body["response_format"] = {"type": "json_object"}
        return body

    def _score(self, votes: Sequence[Vote]) -> Score:
        labels = tuple(sorted({label for vote in votes for label in vote.labels}))
        points = decided(votes, self._config.votes, self._config.rule)
        if points is None:
            outcome, detail = self._undecided(votes)
            if (label := self._provoked(votes)) is not None:
                labels = tuple(sorted({*labels, label}))
                return Score(outcome=Outcome.WRONG, reward=0.0, detail=detail, labels=labels)
            return Score(outcome=outcome, reward=None, detail=detail, labels=labels)
        reward = self._paid(points)
        outcome = Outcome.PASS if reward >= 1.0 else Outcome.WRONG
        given = ", ".join(f"{name} {value:g}" for name, value in points.items())
        reasons = next(vote.detail for vote in votes if vote.points is not None)
        return Score(outcome=outcome, reward=reward, detail=f"{given}: {reasons}", labels=labels)

    def _provoked(self, votes: Sequence[Vote]) -> str | None:
        """Return the label of a completion that kept votes from being cast, or None.

        By taking the judge over; or, where the judge is understood otherwise, by an answer without
        meaning, or a question that it does not take.
        """
        if any(CANARY_LABEL in vote.labels for vote in votes):
            return CANARY_LABEL
        silent = any(
            vote.is_refused or (vote.points is None and vote.outcome is Outcome.ABSTAIN)
            for vote in votes
        )
        return SILENCED_LABEL if silent and self._standing.is_understood else None

    def _undecided(self, votes: Sequence[Vote]) -> tuple[Outcome, str]:
        """Return why there is no verdict: our failure where there was one, else an abstention."""
        without = [vote for vote in votes if vote.points is None]
        failed = next((vote for vote in without if vote.outcome is not Outcome.ABSTAIN), None)
        first = failed or next(iter(without), None)
        why = "the votes differ" if first is None else first.detail
        num_votes = self._config.votes
        detail = f"{len(votes) - len(without)} of {num_votes} votes, {self._config.rule}: {why}"
        if failed is None and self._standing.is_lost:
            # Not an abstention: the run has to stop, or it would train on what is left.
            return Outcome.INFRA, f"most of the last {WINDOW} answers have no meaning; {detail}"
        return (Outcome.ABSTAIN if failed is None else failed.outcome), detail

    def _paid(self, points: Points) -> float:
        config = self._config
        match config:
            case JudgeConfig():
                return points[_POINTS] / config.points
            case RubricConfig():
                return _rubric_reward(config, points)
            case _:
                assert_never(config)


def _criteria(config: JudgeConfig | RubricConfig) -> dict[str, Criterion]:
    match config:
        case JudgeConfig():
            asked = Criterion(name=_POINTS, text=config.question, points=config.points)
            return {_POINTS: asked}
        case RubricConfig():
            return {
                name: Criterion(name=name, text=criterion.text, points=1)
                for name, criterion in config.criteria.items()
            }
        case _:
            assert_never(config)


def _rubric_reward(config: RubricConfig, points: Points) -> float:
    """Return the share of the weight that is met; 0 where a gate is not met by most votes."""
    if any(points[name] <= 1 / 2 for name, criterion in config.criteria.items() if criterion.gate):
        return 0.0
    met = sum(criterion.weight * points[name] for name, criterion in config.criteria.items())
    whole = sum(max(criterion.weight, 0.0) for criterion in config.criteria.values())
    return min(max(met / whole, 0.0), 1.0)
