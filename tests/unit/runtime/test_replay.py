"""Steps of whole runs that are made again, in every way a learner can be asked to learn."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeMonitor
from lab import write_model

from headrace.controller import Controller
from headrace.errors import CheckpointError, ConfigError, ModelError, RunDirectoryError
from headrace.monitors import read_batch, read_records, write_rollouts
from headrace.monitors.run_directory import rollout_file
from headrace.monitors.step_records import append_record
from headrace.runtime import replay as replay_module
from headrace.runtime import replay_sampling
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun
from headrace.runtime.replay import replay
from headrace.runtime.replay_report import ReplayReport, SamplingReport
from headrace.types import RolloutGroup, StepRecord

AHEAD = (
    "num_steps=6",
    "groups_per_step=2",
    "group_size=4",
    "max_staleness=2",
    "data.eval=null",
    "checkpoint.every=4",
    "checkpoint.keep=9",
)
TWO_UPDATES = ("learner.num_minibatches=2", "groups_per_step=4", "max_staleness=3")
LEARNING = {
    "as it comes": (),
    "two updates": ("learner.num_minibatches=2", "objective.kl_coefficient=0.01"),
    "an adapter": ("learner.lora.rank=4",),
    "a critic": ("objective=ppo",),
    "V-trace": ("objective=impala",),
    "bfloat16": ("learner.compute_dtype=bfloat16", "generator.dtype=bfloat16"),
    "filters": (
        "sampling.top_p=0.9",
        "sampling.kept_support=true",
        "objective.proximal=recompute",
        "objective.correction=tis",
    ),
    "rollouts over updates": ("generator.on_update=keep", "learner.optimizer.schedule=linear"),
}


def train(prepared: PreparedRun, output: Path, *, stop_after: int | None = None) -> None:
    """Train to the end, or until a step; goes on where there is a run already."""
    controllers: list[Controller] = []

    def look(record: StepRecord) -> None:
        if record.step == stop_after:
            controllers[-1].request_stop()

    run = LocalRun(
        prepared=prepared,
        output=output,
        resume=output.exists(),
        extra_monitors=(FakeMonitor(on_each_step=look),),
    )
    asyncio.run(run.train(controllers.append))


def replayed(run: Path, step: int, *, generate: bool = False) -> ReplayReport:
    return asyncio.run(replay(run, step, generate=generate))


@pytest.mark.parametrize("settings", LEARNING.values(), ids=LEARNING.keys())
def test_every_step_of_a_run_that_ran_ahead_and_was_resumed_is_made_again_bit_for_bit(
    settings: Sequence[str], prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    run, prepared = tmp_path / "run", prepare(*AHEAD, *settings)
    train(prepared, run, stop_after=2)
    train(prepared, run)
    stale = [record.metrics["learner/staleness/max"] for record in read_records(run).values()]
    assert max(stale) > 0, "or nothing ran ahead"
    for step in range(1, 7):
        report = replayed(run, step)
        assert report.is_identical, report.lines()
        assert report.notes == []
    again = replayed(run, 6, generate=True)
    assert again.is_identical, again.lines()
    assert again.sampling is not None
    assert again.sampling.num_other_tokens == 0
    assert again.sampling.num_sampled == again.sampling.num_groups or "keep" in str(settings)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of two updates each, with a checkpoint at the fourth; not to be changed."""
    from lab import make_lab  # noqa: PLC0415 - its own lab: the model is exchanged in one test

    from headrace.config import check_config  # noqa: PLC0415 - as `prepare` does
    from headrace.runtime.preflight import preflight  # noqa: PLC0415 - as `prepare` does

    lab = make_lab(tmp_path_factory.mktemp("recorded"))
    prepared = preflight(check_config(lab.recipe, (*AHEAD, *TWO_UPDATES))).require()
    train(prepared, lab.folder / "run")
    return lab.folder / "run"


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """A run to break."""
    return shutil.copytree(recorded, tmp_path / "copied")


