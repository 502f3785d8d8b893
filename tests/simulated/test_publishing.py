"""Weights on their way to the generators while the learner makes its next step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import FakeWeightSync, World, evaluation_plan

from headrace import controller
from headrace.errors import DivergedError, WeightSyncError
from headrace.types import StepRecord


async def come_true(what: Callable[[], bool]) -> None:
    while not what():  # noqa: ASYNC110 - of whatever a test looks at, which sets no event
        await asyncio.sleep(0)


@dataclass
class GatedSync(FakeWeightSync):
    """Brings a version once ``gate`` says so."""

    gate: Callable[[int], bool] = lambda _: True

    async def _bring(self, policy_version: int) -> None:
        await come_true(lambda: self.gate(policy_version))
        await super()._bring(policy_version)


def world(gate: Callable[[World, int], bool], **options: Any) -> World:  # noqa: ANN401 - of World
    made = World(**({"num_steps": 6, "max_staleness": 2} | options))
    made.weight_sync = GatedSync(
        made.journal, made.generator, gate=lambda version: version == 0 or gate(made, version)
    )
    return made


def behind(at: World, version: int) -> bool:
    """Whether the step after ``version`` was made, unless there is none."""
    return at.learner.num_steps > version or at.learner.num_steps == at.num_steps


def long_after(step: int) -> Callable[[World, int], bool]:
    """Return a gate that opens many turns of the event loop after the learner came to ``step``."""
    turns = iter(range(200))
    return lambda at, _: at.learner.num_steps >= step and next(turns, None) is None


def place(at: World, kind: str, what: int) -> int:
    return at.journal.index((kind, what))


def test_the_next_step_is_made_while_weights_are_on_their_way() -> None:
    at = world(behind)

    at.run()

    for version in range(1, at.num_steps):
        assert place(at, "step", version + 1) < place(at, "publish", version)
    assert at.kinds().count("publish") == at.num_steps + 1


def test_the_slots_of_a_step_are_free_once_its_weights_are_with_every_generator() -> None:
    at = world(behind, num_steps=12)

    at.run()

    publications = [n for n, (kind, what) in enumerate(at.journal) if kind == "publish" and what]
    releases = [n for n, (kind, what) in enumerate(at.journal) if kind == "release" and what]
    assert len(releases) == at.num_steps - 1, "of the last step nothing is freed"
    assert all(a < b for a, b in zip(publications, releases, strict=False))
    stalest = [record.metrics["learner/staleness/max"] for record in at.monitor.steps]
    assert max(stalest) == 2, "the bound is reached and kept"


def test_one_publication_is_under_way_at_a_time() -> None:
    at = world(behind)

    at.run()

    for version in range(1, at.num_steps + 1):
        assert place(at, "publish", version - 1) < place(at, "copy", version)


def test_the_learner_does_not_step_before_its_weights_are_copied() -> None:
    at = world(behind)
    at.weight_sync.copy_seconds = 0.005

    at.run()

    for version in range(1, at.num_steps):
        assert place(at, "copy", version) < place(at, "step", version + 1)


@pytest.mark.parametrize("pipeline", [{}, {"depth": 1}])
def test_where_one_batch_is_under_way_at_most_nothing_overlaps(pipeline: dict[str, int]) -> None:
    at = World(num_steps=4, max_staleness=2 if pipeline else 0, pipeline=pipeline)
    at.weight_sync.seconds = lambda _: 0.005

    at.run()

    told = {"copy", "publish", "release", "step"}
    order = [kind for kind in at.kinds() if kind in told]
    assert order == ["copy", "publish", *["release", "step", "copy", "publish"] * 4]


def test_a_step_without_an_update_frees_its_slots_after_the_publication_before_it() -> None:
    at = world(lambda at, version: at.learner.num_steps > version + 1, num_steps=5)
    at.learner.updates = lambda step: int(step == 1)

    at.run()

    assert place(at, "publish", 1) < place(at, "release", 2)
    assert at.kinds().count("copy") == 2


# --- what fails -----------------------------------------------------------------------------------


def raised_by(at: World) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each caller compares the very object
        at.run()
    return caught.value


def test_a_publication_that_fails_beside_a_step_ends_the_run_as_it_is() -> None:
    at = world(lambda at, version: at.learner.num_steps > version)
    at.weight_sync.failure, at.weight_sync.fail_at = WeightSyncError("not the weights"), 2
    at.learner.stuck_at = 3

    assert raised_by(at) is at.weight_sync.failure
    assert "checkpoint" not in at.kinds(), "the learner was within a step"


def test_a_publication_that_fails_while_the_learner_waits_leaves_a_checkpoint() -> None:
    at = world(lambda _at, _version: True)
    at.weight_sync.failure, at.weight_sync.fail_at = WeightSyncError("not the weights"), 1
    at.generator.stuck = lambda name: name >= "0/p002"

    assert raised_by(at) is at.weight_sync.failure
    assert ("checkpoint", 1) in at.journal


def test_the_last_publication_fails_the_run_too() -> None:
    at = world(lambda _at, _version: True)
    at.weight_sync.failure, at.weight_sync.fail_at = WeightSyncError("not the weights"), 6

    assert raised_by(at) is at.weight_sync.failure
    assert at.journal[-1] == ("checkpoint", 6)


def test_a_learner_that_fails_leaves_no_generator_half_told() -> None:
    at = world(long_after(2))
    at.learner.failure, at.learner.fail_at = DivergedError("not finite"), 2

    assert raised_by(at) is at.learner.failure
    assert ("publish", 1) in at.journal


def test_a_run_that_is_cancelled_leaves_no_generator_half_told() -> None:
    at = world(long_after(2))
    at.learner.stuck_at = 2

    async def cancelled() -> None:
        run = asyncio.create_task(at._run(at.controller()))
        await come_true(lambda: at.learner.num_steps >= 2)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    asyncio.run(cancelled())
    assert ("publish", 1) in at.journal


def test_a_run_that_is_cancelled_does_not_wait_for_a_generator_that_never_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "STOP_SECONDS", 0.05)
    for first in (0, 2):  # before anything is generated, and in the middle of training
        at = world(behind)
        at.weight_sync.gate = lambda version, first=first: version < first

        async def cancelled(at: World = at, first: int = first) -> asyncio.Task[object]:
            run = asyncio.create_task(at.controller().run())
            await come_true(lambda: ("copy", first) in at.journal)
            run.cancel()
            await asyncio.wait({run})
            return run

        assert asyncio.run(cancelled()).cancelled()
        assert ("publish", first) not in at.journal


# --- who waits ------------------------------------------------------------------------------------


def test_a_run_that_is_asked_to_stop_waits_for_the_weights_that_are_on_their_way() -> None:
    at = world(lambda at, version: version < 3 or ("checkpoint", 3) in at.journal, num_steps=10)
    made = at.controller()

    def stop(record: StepRecord) -> None:
        if record.step == 3:
            made.request_stop()

    at.monitor.on_each_step = stop

    outcome = asyncio.run(at._run(made))

    assert (outcome.num_steps_done, outcome.stopped_early) == (3, True)
    assert at.journal[-1] == ("publish", 3)


def test_a_checkpoint_waits_for_no_generator() -> None:
    at = world(lambda at, version: version != 2 or ("checkpoint", 2) in at.journal)
    at.checkpoint_every = 2

    at.run()

    assert place(at, "checkpoint", 2) < place(at, "publish", 2)


def test_an_evaluation_is_made_with_the_weights_of_its_step() -> None:
    at = world(lambda _at, _version: True, evaluation=evaluation_plan(every=2))
    at.weight_sync.seconds = lambda _: 0.01

    at.run()

    for record in at.monitor.evaluations:
        assert record.policy_version == record.step
        for end in ("min", "max"):
            assert record.metrics[f"generator/evaluation_version/{end}"] == record.step


def test_an_evaluation_beside_training_waits_for_its_weights_and_the_learner_does_not() -> None:
    plan = evaluation_plan(every=2, interleaved=True)
    at = world(behind, num_steps=8, evaluation=plan)

    at.run()

    for version in (2, 4, 6):
        assert place(at, "step", version + 1) < place(at, "publish", version)
    for record in at.monitor.evaluations:
        assert record.policy_version == record.step
        assert record.metrics["generator/evaluation_version/min"] >= record.step


# --- what is seen ---------------------------------------------------------------------------------


def test_weights_that_do_not_arrive_are_named_after_a_while() -> None:
    at = world(lambda _at, _version: bool(at.monitor.messages("waiting")), watch_seconds=0.05)

    at.run()

    (message, *_) = at.monitor.messages("waiting")
    assert "weights of version 1 have been on their way for" in " ".join(
        at.monitor.messages("waiting")
    ), message


def test_a_step_tells_how_long_publications_took_and_how_long_the_learner_waited_for_them() -> None:
    waiting, beside = World(num_steps=5), World(num_steps=5, max_staleness=2)
    for at in (waiting, beside):
        at.weight_sync.copy_seconds, at.weight_sync.seconds = 0.002, lambda _: 0.01
        at.run()

    for record in waiting.monitor.steps:
        metrics = record.metrics
        whole = metrics["controller/time/publish_seconds"]
        assert 0.009 <= whole <= metrics["controller/time/publish_wait_seconds"]
    took = [r.metrics["controller/time/publish_seconds"] for r in beside.monitor.steps]
    waited = [r.metrics["controller/time/publish_wait_seconds"] for r in beside.monitor.steps]
    assert sum(took) >= 4 * 0.009, "all that were over before the last step was told"
    assert min(waited) >= 0.0015, "each of them was copied"
