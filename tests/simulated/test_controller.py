"""The loops of a run, over fakes: order, endings, first causes and what is dropped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import Rewards, World, alternating, evaluation_plan

from headrace.config import FunctionConfig, VerifierConfig
from headrace.controller import Controller
from headrace.errors import (
    CheckpointError,
    DivergedError,
    GeneratorFailure,
    LearnerHungError,
    NoSignalError,
    RunError,
    VerifierFailure,
)
from headrace.types import RolloutGroup, RunEvent, StepRecord
from headrace.verifiers import build_verifier


def test_a_step_is_published_before_its_slots_are_freed() -> None:
    world = World(num_steps=3)

    world.run()

    order = [kind for kind in world.kinds() if kind in {"step", "publish", "release"}]
    assert order == ["publish", *["release", "step", "publish"] * 3], "the first frees nothing"
    assert [what for kind, what in world.journal if kind == "release"] == [0, 2, 2]


def test_a_step_is_on_record_before_its_checkpoint_and_before_the_next_one() -> None:
    world = World(num_steps=4, checkpoint_every=2)
    world.ledger.seconds = 0.02

    world.run()

    order = [entry for entry in world.journal if entry[0] in {"settle", "checkpoint"}]
    assert order == [
        ("settle", 1), ("settle", 2), ("checkpoint", 2),
        ("settle", 3), ("settle", 4), ("checkpoint", 4),
    ]  # fmt: skip


def test_the_next_step_does_not_wait_for_the_disk_that_the_last_one_is_recorded_on() -> None:
    world = World(num_steps=2, checkpoint_every=2)
    world.ledger.seconds = 0.1

    world.run()

    before = world.kinds()[: world.kinds().index("settle")]
    assert before.count("generate") == 2


def test_a_step_that_cannot_be_recorded_ends_the_run_without_a_checkpoint_of_it() -> None:
    world = World(num_steps=5, checkpoint_every=1)
    world.ledger.refuses = 3

    with pytest.raises(RunError, match="step 3: the disk is full"):
        world.run()

    assert [step for kind, step in world.journal if kind == "checkpoint"] == [1, 2]
    (*_, last) = world.monitor.messages("checkpoint")
    assert last == "no checkpoint at step 3: step 3: the disk is full"


def test_without_staleness_every_wave_is_sampled_by_the_version_just_published() -> None:
    world = World(num_steps=4)

    outcome = world.run()

    versions = [[group.oldest_version for group in batch] for batch in world.learner.batches]
    assert versions == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert (outcome.num_steps_done, outcome.policy_version, outcome.stopped_early) == (4, 4, False)
    assert all(record.metrics["learner/staleness/max"] == 0 for record in world.monitor.steps)


def test_a_resumed_run_publishes_the_restored_version_before_its_first_rollout() -> None:
    world = World(num_steps=6, start_step=5, start_version=5)

    world.run()

    assert world.journal[:2] == [("copy", 5), ("publish", 5)]
    (batch,) = world.learner.batches
    assert {group.oldest_version for group in batch} == {5}


def test_nothing_is_generated_for_a_step_that_will_not_come() -> None:
    world = World(num_steps=2, checkpoint_every=2)
    world.checkpoints.seconds = 0.05

    world.run()

    assert world.kinds().count("generate") == 2


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_an_asynchronous_run_stays_within_its_bound_and_trains_every_prompt_once(
    max_staleness: int,
) -> None:
    world = World(num_steps=100, num_epochs=1, num_prompts=40, max_staleness=max_staleness)
    world.generator.seconds = 0.0005
    world.learner.seconds = 0.002

    world.num_steps = 20
    world.run()

    staleness = [record.metrics["learner/staleness/max"] for record in world.monitor.steps]
    assert max(staleness) <= max_staleness
    assert max(staleness) > 0, "or nothing was tested"
    assert Counter(world.trained()) == Counter(f"0/p{n:03d}" for n in range(40))


def test_the_steps_of_a_run_without_updates_publish_nothing() -> None:
    world = World(num_steps=2)
    world.learner.updates = lambda _: 0

    outcome = world.run()

    assert world.kinds().count("publish") == 1
    assert outcome.policy_version == 0


# --- verdicts that failed -----------------------------------------------------------------------


def test_a_group_with_one_failed_verdict_is_trained_on_without_it() -> None:
    world = World(num_steps=1)
    world.verifier.rewards = lambda _: [1.0, 1.0, 1.0, None]

    world.run()

    (batch,) = world.learner.batches
    assert [group.rewards for group in batch] == [(1.0, 1.0, 1.0, None)] * 2
    assert world.dropped() == []


def fails_on(*names: str) -> Rewards:
    def rewards(group: RolloutGroup) -> Sequence[float | None]:
        failed = group.group_id in names
        return ([1.0, None, None, None] if failed else [1.0, 0.0, 1.0, 0.0])[: group.group_size]

    return rewards


def test_a_group_with_fewer_than_two_verdicts_is_dropped_with_its_reason_and_refilled() -> None:
    world = World(num_steps=2)
    world.verifier.rewards = fails_on("0/p000")

    world.run()

    assert world.trained() == ["0/p001", "0/p002", "0/p003", "0/p004"]
    reason = "too few verdicts (3 of 4 were failures of ours): the judge is down"
    assert world.ledger.settled_groups[2] == (1, "0/p000", reason)
    assert world.monitor.messages("dropped") == [f"group 0/p000 dropped: {reason}"]
    metrics = [record.metrics["verifier/groups/num_dropped"] for record in world.monitor.steps]
    assert metrics == [1.0, 0.0]


def test_what_is_dropped_while_the_learner_is_busy_elsewhere_is_recorded_once() -> None:
    world = World(num_steps=12, max_staleness=3, num_epochs=1, num_prompts=24, checkpoint_every=1)
    world.checkpoints.seconds = 0.01  # groups arrive between a step's settling and the next step
    failing = {f"0/p{n:03d}" for n in range(0, 24, 3)}
    world.verifier.rewards = fails_on(*failing)

    world.run()

    ended = Counter(group_id for _, group_id, _ in world.ledger.settled_groups)
    assert ended == Counter(f"0/p{n:03d}" for n in range(24))
    assert set(world.dropped()) == failing


def test_groups_dropped_after_the_last_step_are_settled_with_it() -> None:
    world = World(num_steps=3, num_epochs=1, num_prompts=6, evaluation=evaluation_plan(every=50))
    world.verifier.rewards = fails_on("0/p004", "0/p005")

    outcome = world.run()

    assert outcome.num_steps_done == 2
    assert world.trained() == ["0/p000", "0/p001", "0/p002", "0/p003"]
    assert [row[:2] for row in world.ledger.settled_groups[4:]] == [(2, "0/p004"), (2, "0/p005")]
    assert [record.step for record in world.monitor.evaluations] == [0, 2], "measured at its end"
    assert ("checkpoint", 2) in world.journal


def test_a_run_whose_every_group_fails_stops_with_the_reasons() -> None:
    world = World(num_steps=3, num_epochs=None, num_prompts=10)
    world.verifier.rewards = lambda group: [None] * group.group_size

    with pytest.raises(
        NoSignalError, match=r"step 1 never came together.*41 groups.*judge is down"
    ):
        world.run()


def test_an_epoch_in_which_every_group_fails_is_no_success() -> None:
    world = World(num_steps=3, num_epochs=1, num_prompts=6)
    world.verifier.rewards = lambda group: [None] * group.group_size

    with pytest.raises(NoSignalError, match=r"no prompt was left.*6 groups were dropped"):
        world.run()


# --- the end of the prompts ---------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompts", "size"), [(30, 16), (10, 16), (30, 32), (4, 2)])
def test_each_prompt_is_trained_once_an_epoch_and_the_run_ends(num_prompts: int, size: int) -> None:
    num_steps = -(-2 * num_prompts // size)
    world = World(num_steps=num_steps, num_epochs=2, num_prompts=num_prompts, groups_per_step=size)

    outcome = world.run()

    expected = [f"{epoch}/p{n:03d}" for epoch in range(2) for n in range(num_prompts)]
    assert world.trained() == expected
    assert outcome.num_steps_done == num_steps


def test_a_run_saved_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    world = World(num_steps=8, num_epochs=2, num_prompts=8, start_step=4, start_version=4)
    for step in range(4):
        world.ledger.settle(step + 1, [f"0/p{2 * step + k:03d}" for k in range(2)], {})
    world.ledger.settled_groups.clear()

    outcome = world.run()

    assert world.trained() == [f"1/p{n:03d}" for n in range(8)]
    assert outcome.num_steps_done == 8


def test_a_resumed_run_with_nothing_left_to_do_is_no_success() -> None:
    world = World(num_steps=8, num_epochs=1, num_prompts=2, start_step=1, start_version=1)
    world.ledger.settle(1, ["0/p000", "0/p001"], {})

    with pytest.raises(NoSignalError, match="every epoch was finished before"):
        world.run()


# --- failures -----------------------------------------------------------------------------------


def raised_by(world: World) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each caller compares the very object
        world.run()
    return caught.value


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_failure_of_the_generator_ends_the_run_as_it_is(max_staleness: int) -> None:
    world = World(num_steps=50, max_staleness=max_staleness)
    world.generator.failure = GeneratorFailure("the engine broke")
    world.generator.fail_after = 5
    world.verifier.seconds = lambda _: 0.002

    assert raised_by(world) is world.generator.failure


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_failure_of_the_verifier_ends_the_run_as_it_is(max_staleness: int) -> None:
    world = World(num_steps=50, max_staleness=max_staleness)
    world.verifier.failure = VerifierFailure("the judge is gone")
    world.verifier.fail_on = lambda name: name == "0/p007"
    world.generator.stuck = lambda name: name > "0/p007"

    assert raised_by(world) is world.verifier.failure
    assert world.verifier.in_flight == set()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_failure_of_the_learner_ends_the_run_as_it_is(max_staleness: int) -> None:
    world = World(num_steps=50, max_staleness=max_staleness)
    world.learner.failure = DivergedError("not finite")
    world.learner.fail_at = 3
    world.verifier.seconds = lambda name: 0.0 if name < "0/p006" else 3600.0

    assert raised_by(world) is world.learner.failure
    assert world.verifier.in_flight == set()


@pytest.mark.parametrize("failing", ["learner", "generator", "verifier"])
def test_a_failure_leaves_a_checkpoint_of_the_last_settled_step(failing: str) -> None:
    world = World(num_steps=50, groups_per_step=2, checkpoint_every=40)
    match failing:
        case "learner":
            world.learner.failure, world.learner.fail_at = NoSignalError("all equal 1"), 4
        case "generator":
            world.generator.failure, world.generator.fail_after = GeneratorFailure("broke"), 6
        case _:
            world.verifier.failure = VerifierFailure("the judge is gone")
            world.verifier.fail_on = lambda name: name == "0/p007"

    raised_by(world)

    assert [step for kind, step in world.journal if kind == "checkpoint"] == [3]


def test_no_checkpoint_is_written_of_a_learner_that_was_within_a_step() -> None:
    world = World(num_steps=50, groups_per_step=2, checkpoint_every=40, max_staleness=1)
    world.learner.stuck_at = 2
    world.generator.failure, world.generator.fail_after = GeneratorFailure("broke"), 5
    world.generator.seconds = 0.01

    raised_by(world)

    assert "checkpoint" not in world.kinds()


def test_a_learner_that_hangs_in_this_process_ends_the_run_by_the_name_of_its_step() -> None:
    world = World(num_steps=50, checkpoint_every=40)
    world.learner.failure, world.learner.fail_at = LearnerHungError("a step has not ended"), 3

    error = raised_by(world)

    assert isinstance(error, LearnerHungError)
    assert str(error) == "step 3: a step has not ended"
    assert "checkpoint" not in world.kinds(), "nothing can be asked of it"


def test_a_checkpoint_that_fails_after_a_failure_does_not_hide_it() -> None:
    world = World(num_steps=50, checkpoint_every=40)
    world.learner.failure, world.learner.fail_at = DivergedError("not finite"), 3
    world.checkpoints.failure = CheckpointError("disk full")

    assert raised_by(world) is world.learner.failure
    assert world.monitor.messages("checkpoint") == ["no checkpoint at step 2: disk full"]


@pytest.mark.parametrize("max_staleness", [0, 2, 5])
def test_nothing_is_generated_that_nobody_will_train_on(max_staleness: int) -> None:
    world = World(num_steps=3, groups_per_step=2, max_staleness=max_staleness)
    # The seventh group would never come.
    world.generator.failure, world.generator.fail_after = GeneratorFailure("broke"), 6

    assert world.run().num_steps_done == 3
    assert world.generator.num_groups == 6


def test_a_dropped_group_is_made_up_for_after_all_others_are_under_way() -> None:
    world = World(num_steps=3, groups_per_step=2, max_staleness=5)
    world.verifier.rewards = lambda group: (
        [None] * 4 if group.group_id == "0/p004" else alternating(group)
    )

    assert world.run().num_steps_done == 3
    assert world.generator.num_groups == 7


def test_tokens_a_second_are_left_out_of_a_step_that_generated_nothing() -> None:
    world = World(num_steps=4, groups_per_step=2, max_staleness=5)
    world.learner.seconds = 0.02

    world.run()

    speeds = [r.metrics.get("generator/throughput/tokens_per_second") for r in world.monitor.steps]
    assert None in speeds
    assert all(speed is None or speed < 1e7 for speed in speeds)


def test_a_failure_keeps_its_own_cause() -> None:
    world = World()
    cause = RuntimeError("out of memory")
    world.generator.failure = GeneratorFailure("the engine broke")
    world.generator.failure.__cause__ = cause

    assert raised_by(world).__cause__ is cause


def test_a_bug_of_ours_surfaces_as_itself() -> None:
    world = World()
    world.verifier.failure = ZeroDivisionError("a bug")

    assert raised_by(world) is world.verifier.failure


def test_the_failure_that_came_first_is_the_one_that_is_raised() -> None:
    world = World(num_steps=5, max_staleness=1)
    world.verifier.failure = VerifierFailure("first")
    world.verifier.fail_on = lambda name: name == "0/p000"
    world.generator.failure = GeneratorFailure("second")
    world.generator.fail_after = 3
    world.generator.seconds = 0.02

    assert raised_by(world) is world.verifier.failure


def test_a_verifier_that_returns_too_few_verdicts_is_named() -> None:
    world = World()
    world.verifier.rewards = lambda _: [1.0]

    with pytest.raises(ValueError, match="group 0/p000: 1 verdicts for 4 rollouts"):
        world.run()


def test_a_group_the_generator_forgot_is_named_and_never_waited_for() -> None:
    world = World(groups_per_step=3)
    world.generator.lost = lambda name: name == "0/p001"

    with pytest.raises(GeneratorFailure, match="ended without groups 0/p001"):
        world.run()


def test_an_evaluation_that_fails_ends_the_run_as_it_is() -> None:
    world = World(num_steps=4, evaluation=evaluation_plan(every=1))
    world.verifier.failure = VerifierFailure("the judge is gone")
    world.verifier.fail_on = lambda name: name.startswith("eval/") and bool(world.learner.batches)

    assert raised_by(world) is world.verifier.failure


# --- stopping -----------------------------------------------------------------------------------


def stop_at(world: World, step: int) -> Controller:
    controller = world.controller()

    def stop(record: StepRecord) -> None:
        if record.step == step:
            controller.request_stop()

    world.monitor.on_each_step = stop
    return controller


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_stop_finishes_the_step_and_writes_a_checkpoint(max_staleness: int) -> None:
    world = World(num_steps=10, max_staleness=max_staleness)
    world.verifier.seconds = lambda name: 0.0 if name < "0/p006" else 3600.0  # none waited for

    outcome = asyncio.run(world._run(stop_at(world, 3)))

    assert (outcome.num_steps_done, outcome.stopped_early) == (3, True)
    assert world.journal[-1] == ("checkpoint", 3)
    assert len(world.trained()) == 6


def test_a_stop_while_rollouts_are_awaited_still_finishes_their_step() -> None:
    world = World(num_steps=10)
    controller = world.controller()

    def stop_and_pay(group: RolloutGroup) -> Sequence[float | None]:
        controller.request_stop()
        return alternating(group)

    world.verifier.rewards = stop_and_pay

    outcome = asyncio.run(world._run(controller))

    assert (outcome.num_steps_done, outcome.stopped_early) == (1, True)


def test_a_stop_in_the_last_step_is_a_run_that_is_done() -> None:
    world = World(num_steps=3)

    outcome = asyncio.run(world._run(stop_at(world, 3)))

    assert not outcome.stopped_early


def test_a_stop_before_the_first_step_trains_nothing() -> None:
    world = World(num_steps=3)
    controller = world.controller()
    controller.request_stop()

    outcome = asyncio.run(world._run(controller))

    assert (outcome.num_steps_done, outcome.stopped_early) == (0, True)
    assert "checkpoint" not in world.kinds()


def test_a_checkpoint_is_written_when_due_and_at_the_end_and_never_twice() -> None:
    world = World(num_steps=5, checkpoint_every=2)

    world.run()

    assert [step for kind, step in world.journal if kind == "checkpoint"] == [2, 4, 5]


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    world = World(num_steps=4, checkpoint_every=3)
    world.checkpoints.writing_seconds = 0.2

    world.run()

    kinds = world.kinds()
    first = kinds.index("copied")
    assert "step" in kinds[first : kinds.index("checkpoint")]
    assert [step for kind, step in world.journal if kind == "checkpoint"] == [3, 4]
    messages = world.monitor.messages("checkpoint")
    assert messages == ["checkpoint written at step 3", "checkpoint written at step 4"]


def test_a_checkpoint_waits_for_the_one_before_it() -> None:
    world = World(num_steps=3, checkpoint_every=1)
    world.checkpoints.writing_seconds = 0.05

    world.run()

    found = [entry for entry in world.journal if entry[0] in {"copied", "checkpoint"}]
    assert found == [(kind, step) for step in (1, 2, 3) for kind in ("copied", "checkpoint")]


def test_a_checkpoint_that_could_not_be_written_is_an_error_at_the_next_step() -> None:
    world = World(num_steps=50, checkpoint_every=2)
    world.checkpoints.writing_failure = CheckpointError("disk full")

    assert raised_by(world) is world.checkpoints.writing_failure
    assert world.journal[-1] == ("copied", 3)
    assert world.monitor.messages("checkpoint") == ["no checkpoint at step 3: disk full"]


def test_a_checkpoint_that_could_not_be_written_is_an_error_at_the_end() -> None:
    world = World(num_steps=3, checkpoint_every=10)
    world.checkpoints.writing_failure = CheckpointError("disk full")

    assert raised_by(world) is world.checkpoints.writing_failure


def test_a_failure_waits_for_the_checkpoint_that_is_under_way() -> None:
    world = World(num_steps=50, groups_per_step=2, checkpoint_every=2, max_staleness=2)
    world.checkpoints.writing_seconds = 0.1
    world.generator.failure, world.generator.fail_after = GeneratorFailure("broke"), 6

    raised_by(world)

    steps = [step for kind, step in world.journal if kind == "checkpoint"]
    assert steps[0] == 2
    assert steps == sorted(set(steps))


# --- what is seen -------------------------------------------------------------------------------


def test_groups_that_do_not_arrive_are_named_after_a_while() -> None:
    world = World(num_steps=3, groups_per_step=3, watch_seconds=0.05)
    world.generator.stuck = lambda name: name == "0/p004"

    run_until_waiting(world, "2 groups are missing, among them 0/p004, 0/p005")


def test_a_learner_that_does_not_come_back_is_named_after_a_while() -> None:
    world = World(num_steps=3, groups_per_step=3, watch_seconds=0.05)
    world.learner.stuck_at = 2

    run_until_waiting(world, "the learner has been at step 2 for")


def run_until_waiting(world: World, words: str) -> None:
    """Run until it is said that this is waited for; a busy machine may have waited before."""
    said = asyncio.Event()

    def hear(event: RunEvent) -> None:
        if event.kind == "waiting" and words in event.message:
            said.set()

    world.monitor.on_each_event = hear

    async def wait_for_the_message() -> None:
        run = asyncio.create_task(world.controller().run())
        async with asyncio.timeout(120):
            await said.wait()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    asyncio.run(wait_for_the_message())
    world.ledger.close()


def test_every_evaluation_is_recorded_with_how_it_was_sampled() -> None:
    world = World(num_steps=5, evaluation=evaluation_plan(every=2))

    world.run()

    assert [record.step for record in world.monitor.evaluations] == [0, 2, 4, 5]
    last = world.monitor.evaluations[-1]
    assert last.policy_version == 5
    assert last.metrics["eval/sampled/pass_at_4"] == 1.0
    assert last.metrics["eval/greedy/pass_at_1"] == 0.0
    assert last.metrics["controller/time/eval_seconds"] > 0
    sampled = {g.sampling.temperature for g in last.groups if g.group_id.startswith("eval/sampled")}
    assert sampled == {0.7}


def test_the_parts_of_a_steps_time_fit_into_the_step() -> None:
    world = World(num_steps=3)
    world.generator.seconds, world.learner.seconds = 0.01, 0.02
    world.verifier.seconds = lambda _: 0.03
    world.verifier.rewards = fails_on("0/p001", "0/p003")

    world.run()

    for record in world.monitor.steps:
        seconds = {
            name: record.metrics[f"controller/time/{name}_seconds"]
            for name in ("generate", "score", "update", "publish", "step")
        }
        parts = seconds["generate"] + seconds["score"] + seconds["update"] + seconds["publish"]
        assert parts <= seconds["step"] + 1e-3
        assert seconds["generate"] >= 0.02
        assert seconds["score"] >= 0.025
        assert seconds["update"] >= 0.02


REWARD = """
import pathlib, time
here = pathlib.Path(__file__).parent
def reward(prompt, completion, answer, metadata):
    (here / "asked").touch()
    while not (here / "answered").exists():
        time.sleep(0.005)
    return float(len(prompt) % 2)
"""


def test_a_reward_function_that_sleeps_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """It waits for what the event loop does after it has begun."""
    path = tmp_path / "sleepy.py"
    path.write_text(REWARD, encoding="utf-8")
    component = FunctionConfig(
        kind="function", path=f"{path}:reward", num_processes=4, timeout_seconds=100
    )
    verifier = build_verifier(VerifierConfig(components={"sleepy": component}))
    world = World(num_steps=1, groups_per_step=2, group_size=2)

    async def answer() -> None:
        while not (tmp_path / "asked").exists():  # noqa: ASYNC110 - a process has no events
            await asyncio.sleep(0.005)
        (tmp_path / "answered").touch()

    async def run_it() -> None:
        world.verifier = verifier
        answering = asyncio.create_task(answer())
        try:
            async with asyncio.timeout(120):
                await world.controller().run()
        finally:
            answering.cancel()
            await verifier.close()

    asyncio.run(run_it())
    world.ledger.close()
    assert len(world.trained()) == 2