def record_batch(run: Path, step: int, groups: Sequence[RolloutGroup]) -> None:
    """Put another batch on record, as if it had been that one from the start."""
    digest = write_rollouts(rollout_file(run, "step", step), groups)
    append_record(run, dataclasses.replace(read_records(run)[step], rollouts=digest))


def next_number(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(-math.inf)))


def test_a_step_is_made_again_from_the_last_checkpoint_before_it(recorded: Path) -> None:
    assert [replayed(recorded, step).first_step for step in (1, 4, 5, 6)] == [1, 1, 5, 5]
    assert replayed(recorded, 6).started_from == "step-000004"


@pytest.mark.parametrize("asked", [3, 4])
def test_a_log_prob_that_is_one_last_place_off_is_seen_in_its_step(
    copied: Path, asked: int
) -> None:
    first, *others = read_batch(copied, read_records(copied)[3])
    rollout = first.rollouts[0]
    logprobs = (next_number(rollout.generator_logprobs[0]), *rollout.generator_logprobs[1:])
    altered = dataclasses.replace(rollout, generator_logprobs=logprobs)
    group = dataclasses.replace(first, rollouts=(altered, *first.rollouts[1:]))
    record_batch(copied, 3, [group, *others])

    report = replayed(copied, asked)

    assert not report.is_identical
    assert report.differences[0].step == 3
    assert report.largest_relative < 1e-3


def test_two_groups_in_another_order_are_seen(copied: Path) -> None:
    first, *between, last = read_batch(copied, read_records(copied)[2])
    # Each now belongs to the update of the other one.
    record_batch(copied, 2, [last, *between, first])
    report = replayed(copied, 2)
    assert not report.is_identical
    assert report.differences[0].step == 2


def test_a_batch_in_another_order_is_not_the_one_on_record(copied: Path) -> None:
    first, second, *others = read_batch(copied, read_records(copied)[2])
    write_rollouts(rollout_file(copied, "step", 2), [second, first, *others])
    with pytest.raises(RunDirectoryError, match=r"step-000002\.parquet: not the file that was"):
        replayed(copied, 2)


def test_a_metric_that_is_one_last_place_off_is_seen(copied: Path) -> None:
    record = read_records(copied)[6]
    loss = math.nextafter(record.metrics["learner/loss/total"], math.inf)
    append_record(
        copied, dataclasses.replace(record, metrics={**record.metrics, "learner/loss/total": loss})
    )
    (difference,) = replayed(copied, 6).differences
    assert (difference.name, difference.recorded) == ("learner/loss/total", loss)


def test_weights_that_came_out_otherwise_are_seen_where_every_metric_agrees(copied: Path) -> None:
    record = read_records(copied)[6]
    after = dataclasses.replace(record.after, checksum=record.after.checksum ^ 1)
    append_record(copied, dataclasses.replace(record, after=after))
    (difference,) = replayed(copied, 6).differences
    assert difference.name == "checksum of the weights after the step"
    assert difference.recorded == f"{after.checksum:016x}"


def test_a_checkpoint_with_other_weights_is_seen_before_the_first_step(copied: Path) -> None:
    fourth, sixth = (copied / "checkpoints" / f"step-00000{step}" / "hf" for step in (4, 6))
    shutil.copy(sixth / "model.safetensors", fourth / "model.safetensors")
    first, *_ = replayed(copied, 5).differences
    assert (first.step, first.name) == (5, "checksum of the weights before the step")


def test_a_checkpoint_of_another_step_than_its_name_says_is_named(copied: Path) -> None:
    fourth, sixth = (copied / "checkpoints" / f"step-00000{step}" for step in (4, 6))
    shutil.rmtree(fourth)
    sixth.rename(fourth)
    with pytest.raises(
        CheckpointError, match="step-000004 is damaged: it says that it is of step 6"
    ):
        replayed(copied, 5)


