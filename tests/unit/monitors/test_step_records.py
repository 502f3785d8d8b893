import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RunDirectoryError
from headrace.monitors import (
    RecordedStep,
    RolloutMonitor,
    Weights,
    read_batch,
    read_records,
    rewind,
)
from headrace.monitors.step_records import append_record
from headrace.types import RolloutGroup, StepRecord

RECORD = RecordedStep(
    step=1,
    before=Weights(policy_version=0, checksum=7),
    after=Weights(policy_version=1, checksum=(1 << 61) - 2),
    metrics={"learner/loss/total": 0.1},
    rollouts="ab" * 16,
    facts={"torch": "2.13.0", "num_threads": 2},
)


def hexes(record: RecordedStep) -> dict[str, str]:
    return {name: value.hex() for name, value in record.metrics.items()}


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=5), st.floats(), max_size=3))
def test_a_record_is_read_back_with_every_bit(
    tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    written = replace(RECORD, metrics=metrics)
    append_record(folder, written)
    found = read_records(folder)[1]
    assert hexes(found) == hexes(written)
    assert replace(found, metrics={}) == replace(written, metrics={})


def test_infinities_and_the_sign_of_a_zero_are_kept_in_strict_json(tmp_path: Path) -> None:
    metrics = {"a": math.inf, "b": -0.0, "c": math.nan}
    append_record(tmp_path, replace(RECORD, metrics=metrics))
    found = read_records(tmp_path)[1].metrics
    assert (found["a"], math.copysign(1, found["b"])) == (math.inf, -1.0)
    assert math.isnan(found["c"])
    text = (tmp_path / "records.jsonl").read_text("utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_step_that_was_made_twice_is_read_as_it_was_made_last(tmp_path: Path) -> None:
    append_record(tmp_path, RECORD)
    append_record(tmp_path, replace(RECORD, rollouts="cd" * 16))
    assert read_records(tmp_path)[1].rollouts == "cd" * 16


def test_records_after_a_checkpoint_are_forgotten_and_the_others_still_agree(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3):
        append_record(tmp_path, replace(RECORD, step=step))
    rewind(tmp_path, 2)
    assert read_records(tmp_path) == {step: replace(RECORD, step=step) for step in (1, 2)}


def test_a_line_that_a_kill_tore_is_no_record(tmp_path: Path) -> None:
    append_record(tmp_path, RECORD)
    append_record(tmp_path, replace(RECORD, step=2))
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert list(read_records(tmp_path)) == [1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"checksum": "0000000000000007"', '"checksum": "0000000000000006"'),
        ("0x1.999999999999ap-4", "0x1.999999999999bp-4"),
        ('"step": 1', '"step": 2'),
        ('"num_threads": 2', '"num_threads": 1'),
    ],
)
def test_a_record_that_was_changed_is_named(tmp_path: Path, old: str, new: str) -> None:
    append_record(tmp_path, RECORD)
    path = tmp_path / "records.jsonl"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    with pytest.raises(RunDirectoryError, match=r"the record of step [12] is damaged"):
        read_records(tmp_path)


def test_a_record_of_another_layout_is_named(tmp_path: Path) -> None:
    append_record(tmp_path, replace(RECORD, metrics={"learner/loss/total": 1.0}))
    path = tmp_path / "records.jsonl"
    line = json.loads(path.read_text("utf-8"))
    del line["after"], line["sum"]
    from headrace.monitors import step_records  # noqa: PLC0415 - signs what no version writes

    line["sum"] = step_records._sum(line)
    path.write_text(json.dumps(line) + "\n", "utf-8")
    with pytest.raises(RunDirectoryError, match="step 1 is of another layout"):
        read_records(tmp_path)


def test_a_run_without_records_says_how_to_have_them(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r'monitors\.record = "steps"'):
        read_records(tmp_path)


@pytest.fixture
def recorded(tmp_path: Path, make_group: Callable[..., RolloutGroup]) -> tuple[RolloutGroup, ...]:
    """The batches of three recorded steps below ``tmp_path``."""
    groups = tuple(replace(make_group([1.0, 0.0]), group_id=f"0/{n}") for n in range(3))
    monitor = RolloutMonitor(
        tmp_path,
        every=100,
        take_weights=lambda version: (
            Weights(policy_version=version - 1, checksum=version - 1),
            Weights(policy_version=version, checksum=version),
        ),
        facts={"torch": "2.13.0"},
    )
    for step, group in enumerate(groups, 1):
        metrics = {"learner/loss/total": step / 3, "controller/time/step_seconds": 1.0}
        monitor.on_step(
            StepRecord(
                step=step, num_steps=9, policy_version=step, metrics=metrics, groups=(group,)
            )
        )
    monitor.close()
    return groups


def test_every_step_is_recorded_with_its_batch_its_weights_and_what_the_learner_said(
    tmp_path: Path, recorded: tuple[RolloutGroup, ...]
) -> None:
    records = read_records(tmp_path)
    assert [read_batch(tmp_path, record) for record in records.values()] == [
        (group,) for group in recorded
    ]
    second = records[2]
    assert (second.before.checksum, second.after.checksum) == (1, 2)
    assert second.metrics == {"learner/loss/total": 2 / 3}
    assert second.facts == {"torch": "2.13.0"}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("damage", ["flip", "cut", "exchange", "remove"])
def test_a_rollout_file_that_is_not_the_recorded_one_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rollouts" / "step-000002.parquet"
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-1])
        case "exchange":
            path.write_bytes((tmp_path / "rollouts" / "step-000001.parquet").read_bytes())
        case _:
            path.unlink()
    record = read_records(tmp_path)[2]
    with pytest.raises(RunDirectoryError, match=r"step-000002\.parquet"):
        read_batch(tmp_path, record)


def test_after_a_write_that_failed_no_step_is_recorded(
    tmp_path: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    def take(version: int) -> tuple[Weights, Weights]:
        weights = Weights(policy_version=version, checksum=0)
        return weights, weights

    monitor = RolloutMonitor(tmp_path, every=1, take_weights=take)
    (tmp_path / "rollouts" / ".step-000001.parquet.partial").mkdir()

    def tell(step: int) -> None:
        monitor.on_step(
            StepRecord(
                step=step,
                num_steps=9,
                policy_version=step,
                metrics={},
                groups=(make_group([1.0]),),
            )
        )

    tell(1)
    with pytest.raises(IsADirectoryError):
        monitor.flush()
    with pytest.raises(IsADirectoryError):
        tell(2)
    with pytest.raises(IsADirectoryError):
        monitor.close()
    assert not (tmp_path / "records.jsonl").exists()
    assert not list((tmp_path / "rollouts").glob("step-*"))
