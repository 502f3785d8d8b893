"""What alarms do to a run: tell, or end it with what was reached."""

from collections.abc import Sequence

import pytest
from fakes import World, alternating, evaluation_plan, prompts

from headrace.config import AlarmConfig
from headrace.errors import AlarmError
from headrace.held_out import CanaryPlan, EvaluationPlan
from headrace.types import Prompt, RolloutGroup, SamplingParams


def canaries(*, every: int = 2) -> EvaluationPlan:
    """Only canaries: there is nothing held out."""
    canary = Prompt(prompt_id="no", source="canaries", text="?", token_ids=(1,), answer="never")
    return EvaluationPlan(
        prompts=(),
        every=every,
        modes={},
        pass_at_k=(),
        canaries=CanaryPlan(
            prompts=(canary,), num_rollouts=4, sampling=SamplingParams(max_tokens=4)
        ),
    )


def nobody_passes(group: RolloutGroup) -> Sequence[float | None]:
    is_canary = group.prompt.source == "canaries"
    return [0.0] * group.group_size if is_canary else alternating(group)


def test_canaries_are_tried_at_every_evaluation_and_never_trained_on() -> None:
    world = World(num_steps=4, evaluation=canaries())
    world.verifier.rewards = nobody_passes
    world.run()
    tried = [name for kind, names in world.journal if kind == "generate" for name in names]
    assert tried.count("eval/canary/no") == 3
    assert not [group_id for group_id in world.trained() if "canary" in group_id]
    assert [record.metrics["eval/canary/num_scored"] for record in world.monitor.evaluations] == [
        4.0
    ] * 3
    assert all(record.groups == () for record in world.monitor.evaluations)
    assert world.monitor.messages("alarm") == []


def test_a_canary_that_passes_is_told_and_the_run_goes_on() -> None:
    world = World(num_steps=4, evaluation=canaries())
    outcome = world.run()
    assert outcome.num_steps_done == 4
    assert len(world.monitor.messages("alarm")) == 3


def test_a_run_that_stops_for_alarms_ends_with_a_checkpoint_of_what_was_settled() -> None:
    world = World(num_steps=6, evaluation=canaries(), alarms=AlarmConfig(on_alarm="stop"))
    world.verifier.rewards = lambda group: (
        alternating(group) if world.learner.num_steps >= 2 else nobody_passes(group)
    )
    with pytest.raises(AlarmError, match="cannot be solved"):
        world.run()
    assert world.learner.num_steps == 2
    assert ("checkpoint", 2) in world.journal
    assert len(world.monitor.messages("alarm")) == 1


def test_a_cheat_that_is_there_before_training_stops_the_run_before_the_first_step() -> None:
    world = World(num_steps=4, evaluation=canaries(), alarms=AlarmConfig(on_alarm="stop"))
    with pytest.raises(AlarmError):
        world.run()
    assert world.learner.num_steps == 0


def test_canaries_do_not_change_what_is_trained() -> None:
    def trained(plan: EvaluationPlan | None) -> list[str]:
        world = World(num_steps=4, evaluation=plan)
        world.verifier.rewards = nobody_passes
        world.run()
        return world.trained()

    both = evaluation_plan(every=2)
    with_canaries = EvaluationPlan(
        prompts=prompts(2),
        every=2,
        modes=both.modes,
        pass_at_k=both.pass_at_k,
        canaries=canaries().canaries,
    )
    assert trained(None) == trained(both) == trained(with_canaries)


def test_every_step_says_how_late_the_loop_was_and_how_busy_verifiers_were() -> None:
    world = World(num_steps=2)
    world.run()
    for record in world.monitor.steps:
        assert record.metrics["controller/loop/max_lag_seconds"] >= 0.0
        assert record.metrics["verifier/kind/fake/slots/num_jobs"] == 1.0
