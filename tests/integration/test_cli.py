"""The command line itself: help, names of runs, one JSON object, exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab import Command, Lab, write_model

from headrace.cli.train import _default_directory, _how_to_resume


def test_python_dash_m_is_the_same_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", "--help"], capture_output=True, text=True, check=True
    )

    for verb in ("train", "check", "eval", "report", "inspect", "verify", "fetch", "doctor"):
        assert verb in ended.stdout


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['headrace', '--help']\n"
        "import headrace.cli\n"
        "try: headrace.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_run_without_an_output_takes_the_next_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert _default_directory("sums", resume=False) == Path("runs/sums")
    assert _default_directory("sums", resume=True) == Path("runs/sums")
    Path("runs/sums").mkdir(parents=True)
    assert _default_directory("sums", resume=False) == Path("runs/sums-2")
    Path("runs/sums-2").mkdir()
    assert _default_directory("sums", resume=False) == Path("runs/sums-3")
    assert _default_directory("sums", resume=True) == Path("runs/sums-2"), "the newest"


def test_the_command_that_resumes_can_be_pasted_into_a_shell() -> None:
    said = _how_to_resume("my recipe.toml", Path("runs/a b"), ['data.system_prompt="be brief"'])

    assert said == (
        "go on with: headrace train 'my recipe.toml' --set 'data.system_prompt=\"be brief\"' "
        "--output 'runs/a b' --resume"
    )


def test_an_unknown_recipe_is_told_what_there_is(headrace: Command) -> None:
    ended = headrace("train", "quickstrat")

    assert ended.status == 2
    assert "did you mean quickstart?" in ended.err


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_verify_prints_a_verdict(more: list[str], tmp_path: Path, headrace: Command) -> None:
    task, answer = tmp_path / "task.json", tmp_path / "answer.txt"
    task.write_text('{"answer": 12}', encoding="utf-8")
    answer.write_text("so it is 12", encoding="utf-8")

    ended = headrace("verify", "--kind", "numeric", "--task", task, "--answer", answer, *more)

    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["reward"] == 1.0


def test_verify_names_the_file_and_line_that_is_not_json(tmp_path: Path, headrace: Command) -> None:
    task = tmp_path / "task.json"
    task.write_text('{"answer": 12', encoding="utf-8")

    ended = headrace("verify", "--kind", "exact", "--task", task, "--answer", task)

    assert ended.status == 2
    assert f"{task}: line 1 is not JSON" in ended.err


def test_doctor_prints_one_object(headrace: Command) -> None:
    ended = headrace("doctor", "--json")

    assert ended.status == 0
    assert {"headrace", "processor", "isolation"} <= set(json.loads(ended.out))


@pytest.mark.parametrize("verb", ["report", "inspect"])
def test_a_directory_without_a_run_is_a_user_error(
    verb: str, tmp_path: Path, headrace: Command
) -> None:
    ended = headrace(verb, tmp_path)

    assert ended.status == 2
    assert "holds no run" in ended.err


def test_eval_with_nothing_to_measure_names_the_key(lab: Lab, headrace: Command) -> None:
    settings = ("--set", "data.eval=null")
    ended = headrace("eval", lab.recipe, "--model", lab.folder / "model", *settings)

    assert ended.status == 2
    assert "data.eval: missing" in ended.err


def test_resuming_without_an_output_takes_the_run_that_was_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(name: str, time: int) -> None:
        for file in ("config.json", "metrics.jsonl"):
            path = Path("runs") / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (time, time))

    run("tiny-3", 100)
    assert _default_directory("tiny", resume=True) == Path("runs/tiny-3"), "the only one"
    run("tiny-2", 300)
    run("tiny-other", 900)
    assert _default_directory("tiny", resume=True) == Path("runs/tiny-2")
    run("tiny", 400)
    assert _default_directory("tiny", resume=True) == Path("runs/tiny")
    Path("runs/tiny/report.html").touch()
    Path("runs/tiny-3/report.html").touch()
    assert _default_directory("tiny", resume=True) == Path("runs/tiny"), "a report is no run"
    Path("runs/tiny-4").mkdir()
    assert _default_directory("tiny", resume=True) == Path("runs/tiny"), "an empty one holds none"


def test_eval_refuses_an_output_without_a_directory_before_any_work(
    lab: Lab, headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.evaluation.evaluate_model", None)
    output = lab.folder / "nowhere" / "rollouts.parquet"

    ended = headrace("eval", lab.recipe, "--model", lab.folder / "model", "--output", output)

    assert ended.status == 2, ended
    assert f"--output {output}: no directory {output.parent}" in ended.err


def test_eval_finds_its_model_from_where_it_is_called_and_says_what_train_says(
    own_lab: Lab, headrace: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", seed=3)
    (own_lab.folder / "model/model.safetensors").unlink()
    options = {"temperature": 0.6}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(options), encoding="utf-8")
    output = tmp_path / "rollouts.parquet"

    ended = headrace("eval", own_lab.recipe, "--model", "model", "--output", output, "--json")

    assert ended.status == 0, ended
    assert "eval/greedy/pass_at_1" in json.loads(ended.out)["metrics"]
    assert "note: generation_config.json of the model sets temperature = 0.6" in ended.err
    assert output.is_file()


def test_eval_prints_what_it_measured_even_if_the_rollouts_cannot_be_written(
    lab: Lab, headrace: Command, tmp_path: Path
) -> None:
    output = tmp_path / "taken.parquet"
    (tmp_path / ".taken.parquet.partial").mkdir()

    ended = headrace("eval", lab.recipe, "--model", lab.folder / "model", "--output", output)

    assert ended.status == 1, ended
    assert "eval/greedy/pass_at_1" in ended.out
    assert f"{output} cannot be written" in ended.err


def test_eval_in_which_nothing_could_be_scored_fails_with_the_reason(
    own_lab: Lab, headrace: Command
) -> None:
    source = "def share_of_ones(prompt, completion, answer, metadata):\n    return None\n"
    (own_lab.folder / "reward.py").write_text(source, encoding="utf-8")

    ended = headrace("eval", own_lab.recipe, "--model", own_lab.folder / "model", "--json")

    assert ended.status == 1, ended
    assert "none of the 9 rollouts could be scored" in ended.err
    assert "ones: " in ended.err
