"""Asynchronous runs as a process: what new weights do to rollouts in mid-air, and what is late."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

from headrace.monitors import read_rollouts
from headrace.types import Rollout, RolloutGroup

pytestmark = pytest.mark.slow

BOUND = 3
AHEAD = (
    f"max_staleness={BOUND}",
    "num_steps=12",
    "groups_per_step=2",
    "group_size=4",
    # One group at a time: weights arrive while something is being sampled.
    "generator.max_concurrent_rollouts=4",
    "sampling.max_tokens=44",
    "checkpoint.every=100",
)


@dataclass(frozen=True)
class Trained:
    """What a run has left behind."""

    directory: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self._lines("step")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return self._lines("evaluation")

    def _lines(self, kind: str) -> list[dict[str, Any]]:
        text = (self.directory / "metrics.jsonl").read_text(encoding="utf-8")
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    @property
    def batches(self) -> list[tuple[RolloutGroup, ...]]:
        files = sorted((self.directory / "rollouts").glob("step-*.parquet"))
        return [read_rollouts(path) for path in files]

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for batch in self.batches for group in batch for r in group.rollouts]

    def settled(self) -> list[tuple[str, str | None]]:
        """Return what was trained on or dropped, as ``epoch/prompt_id`` and the reason."""
        with sqlite3.connect(self.directory / "ledger.sqlite") as ledger:
            rows = ledger.execute("SELECT epoch, prompt_id, reason FROM settled").fetchall()
        return [(f"{epoch}/{prompt}", reason) for epoch, prompt, reason in rows]


def train(lab: Lab, name: str, *settings: str) -> Trained:
    arguments = [part for setting in settings for part in ("--set", setting)]
    ended = lab.train(name, *arguments).wait()
    assert ended.status == 0, ended.err
    return Trained(lab.folder / name)


def check_bound_and_ledger(run: Trained) -> None:
    """The bound holds for every token of every step, and each prompt was settled once an epoch."""
    # A step without a signal moves no weights, so versions may lag behind steps.
    versions = [0, *(step["policy_version"] for step in run.steps)]
    for version, batch in zip(versions, run.batches, strict=False):
        for group in batch:
            assert group.newest_version is not None
            assert group.oldest_version is not None
            assert version - BOUND <= group.oldest_version <= group.newest_version <= version
    settled = Counter(group_id for group_id, _ in run.settled())
    assert set(settled.values()) == {1}
    trained = {group.group_id for batch in run.batches for group in batch}
    assert trained == {group_id for group_id, reason in run.settled() if reason is None}


def check_evaluations(run: Trained) -> None:
    """Each says which versions sampled it; the first and the last are of one."""
    assert [line["step"] for line in run.evaluations] == [0, 4, 8, 12]
    for line in run.evaluations:
        path = run.directory / "rollouts" / f"eval-{line['step']:06d}.parquet"
        versions = [
            span.policy_version
            for group in read_rollouts(path)
            for rollout in group.rollouts
            for span in rollout.version_spans
        ]
        assert line["metrics"]["generator/evaluation_version/min"] == min(versions)
        assert line["metrics"]["generator/evaluation_version/max"] == max(versions)
        assert line["policy_version"] <= min(versions)
    first, last = run.evaluations[0], run.evaluations[-1]
    assert first["metrics"]["generator/evaluation_version/max"] == 0
    assert last["metrics"]["generator/evaluation_version/min"] == run.steps[-1]["policy_version"]


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart", "wait"])
def test_new_weights_do_to_rollouts_in_mid_air_what_the_recipe_says(
    lab: Lab, on_update: str
) -> None:
    run = train(lab, f"mid-air-{on_update}", *AHEAD, f"generator.on_update={on_update}")

    assert len(run.steps) == 12
    check_bound_and_ledger(run)
    check_evaluations(run)
    num_versions = [len(rollout.version_spans) for rollout in run.rollouts]
    if on_update in {"keep", "recompute"}:
        assert max(num_versions) > 1, "rollouts go on under new weights"
    else:
        assert set(num_versions) == {1}, "every rollout is of one version"
    assert max(step["metrics"]["learner/staleness/max"] for step in run.steps) > 0


UNEVEN = (*AHEAD, "generator.max_concurrent_rollouts=512", "generator.on_update=keep")


def test_what_is_late_is_carried_over_and_trained_on_within_the_bound(lab: Lab) -> None:
    run = train(lab, "carried", *UNEVEN, "pipeline.late=carry_over")

    check_bound_and_ledger(run)
    assert not [reason for _, reason in run.settled() if reason]
    assert len(run.settled()) == 24
    assert {rollout.finish_reason for rollout in run.rollouts} <= {"stop", "length"}


@pytest.mark.parametrize("bound", [0, BOUND])
def test_what_is_late_is_taken_back_from_the_engine_and_recorded_as_dropped(
    lab: Lab, bound: int
) -> None:
    settings = ("pipeline.late=cancel", "pipeline.surplus_groups=2", f"max_staleness={bound}")
    run = train(lab, f"given-up-{bound}", *UNEVEN, *settings)

    check_bound_and_ledger(run)
    dropped = [reason for _, reason in run.settled() if reason]
    assert dropped
    assert all(reason.startswith("late: ") for reason in dropped)
    assert sum(step["metrics"]["controller/groups/num_late"] for step in run.steps) == len(dropped)
    assert {rollout.finish_reason for rollout in run.rollouts} <= {"stop", "length"}
