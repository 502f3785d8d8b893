"""What of its verifier a run must keep when it is resumed."""

from pathlib import Path

import pytest

from headrace.config import RunConfig, parse_config
from headrace.errors import RunDirectoryError
from headrace.runtime import run_files

JUDGE = {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "question": "Right?"}


def recipe(**options: object) -> RunConfig:
    return parse_config(
        {
            "num_steps": 1,
            "model": {"path": "nano"},
            "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
            "verifier": {"components": {"style": {**JUDGE, **options}}},
        }
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"url": "https://elsewhere/v1"},
        {"api_key_variable": "OTHER_KEY"},
        {"max_concurrent": 99, "max_retries": 0},
    ],
)
def test_a_judge_may_move_between_a_run_and_its_resumption(
    changed: dict[str, object], tmp_path: Path
) -> None:
    run_files.make(tmp_path / "run")
    run_files.create(tmp_path / "run", recipe())
    run_files.check_same_run(tmp_path / "run", recipe(**changed))


@pytest.mark.parametrize(
    "changed", [{"question": "Short?"}, {"model": "other"}, {"votes": 3}, {"weight": 2.0}]
)
def test_a_judge_that_judges_otherwise_makes_another_run(
    changed: dict[str, object], tmp_path: Path
) -> None:
    run_files.make(tmp_path / "run")
    run_files.create(tmp_path / "run", recipe())
    with pytest.raises(RunDirectoryError, match=r"verifier\.components\.style"):
        run_files.check_same_run(tmp_path / "run", recipe(**changed))