def test_a_run_that_went_on_with_more_threads_is_made_again_with_as_many(
    prepare: Callable[..., PreparedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = tmp_path / "run", []
    train(prepare(*AHEAD, "num_threads=2"), run, stop_after=2)
    train(prepare(*AHEAD, "num_threads=4"), run)
    shutil.rmtree(run / "checkpoints")

    class Watched(replay_module.ReplayLearner):
        async def laid_out_for(self, record):  # noqa: ANN001, ANN202 - as the original
            learner = await super().laid_out_for(record)
            seen.append((record.step, learner._compute.num_threads))
            return learner

    monkeypatch.setattr(replay_module, "ReplayLearner", Watched)
    report = replayed(run, 4)
    assert report.is_identical, report.lines()
    assert dict(seen) == {1: 1, 2: 1, 3: 2, 4: 2}


def test_another_machine_is_named_where_a_bit_differs(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replay_module.machine_facts

    def elsewhere(device: object) -> object:
        return {**here(device), "instructions": "NEON"}

    monkeypatch.setattr(replay_module, "machine_facts", elsewhere)
    identical = replayed(copied, 5)
    assert identical.is_identical
    (note,) = identical.notes
    assert note.startswith("instructions was ")
    assert note.endswith("and is NEON here")
    assert "NEON" not in "".join(identical.lines())
    record = read_records(copied)[5]
    append_record(copied, dataclasses.replace(record, metrics={}))
    assert "NEON here; bits may differ for that alone" in "\n".join(replayed(copied, 5).lines())


def test_a_step_that_was_never_made_is_an_error_that_says_which_were(recorded: Path) -> None:
    with pytest.raises(RunDirectoryError, match="step 7 is not on record; there are steps 1 to 6"):
        replayed(recorded, 7)


def test_a_gap_between_checkpoint_and_step_is_named(copied: Path) -> None:
    path = copied / "records.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:1] + lines[2:]), "utf-8")
    with pytest.raises(RunDirectoryError, match="from the model it began with on, and step 2 is"):
        replayed(copied, 3)
    assert replayed(copied, 6).is_identical, "the gap lies before its checkpoint"


def test_a_run_that_recorded_nothing_says_how_to_record(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    train(prepare("num_steps=1", "data.eval=null"), tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="no step is on record"):
        replayed(tmp_path / "run", 1)


def test_another_model_than_the_run_began_with_is_refused(copied: Path, tmp_path: Path) -> None:
    path = copied / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["model"]["path"] = str(write_model(tmp_path / "other", seed=1))
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelError, match="is not what the run began with"):
        replayed(copied, 2)


def test_a_recipe_that_this_headrace_cannot_read_is_named(copied: Path) -> None:
    path = copied / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"of_the_future": 1}), "utf-8")
    with pytest.raises(ConfigError, match=r"the recipe of .*copied: of_the_future"):
        replayed(copied, 2)


def test_a_damaged_checkpoint_is_named(copied: Path) -> None:
    (copied / "checkpoints" / "step-000004" / "learner.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000004 is damaged: learner\.json"):
        replayed(copied, 5)


def test_a_record_without_its_layout_is_named(copied: Path) -> None:
    record = read_records(copied)[5]
    facts = {name: value for name, value in record.facts.items() if name != "parallel"}
    append_record(copied, dataclasses.replace(record, facts=facts))
    with pytest.raises(RunDirectoryError, match="step 5 does not tell parallel; replay it with"):
        replayed(copied, 5)


