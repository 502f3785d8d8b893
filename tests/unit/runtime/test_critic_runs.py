"""Whole runs with a value head, and with groups that are replaced until they have a spread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeMonitor

from headrace.controller import RunOutcome
from headrace.data import Ledger
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun
from headrace.types import StepRecord

SHORT = ("num_steps=4", "groups_per_step=4", "group_size=2", "eval.every=4")


def run(
    prepared: PreparedRun, output: Path, *, resume: bool = False
) -> tuple[RunOutcome, list[StepRecord]]:
    records: list[StepRecord] = []
    monitor = FakeMonitor(on_each_step=records.append)
    local = LocalRun(prepared=prepared, output=output, resume=resume, extra_monitors=(monitor,))
    return asyncio.run(local.train()), records


@pytest.mark.parametrize(
    "settings",
    [
        ("objective=ppo",),
        ("objective=ppo", "group_size=1", "groups_per_step=6"),
        ("objective=ppo", "learner.num_minibatches=2", "max_staleness=2"),
        ("objective=impala", "max_staleness=2"),
    ],
    ids=["ppo", "groups of one", "two updates, ahead", "impala, ahead"],
)
def test_a_run_with_a_critic_ends_and_reports_its_values(
    settings: tuple[str, ...], prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    outcome, records = run(prepare(*SHORT, *settings), tmp_path / "run")
    assert outcome.num_steps_done == 4
    assert all("learner/value/squared_error" in record.metrics for record in records)
    assert (tmp_path / "run" / "checkpoints" / "step-000004" / "critic.safetensors").is_file()


def test_a_run_with_a_critic_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    settings = (*SHORT, "objective=ppo", "checkpoint.every=2")

    _, through = run(prepare(*settings), tmp_path / "through")
    _, first = run(prepare(*settings, "num_steps=2"), tmp_path / "halves")
    _, second = run(prepare(*settings, "num_steps=4"), tmp_path / "halves", resume=True)
    losses = [[r.metrics["learner/loss/total"] for r in part] for part in (through, first, second)]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1] + losses[2]


def test_with_dynamic_sampling_every_group_of_every_batch_has_a_spread(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    prepared = prepare(*SHORT, "num_steps=2", "dynamic_sampling={max_refills = 50}")
    output = tmp_path / "run"
    _, records = run(prepared, output)
    groups = [group for record in records for group in record.groups]
    assert len(groups) == 8
    assert all(len(set(group.rewards)) > 1 for group in groups)
    counts = [record.metrics["controller/groups/num_refilled"] for record in records]
    assert sum(counts) > 0, "or nothing was replaced"
    with Ledger(output / "ledger.sqlite") as ledger:
        reasons = ledger.dropped_reasons()
        assert all(reason.startswith("no spread") for reason in reasons)
        assert sum(reasons.values()) == sum(counts)
