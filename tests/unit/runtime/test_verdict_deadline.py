"""A verifier that never answers leaves a group unscored, in time, and holds nothing up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from fakes import FakeVerifier, alternating, prompts

from headrace.runtime.verdict_deadline import DeadlineVerifier
from headrace.types import (
    Outcome,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
)


def group(name: str) -> RolloutGroup:
    return RolloutGroup(
        group_id=name,
        prompt=prompts(1)[0],
        rollouts=tuple(
            Rollout(
                rollout_index=index,
                completion_ids=(),
                loss_mask=(),
                generator_logprobs=(),
                version_spans=(),
                finish_reason="stop",
                text="",
            )
            for index in range(2)
        ),
        sampling=SamplingParams(max_tokens=1),
    )


class Silent:
    """Never answers."""

    def __init__(self) -> None:
        self.num_cancelled = 0
        self.is_closed = False

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        raise AssertionError(group)

    def metrics(self) -> Mapping[str, float]:
        return {"verifier/of/its/own": 1.0}

    async def close(self) -> None:
        self.is_closed = True


def test_a_verifier_that_never_answers_leaves_the_group_unscored_and_is_cancelled() -> None:
    silent = Silent()
    verifier = DeadlineVerifier(silent, 0.01)
    verdicts = asyncio.run(verifier.score(group("0/a")))
    assert [verdict.reward for verdict in verdicts] == [None, None]
    assert all(verdict.outcome is Outcome.INFRA for verdict in verdicts)
    assert "faults.verifier_deadline_seconds = 0.01" in verdicts[0].detail
    assert silent.num_cancelled == 1
    assert verifier.metrics() == {
        "verifier/of/its/own": 1.0,
        "verifier/rollouts/num_overdue": 2.0,
    }
    assert verifier.metrics()["verifier/rollouts/num_overdue"] == 0.0


def test_what_is_answered_in_time_is_passed_on_and_closing_too() -> None:
    asked = FakeVerifier(rewards=alternating)
    verifier = DeadlineVerifier(asked, 60.0)
    verdicts = asyncio.run(verifier.score(group("0/a")))
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0]
    silent = Silent()
    asyncio.run(DeadlineVerifier(silent, 60.0).close())
    assert silent.is_closed


def test_a_timeout_of_the_verifiers_own_is_an_error_and_no_missing_verdict() -> None:
    asked = FakeVerifier(failure=TimeoutError("a bug of its own"))
    with pytest.raises(TimeoutError, match="a bug of its own"):
        asyncio.run(DeadlineVerifier(asked, 60.0).score(group("0/a")))


def test_whoever_asks_may_be_cancelled_before_the_deadline() -> None:
    async def cancelled() -> None:
        asking = asyncio.create_task(DeadlineVerifier(Silent(), 60.0).score(group("0/a")))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancelled())
