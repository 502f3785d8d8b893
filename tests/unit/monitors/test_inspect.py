import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from headrace.errors import RunDirectoryError
from headrace.kept_support import encode
from headrace.monitors import inspect_view, read_rollouts
from headrace.monitors.rollouts import write_rollouts
from headrace.types import RolloutGroup, SamplingParams


def _shown(view: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160, color_system=None).print(view)
    return stream.getvalue()


def test_without_a_step_the_groups_of_the_last_one_are_listed(run_directory: Path) -> None:
    text = _shown(inspect_view(run_directory))
    assert "step 20: 8 groups" in text
    assert "plain" in text
    assert "6-9" in text


def test_a_group_is_shown_token_by_token(run_directory: Path) -> None:
    path = run_directory / "rollouts" / "step-000010.parquet"
    group_id = read_rollouts(path)[0].group_id
    view = inspect_view(run_directory, step=10, group_id=group_id, token_text=lambda k: f"<{k}>")
    text = _shown(view)
    assert "rollout 3: stop" in text
    assert "8+2:10-1:9$" in text
    assert "got 10, expected 10" in text
    assert "'<5>'" in text
    assert "-0.3000" in text


def test_raw_log_probs_and_the_number_of_kept_tokens_are_shown_where_they_were_recorded(
    run_directory: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    path = run_directory / "rollouts" / "step-000010.parquet"
    group = make_group([1.0])
    length = len(group.rollouts[0].completion_ids)
    recorded = replace(
        group.rollouts[0],
        raw_logprobs=(-0.4321,) * length,
        kept_support=(b"", *[encode(range(7, 7 + 1234))] * (length - 1)),
    )
    write_rollouts(path, [group, replace(group, group_id="0/r", rollouts=(recorded,))])
    with_records = _shown(inspect_view(run_directory, step=10, group_id="0/r"))
    assert "raw log-prob" in with_records
    assert with_records.count("-0.4321") == length
    assert with_records.count(" 1234 ") == length - 1
    assert "kept " not in _shown(inspect_view(run_directory, step=10, group_id=group.group_id))


def test_a_mask_as_long_as_a_vocabulary_is_shown_in_part(
    run_directory: Path, make_group: Callable[..., RolloutGroup]
) -> None:
    path = run_directory / "rollouts" / "step-000010.parquet"
    group = make_group([1.0], sampling=SamplingParams(banned_token_ids=tuple(range(9000))))
    write_rollouts(path, [group])
    text = _shown(inspect_view(run_directory, step=10, group_id=group.group_id))
    assert "more characters" in text
    assert len(text) < 15_000


def test_control_characters_of_a_completion_never_reach_the_terminal(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run(num_steps=1, text="\x1b]0;owned\x07\x1b[2J[bold]", evaluate_every=None)
    group_id = read_rollouts(directory / "rollouts" / "step-000001.parquet")[0].group_id
    text = _shown(inspect_view(directory, group_id=group_id))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"\x1b[2J[bold]" in text


def test_a_step_or_group_that_is_not_there_is_answered_with_what_is(
    run_directory: Path, build_run: Callable[..., Path]
) -> None:
    with pytest.raises(RunDirectoryError, match=r"no rollouts of step 7 .* there are 1, 10, 20"):
        inspect_view(run_directory, step=7)
    with pytest.raises(RunDirectoryError, match=r"step 20 has no group 0/x; it has 0/00000000, "):
        inspect_view(run_directory, group_id="0/x")
    with pytest.raises(RunDirectoryError, match="rollouts_every >= 1"):
        inspect_view(build_run(num_steps=0, evaluate_every=None))


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"config\.json is missing"):
        inspect_view(tmp_path)
