import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Never

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RunDirectoryError
from headrace.monitors import RolloutMonitor, read_rollouts
from headrace.monitors.rollouts import write_rollouts
from headrace.types import (
    EvaluationRecord,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    RunEvent,
    SamplingParams,
    StepRecord,
    Verdict,
    VersionSpan,
)

SCORED = [Outcome.PASS, Outcome.WRONG, Outcome.RUNTIME, Outcome.TIMEOUT_WALL]

texts = st.text(st.characters(codec="utf-8"), max_size=20)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
numbers = st.floats(-1e6, 1e6)


@st.composite
def rollouts(draw: st.DrawFn, index: int) -> Rollout:
    ids = draw(token_ids)
    cut = draw(st.integers(0, len(ids)))
    edges = sorted({0, cut, len(ids)})
    spans = itertools.pairwise(edges)
    return Rollout(
        rollout_index=index,
        completion_ids=ids,
        loss_mask=tuple(draw(st.booleans()) for _ in ids),
        generator_logprobs=tuple(draw(numbers) for _ in ids),
        version_spans=tuple(
            VersionSpan(policy_version=draw(st.integers(0, 2**40)), start=a, end=b)
            for a, b in spans
        ),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "error"])),
        text=draw(texts),
        raw_logprobs=tuple(draw(numbers) for _ in ids) if draw(st.booleans()) else None,
        kept_support=tuple(draw(st.binary()) for _ in ids) if draw(st.booleans()) else None,
    )


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    reward = draw(st.none() | numbers)
    return Verdict(
        outcome=Outcome.INFRA if reward is None else draw(st.sampled_from(SCORED)),
        reward=reward,
        verifier=draw(texts),
        components=draw(st.dictionaries(texts, st.none() | numbers, max_size=2)),
        detail=draw(texts),
        labels=tuple(draw(st.lists(texts, max_size=2))),
    )


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    size = draw(st.integers(1, 3))
    scored = draw(st.booleans())
    return RolloutGroup(
        group_id=draw(texts),
        prompt=Prompt(
            prompt_id=draw(texts),
            source=draw(texts),
            text=draw(texts),
            token_ids=(1, *draw(token_ids)),
            answer=draw(st.none() | texts),
        ),
        rollouts=tuple(draw(rollouts(k)) for k in range(size)),
        sampling=SamplingParams(
            temperature=draw(st.floats(0, 2)),
            stop_token_ids=draw(token_ids),
            stop_strings=tuple(draw(st.lists(texts, max_size=2))),
        ),
        verdicts=tuple(draw(verdicts()) for _ in range(size)) if scored else None,
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(groups(), max_size=3).map(tuple))
def test_groups_are_read_back_exactly_as_they_were_written(batch: tuple[RolloutGroup, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.parquet"
        write_rollouts(path, batch)
        assert read_rollouts(path) == batch


def test_a_file_without_the_optional_records_is_read_as_one_that_has_none(
    tmp_path: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    path = tmp_path / "x.parquet"
    write_rollouts(path, [make_group([1.0])])
    optional = ["raw_logprobs", "kept_support", "labels"]
    pq.write_table(pq.read_table(path).drop_columns(optional), path)
    assert read_rollouts(path) == (make_group([1.0]),)


def test_a_rollout_that_was_not_scored_has_no_reward_in_the_file(
    tmp_path: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    write_rollouts(tmp_path / "x.parquet", [make_group([1.0, None])])
    table = pq.read_table(tmp_path / "x.parquet")
    assert table["reward"].to_pylist() == [1.0, None]
    assert table["outcome"].to_pylist() == ["pass", "infra"]


def test_greedy_and_sampled_rollouts_of_one_prompt_stay_two_groups(
    tmp_path: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    greedy = make_group([1.0], sampling=SamplingParams(temperature=0.0))
    sampled = make_group([1.0, 0.0], sampling=SamplingParams(temperature=1.0))
    write_rollouts(tmp_path / "x.parquet", [greedy, sampled])
    assert read_rollouts(tmp_path / "x.parquet") == (greedy, sampled)


def test_a_lone_surrogate_does_not_cost_the_file(
    tmp_path: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    write_rollouts(tmp_path / "x.parquet", [make_group([1.0], text="a\ud800b")])
    assert read_rollouts(tmp_path / "x.parquet")[0].rollouts[0].text == "a?b"


def _steps(monitor: RolloutMonitor, last: int, group: RolloutGroup) -> None:
    for step in range(1, last + 1):
        monitor.on_step(
            StepRecord(step=step, num_steps=last, policy_version=0, metrics={}, groups=(group,))
        )


def test_the_first_the_last_and_every_nth_step_are_written(
    tmp_path: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    monitor = RolloutMonitor(tmp_path, every=4)
    _steps(monitor, 10, make_group([1.0]))
    monitor.on_evaluation(
        EvaluationRecord(step=5, policy_version=0, metrics={}, groups=(make_group([0.0]),))
    )
    monitor.on_event(RunEvent(kind="finish", step=10, message="done"))
    monitor.close()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "eval-000005.parquet",
        "step-000001.parquet",
        "step-000004.parquet",
        "step-000008.parquet",
        "step-000010.parquet",
    ]


def test_a_file_that_could_not_be_finished_never_has_its_name(
    tmp_path: Path, make_group: Callable[..., RolloutGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(_table: pa.Table, where: Path, **_options: object) -> Never:
        where.write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", disk_full)
    monitor = RolloutMonitor(tmp_path, every=1)
    _steps(monitor, 1, make_group([1.0]))
    with pytest.raises(OSError, match="No space left"):
        monitor.close()
    assert not (tmp_path / "rollouts" / "step-000001.parquet").exists()


@pytest.mark.parametrize("content", [None, b"", b"not parquet"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "step-000001.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"step-000001\.parquet: no readable rollouts"):
        read_rollouts(path)
