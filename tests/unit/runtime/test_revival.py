"""A run lives again after its learner's death, so many times in a row as the recipe allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.config import FaultConfig
from headrace.controller import RunOutcome
from headrace.errors import CheckpointError, DivergedError, LearnerFailure, RunError
from headrace.learners import StoredCheckpoint
from headrace.runtime import revival
from headrace.runtime.revival import Beginning, death_in, outlive

LAST = 10


def stored(step: int) -> StoredCheckpoint:
    return StoredCheckpoint(
        directory=Path(f"step-{step}"), step=step, policy_version=step, fingerprint="f"
    )


@dataclass
class Shelf:
    """Checkpoints; the one under way becomes one when it is settled."""

    newest: StoredCheckpoint | None = None
    under_way: StoredCheckpoint | None = None
    journal: list[str] = field(default_factory=list)

    async def settle(self) -> None:
        self.journal.append("settle")
        if self.under_way is not None:
            self.newest, self.under_way = self.under_way, None

    def latest(self) -> StoredCheckpoint | None:
        self.journal.append("latest")
        return self.newest


@dataclass
class Lives:
    """Each life does what the next of ``endings`` says; after them the run ends well."""

    shelf: Shelf
    endings: list[Callable[[Shelf], Exception]]
    beginnings: list[Beginning] = field(default_factory=list)

    async def live(self, beginning: Beginning) -> RunOutcome:
        self.beginnings.append(beginning)
        if self.endings:
            raise self.endings.pop(0)(self.shelf)
        return RunOutcome(num_steps_done=LAST, policy_version=LAST, stopped_early=False)


def dies(text: str, checkpoint: int | None = None) -> Callable[[Shelf], Exception]:
    def ending(shelf: Shelf) -> Exception:
        if checkpoint is not None:
            shelf.newest = stored(checkpoint)
        return LearnerFailure(text)

    return ending


def lived(
    *endings: Callable[[Shelf], Exception], restarts: int = 3, shelf: Shelf | None = None
) -> Lives:
    lives = Lives(shelf or Shelf(), list(endings))
    limits = FaultConfig(max_learner_restarts=restarts, backoff_seconds=0.0)
    asyncio.run(outlive(lives.live, Beginning(checkpoint=None), lives.shelf, limits))
    return lives


def test_a_run_without_a_death_lives_once() -> None:
    assert lived().beginnings == [Beginning(checkpoint=None)]


def test_the_next_life_begins_at_the_newest_checkpoint_and_knows_of_the_death() -> None:
    lives = lived(dies("killed", checkpoint=4))
    first, second = lives.beginnings
    assert first.death is None
    assert second.checkpoint == stored(4)
    assert str(second.death) == "killed"


def test_a_checkpoint_under_way_is_settled_before_the_newest_is_asked_for() -> None:
    shelf = Shelf(under_way=stored(6))
    lives = lived(dies("killed"), shelf=shelf)
    assert shelf.journal == ["settle", "latest"]
    assert lives.beginnings[1].step == 6


def test_a_learner_that_dies_again_and_again_ends_the_run_with_the_first_cause() -> None:
    with pytest.raises(LearnerFailure) as ended:
        lived(dies("out of memory"), dies("second"), dies("third"), restarts=2)
    said = str(ended.value)
    assert "died 3 times in a row" in said
    assert "faults.max_learner_restarts = 2" in said
    assert "First: out of memory" in said
    assert "Last: third" in said
    assert "--resume goes on from the start" in said


def test_a_new_checkpoint_between_two_deaths_begins_the_count_anew() -> None:
    deaths = [dies(f"death {step}", checkpoint=step) for step in range(1, 8)]
    assert len(lived(*deaths, restarts=1).beginnings) == 8


def test_no_restart_is_made_where_none_is_allowed() -> None:
    with pytest.raises(LearnerFailure, match=r"killed\. faults\.max_learner_restarts = 0"):
        lived(dies("killed"), restarts=0)


@pytest.mark.parametrize("error", [DivergedError("not finite"), RunError("a rank raised")])
def test_what_says_itself_what_is_wrong_ends_the_run_at_once(error: RunError) -> None:
    with pytest.raises(type(error), match=str(error)):
        lived(lambda _: error)


def test_a_death_is_found_behind_what_was_waiting_for_the_learner() -> None:
    death = LearnerFailure("killed")
    waiting = CheckpointError("could not be written")
    waiting.__cause__ = death
    assert death_in(waiting) is death
    assert death_in(CheckpointError("the disk is full")) is None
    assert len(lived(lambda _: waiting).beginnings) == 2


def test_waits_are_twice_as_long_each_time_and_bounded() -> None:
    limits = FaultConfig(backoff_seconds=4.0)
    waits = [revival._backoff_seconds(limits, count) for count in range(1, 7)]
    assert waits == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
