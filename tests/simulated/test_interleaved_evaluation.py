"""Held-out prompts that are measured while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fakes import FakeGenerator, World, alternating, evaluation_plan, prompts

from headrace.config import AlarmConfig
from headrace.errors import AlarmError, VerifierFailure
from headrace.held_out import CanaryPlan
from headrace.types import GenerationRequest, RolloutGroup, SamplingParams


@dataclass
class SlowToEvaluate(FakeGenerator):
    """Has no group of an evaluation for as long as ``gate`` is shut."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    portions: list[int] = field(default_factory=list)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        if requests[0].group_id.startswith("eval/"):
            self.portions.append(len(requests))
            await self.gate.wait()
        async for group in super().generate(requests):
            yield group


def world(**options: Any) -> World:  # noqa: ANN401 - of World
    plan = evaluation_plan(every=2, interleaved=True, num_prompts=5)
    made = World(**({"num_steps": 6, "max_staleness": 1, "evaluation": plan} | options))
    made.generator = SlowToEvaluate(made.journal)
    made.generator.gate.set()
    return made


def gate(of: World) -> asyncio.Event:
    assert isinstance(of.generator, SlowToEvaluate)
    return of.generator.gate


def shut_at(of: World, step: int, open_at: int) -> None:
    def turn(num_steps: int) -> int:
        if num_steps == step:
            gate(of).clear()
        if num_steps == open_at:
            gate(of).set()
        return 1

    of.learner.updates = turn


def test_training_goes_on_while_held_out_prompts_are_measured() -> None:
    at = world(num_steps=8, evaluation=evaluation_plan(every=4, interleaved=True))
    shut_at(at, 4, open_at=7)
    at.learner.seconds = 0.002

    at.run()

    assert [record.step for record in at.monitor.evaluations] == [0, 4, 8]
    beside = at.monitor.evaluations[1]
    assert beside.policy_version == 4
    assert beside.metrics["generator/evaluation_version/min"] >= 6.0
    assert beside.metrics["eval/sampled/pass_at_4"] == 1.0


def test_every_evaluation_says_which_versions_sampled_it() -> None:
    at = world()

    at.run()

    for record in at.monitor.evaluations:
        spans = [s for g in record.groups for r in g.rollouts for s in r.version_spans]
        versions = [span.policy_version for span in spans]
        assert record.metrics["generator/evaluation_version/min"] == min(versions)
        assert record.metrics["generator/evaluation_version/max"] == max(versions)
        assert min(versions) >= record.policy_version


def test_the_first_and_the_last_evaluation_are_of_one_version() -> None:
    at = world(num_steps=5)

    at.run()

    first, *_, last = at.monitor.evaluations
    for record, version in ((first, 0.0), (last, 5.0)):
        assert record.metrics["generator/evaluation_version/min"] == version
        assert record.metrics["generator/evaluation_version/max"] == version


def test_training_never_waits_behind_more_than_one_portion() -> None:
    at = world()

    at.run()

    assert isinstance(at.generator, SlowToEvaluate)
    assert set(at.generator.portions) == {2, 1}, "five prompts, two groups a step"


def test_an_evaluation_that_takes_longer_than_the_steps_between_two_holds_up_the_next() -> None:
    at = world()
    shut_at(at, 2, open_at=4)

    at.run()

    assert [record.step for record in at.monitor.evaluations] == [0, 2, 4, 6]


def test_a_synchronous_evaluation_is_asked_for_at_once() -> None:
    at = world(max_staleness=0, evaluation=evaluation_plan(every=2, num_prompts=5))

    at.run()

    assert isinstance(at.generator, SlowToEvaluate)
    assert set(at.generator.portions) == {5}


def test_a_failure_beside_training_ends_the_run_as_it_is() -> None:
    at = world(num_steps=50)
    at.verifier.failure = VerifierFailure("the judge is gone")
    at.verifier.fail_on = lambda name: name.startswith("eval/") and at.learner.num_steps > 0

    with pytest.raises(VerifierFailure, match="the judge is gone"):
        at.run()

    assert at.learner.num_steps < 50


def test_an_alarm_of_an_evaluation_beside_training_stops_the_run() -> None:
    sampling = SamplingParams(max_tokens=4)
    canaries = CanaryPlan(prompts=prompts(1), num_rollouts=4, sampling=sampling)
    plan = replace(evaluation_plan(every=2, interleaved=True), canaries=canaries)
    at = world(num_steps=50, evaluation=plan, alarms=AlarmConfig(on_alarm="stop"))
    at.verifier.rewards = lambda group: (
        [0.0] * group.group_size
        if group.group_id.startswith("eval/canary") and at.learner.num_steps < 3
        else alternating(group)
    )

    with pytest.raises(AlarmError, match="cannot be solved"):
        at.run()

    assert 3 <= at.learner.num_steps < 50


def test_a_run_that_is_asked_to_stop_gives_an_evaluation_up_and_says_what_is_left() -> None:
    at = world(num_steps=50)
    shut_at(at, 2, open_at=50)
    made = at.controller()
    at.monitor.on_each_step = lambda record: made.request_stop() if record.step == 3 else None

    outcome = asyncio.run(at._run(made))

    assert outcome.num_steps_done == 3
    assert outcome.stopped_early
    groups, evaluation = at.monitor.messages("abandoned")
    assert groups == "2 groups were under way for later steps; a resumed run draws them again"
    assert evaluation == "an evaluation beside training was under way and is given up"
    assert len(at.trained()) == 6, "what was under way is not settled"


def test_nothing_is_under_way_when_the_last_step_is_done() -> None:
    at = world(num_steps=7, max_staleness=3)
    at.learner.seconds = 0.001

    at.run()

    assert not at.monitor.messages("abandoned")
    drawn = [n for kind, names in at.journal if kind == "generate" for n in names]
    assert len([name for name in drawn if not name.startswith("eval/")]) == 14
