"""What is noted of published weights, and that a checkpoint waits for the records before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.generators.torch_engine import runner_choice
from headrace.monitors import RecordedStep, Weights, read_records
from headrace.runtime import recording
from headrace.runtime.preflight import PreparedRun
from headrace.runtime.recording import Recording, as_recorded, facts_of
from headrace.types import StepRecord, WeightUpdate


def recording_of(prepared: PreparedRun, folder: Path) -> Recording:
    return Recording(folder, prepared.config, num_steps=9, num_threads=1, generator_threads=1)


class Learner:
    """Publishes what it is told to."""

    version = 0
    checksum = 0

    async def export(self) -> WeightUpdate:
        return WeightUpdate(policy_version=self.version, tensors={}, checksum=self.checksum)


class Rehearsal:
    """A recording, with a learner that publishes and a monitor that takes."""

    def __init__(self, prepared: PreparedRun, folder: Path) -> None:
        self.recording = Recording(
            folder, prepared.config, num_steps=9, num_threads=1, generator_threads=1
        )
        self.learner = Learner()
        self.export = self.recording.noting(self.learner.export)

    def publish(self, version: int, checksum: int | None = None) -> None:
        self.learner.version = version
        self.learner.checksum = version if checksum is None else checksum
        asyncio.run(self.export())

    def take(self, version: int) -> tuple[int, int]:
        before, after = self.recording._take(version)
        return before.checksum, after.checksum


@pytest.fixture
def rehearsal(prepare: Callable[..., PreparedRun], tmp_path: Path) -> Rehearsal:
    return Rehearsal(prepare("monitors.record=steps"), tmp_path)


def test_a_step_has_the_weights_that_were_published_before_and_after_it(
    rehearsal: Rehearsal,
) -> None:
    rehearsal.publish(0)
    rehearsal.publish(2)
    assert rehearsal.take(2) == (0, 2)
    rehearsal.publish(4)
    assert rehearsal.take(4) == (2, 4)


def test_a_step_without_an_update_begins_and_ends_with_the_same_weights(
    rehearsal: Rehearsal,
) -> None:
    rehearsal.publish(0)
    rehearsal.publish(1)
    assert rehearsal.take(1) == (0, 1)
    assert rehearsal.take(1) == (1, 1)


def test_weights_that_are_published_again_for_who_comes_late_are_no_other_weights(
    rehearsal: Rehearsal,
) -> None:
    rehearsal.publish(0)
    rehearsal.publish(1)
    rehearsal.publish(1)
    assert rehearsal.take(1) == (0, 1)


def test_a_step_that_is_told_of_after_the_next_publication_has_its_own_weights(
    rehearsal: Rehearsal,
) -> None:
    for version in (0, 1, 2):
        rehearsal.publish(version)
    assert rehearsal.take(1) == (0, 1)
    assert rehearsal.take(2) == (1, 2)


def test_what_a_learner_that_died_had_published_is_not_what_the_next_one_begins_with(
    rehearsal: Rehearsal,
) -> None:
    for version in (0, 1, 2):
        rehearsal.publish(version)
    rehearsal.export = rehearsal.recording.noting(rehearsal.learner.export)
    rehearsal.publish(1, checksum=11)
    assert rehearsal.take(1) == (11, 11)
    rehearsal.publish(2, checksum=12)
    assert rehearsal.take(2) == (11, 12)


def test_a_step_whose_weights_were_never_published_is_not_recorded(rehearsal: Rehearsal) -> None:
    rehearsal.publish(0)
    with pytest.raises(LookupError, match="version 3 were told of before they were published"):
        rehearsal.take(3)


def test_a_checkpoint_is_there_only_once_the_steps_before_it_are_on_record(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    class Store:
        """Tells what was on record when a checkpoint became durable."""

        async def begin(
            self, step: int, policy_version: int, write: recording.Write
        ) -> asyncio.Task[list[int]]:
            del step, policy_version
            writing = await write(tmp_path)

            async def finish() -> list[int]:
                assert writing is not None
                await writing
                return list(read_records(tmp_path))

            return asyncio.create_task(finish())

    async def save(_directory: Path) -> None:
        return None

    async def checkpoint() -> list[int]:
        return await (await rehearsal.recording.before(Store()).begin(3, 3, save))

    rehearsal.publish(0)
    monitor = rehearsal.recording.monitor
    assert monitor is not None
    for step in (1, 2, 3):
        rehearsal.publish(step)
        monitor.on_step(
            StepRecord(
                step=step,
                num_steps=9,
                policy_version=step,
                metrics={},
                groups=(),
            )
        )
    assert asyncio.run(checkpoint()) == [1, 2, 3]
    assert read_records(tmp_path)[3].after == Weights(policy_version=3, checksum=3)


def test_records_that_cannot_be_written_do_not_cost_a_checkpoint(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    monitor = rehearsal.recording.monitor
    assert monitor is not None
    (tmp_path / "rollouts" / ".step-000001.parquet.partial").mkdir()
    rehearsal.publish(0)
    monitor.on_step(StepRecord(step=1, num_steps=9, policy_version=0, metrics={}, groups=()))
    rehearsal.recording.settle()
    with pytest.raises(IsADirectoryError):
        monitor.close()


@pytest.mark.parametrize(
    ("settings", "is_recorded"),
    [
        ((), False),
        (("max_staleness=1",), True),
        (("max_staleness=1", "monitors.record=none"), False),
        (("monitors.record=steps", "monitors.rollouts_every=0"), True),
    ],
)
def test_steps_are_recorded_where_the_recipe_says_so_or_a_run_would_not_repeat(
    prepare: Callable[..., PreparedRun],
    tmp_path: Path,
    settings: tuple[str, ...],
    is_recorded: bool,
) -> None:
    found = Recording(
        tmp_path, prepare(*settings).config, num_steps=9, num_threads=1, generator_threads=1
    )
    assert found.monitor is not None
    assert (found.monitor._take_weights is not None) == is_recorded
    found.monitor.close()


def test_a_recipe_becomes_what_was_resolved_on_the_machine_that_recorded(
    prepare: Callable[..., PreparedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On every processor: nothing is multiplied here.
    monkeypatch.setattr(runner_choice, "can_multiply_int8", lambda _: True)
    there = prepare(
        "generator.dtype=int8", "learner.compute_dtype=bfloat16", "learner.parallel.shards=2"
    ).config
    facts = facts_of(there, num_updates=8, num_threads=3, generator_threads=1)
    weights = Weights(policy_version=0, checksum=0)
    record = RecordedStep(
        step=1, before=weights, after=weights, metrics={}, rollouts="", facts=facts
    )
    here = as_recorded(prepare("learner.compute_dtype=auto").config, record)
    assert here.learner.compute_dtype == "bfloat16"
    assert here.generator.dtype == facts["weights_dtype"]
    assert here.generator.dtype in {"bfloat16", "float32"}, "what is published, not eight bits"
    assert here.learner.parallel == there.learner.parallel