def test_a_replay_changes_nothing_in_the_run(copied: Path) -> None:
    def content() -> dict[str, bytes]:
        files = (path for path in copied.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    before = content()
    replayed(copied, 5)
    assert content() == before


def test_groups_are_sampled_again_by_the_weights_that_sampled_them(recorded: Path) -> None:
    for step in range(1, 7):
        report = replayed(recorded, step, generate=True)
        assert report.is_identical
        assert report.sampling == SamplingReport(
            num_groups=4, is_promised=False, num_sampled=4, num_rollouts=16
        )
    # Its groups are of the version that step 5 began with, so step 4's checkpoint will do.
    assert report.first_step == 5
    assert replayed(recorded, 5, generate=True).first_step == 1, "those of step 5 are older"


@pytest.fixture(scope="module")
def invariant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that promises the bits of every log-prob, with rollouts that span updates."""
    from lab import make_lab  # noqa: PLC0415 - see `recorded`

    from headrace.config import check_config  # noqa: PLC0415 - see `recorded`
    from headrace.runtime.preflight import preflight  # noqa: PLC0415 - see `recorded`

    lab = make_lab(tmp_path_factory.mktemp("invariant"))
    settings = (*AHEAD, "generator.batch_invariant=true", "generator.on_update=keep")
    train(preflight(check_config(lab.recipe, settings)).require(), lab.folder / "run")
    return lab.folder / "run"


def test_what_a_run_promises_of_its_log_probs_is_kept_by_groups_of_one_version(
    invariant: Path,
) -> None:
    for step, record in read_records(invariant).items():
        batch = read_batch(invariant, record)
        of_one = [group for group in batch if group.oldest_version == group.newest_version]
        report = replayed(invariant, step, generate=True)
        assert report.is_identical, report.lines()
        assert report.sampling is not None
        assert report.sampling.num_sampled == len(of_one)


@pytest.mark.parametrize("is_promised", [False, True])
def test_what_is_sampled_otherwise_is_told_and_counts_where_it_was_promised(
    recorded: Path, invariant: Path, monkeypatch: pytest.MonkeyPatch, *, is_promised: bool
) -> None:
    monkeypatch.setattr(replay_sampling, "group_seed", lambda _root, _group_id: 0)
    report = replayed(invariant if is_promised else recorded, 1, generate=True)
    assert report.sampling is not None
    assert report.sampling.num_other_tokens > 0
    assert report.is_identical != is_promised
    assert any("sampled again: " in line for line in report.lines())
    if is_promised:
        assert re.match(
            r"(token|log-prob) \d+ of rollout \d+ of group 0/", report.differences[0].name
        )


def test_a_log_prob_that_another_one_was_recorded_for_is_told_with_its_place(
    invariant: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(invariant, tmp_path / "run")
    first, *others = read_batch(run, read_records(run)[1])
    rollout = first.rollouts[1]
    logprobs = (*rollout.generator_logprobs[:-1], next_number(rollout.generator_logprobs[-1]))
    altered = dataclasses.replace(rollout, generator_logprobs=logprobs)
    rollouts = (first.rollouts[0], altered, *first.rollouts[2:])
    record_batch(run, 1, [dataclasses.replace(first, rollouts=rollouts), *others])
    report = replayed(run, 1, generate=True)
    assert report.sampling is not None
    assert report.sampling.num_other_logprobs == 1
    assert 0 < report.sampling.largest_gap < 1e-5
    place = len(logprobs) - 1
    expected = f"log-prob {place} of rollout 1 of group {first.group_id}"
    assert expected in [difference.name for difference in report.differences]


def test_a_group_with_tokens_of_two_versions_is_left_out(copied: Path) -> None:
    first, *others = read_batch(copied, read_records(copied)[3])
    rollout, (span,) = first.rollouts[0], first.rollouts[0].version_spans
    older = dataclasses.replace(span, policy_version=span.policy_version - 1, end=1)
    spans = (older, dataclasses.replace(span, start=1))
    mixed = dataclasses.replace(rollout, version_spans=spans)
    group = dataclasses.replace(first, rollouts=(mixed, *first.rollouts[1:]))
    record_batch(copied, 3, [group, *others])
    found = replayed(copied, 3, generate=True).sampling
    assert found is not None
    assert (found.num_groups, found.num_sampled, found.num_other_tokens) == (4, 3, 0)


def test_an_engine_that_does_not_repeat_itself_is_not_asked_to(copied: Path) -> None:
    path = copied / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["generator"]["engine"] = "vllm"
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match=r"--generate: the run sampled with .* = \"vllm\""):
        replayed(copied, 2, generate=True)
