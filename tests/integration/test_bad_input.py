"""Whatever is wrong is named with its place and its fix, before any work where it can be known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import Command, Ended, Lab, write_model

from headrace.config import check_config
from headrace.runtime.preflight import PreparedRun, preflight


def rewrite(lab: Lab, old: str, new: str) -> None:
    text = lab.recipe.read_text(encoding="utf-8")
    assert old in text
    lab.recipe.write_text(text.replace(old, new), encoding="utf-8")


def append(lab: Lab, name: str, line: str) -> None:
    with (lab.folder / name).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def answers_are_compared(lab: Lab) -> None:
    rewrite(lab, 'kind = "function"\npath = "reward.py:share_of_ones"\nnum_processes = 1', "")
    rewrite(lab, "[verifier.components.ones]", '[verifier.components.ones]\nkind = "exact"')


def break_line_7(lab: Lab) -> None:
    path = lab.folder / "train.jsonl"
    rows = path.read_text(encoding="utf-8").split("\n")
    rows[6] = '{"prompt": "1+1='
    path.write_text("\n".join(rows), encoding="utf-8")


def forget_an_answer(lab: Lab) -> None:
    answers_are_compared(lab)
    append(lab, "train.jsonl", '{"prompt": "9+9="}')


def unknown_family(lab: Lab) -> None:
    write_model(lab.folder / "other", model_type="mumba")
    rewrite(lab, f'"{lab.folder / "model"}"', f'"{lab.folder / "other"}"')


def broken_reward_module(lab: Lab) -> None:
    (lab.folder / "reward.py").write_text("import no_such_module\n", encoding="utf-8")


def forget_the_weights(lab: Lab) -> None:
    (lab.folder / "model/model.safetensors").unlink()


def weights_of_another_width(lab: Lab) -> None:
    other = write_model(lab.folder / "wide", hidden_size=16)
    (other / "model.safetensors").replace(lab.folder / "model/model.safetensors")


def odd_model_config(lab: Lab) -> None:
    path = lab.folder / "model/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"rope_scaling": "linear"}), encoding="utf-8")


def ordinary_english(lab: Lab) -> None:
    append(lab, "train.jsonl", json.dumps({"prompt": "How many?", "answer": "1"}))


def a_reward_module_too_large(lab: Lab) -> None:
    with (lab.folder / "reward.py").open("a", encoding="utf-8") as file:
        file.write("BALLAST = bytearray(400 * 2**20)\n")
    rewrite(lab, "num_processes = 1", "num_processes = 1\nmemory_mib = 256")


FAULTS: dict[str, tuple[Callable[[Lab], None], tuple[str, ...]]] = {
    "a misspelt key": (
        lambda lab: rewrite(lab, "learning_rate", "learning_rat"),
        ("learner.optimizer.learning_rat: unknown key", "learner.optimizer.learning_rate?"),
    ),
    "a wrong type": (
        lambda lab: rewrite(lab, "group_size = 4", 'group_size = "four"'),
        ('group_size = "four": must be a whole number',),
    ),
    "a missing model": (
        lambda lab: rewrite(lab, f'"{lab.folder / "model"}"', '"nowhere/at/all"'),
        ('model.path = "nowhere/at/all"',),
    ),
    "an unknown family": (unknown_family, ("mumba", "llama")),
    "a missing answer": (forget_an_answer, ("train.jsonl, line 15", '"answer"')),
    "a broken line": (break_line_7, ("train.jsonl, line 7",)),
    "a prompt beyond the context": (
        lambda lab: append(lab, "train.jsonl", json.dumps({"prompt": "1+" * 40, "answer": "1"})),
        ("train.jsonl, line 15", "context of 64 tokens"),
    ),
    "a model without its weights": (
        forget_the_weights,
        ("no weights: model.safetensors or model.safetensors.index.json",),
    ),
    "weights of another width": (
        weights_of_another_width,
        ("the weights do not fit config.json", "model.norm.weight is (16,), not (32,)"),
    ),
    "a model config of the wrong kind": (
        odd_model_config,
        ("config.json: rope_scaling = 'linear' must be an object",),
    ),
    "a prompt the vocabulary does not cover": (
        ordinary_english,
        ("train.jsonl, line 15", "cannot encode the text"),
    ),
    "a stop token beyond the vocabulary": (
        lambda lab: rewrite(lab, "max_tokens = 8", "max_tokens = 8\nstop_token_ids = [1, 16]"),
        ("sampling.stop_token_ids = [16]: the model's ids end at 15",),
    ),
    "a mask beyond the vocabulary": (
        lambda lab: rewrite(lab, "max_tokens = 8", "max_tokens = 8\nbanned_token_ids = [2, 99]"),
        ("sampling.banned_token_ids = [99]: the model's ids end at 15",),
    ),
    "a forced prefix that leaves nothing to sample": (
        lambda lab: rewrite(lab, "max_tokens = 8", "max_tokens = 2\nforced_prefix = '1+1'"),
        ("sampling: forced_prefix of 3 tokens with max_tokens = 2 leaves no token to sample",),
    ),
    "a forced prefix that the vocabulary does not cover": (
        lambda lab: rewrite(lab, "max_tokens = 8", "max_tokens = 8\nforced_prefix = 'Hm'"),
        ("sampling: ", "cannot encode the text"),
    ),
    "a mask of the end of sequence alone before a least length": (
        lambda lab: rewrite(
            lab, "max_tokens = 8", "max_tokens = 8\nmin_tokens = 1\nallowed_token_ids = [1]"
        ),
        ("sampling: allowed_token_ids without banned_token_ids and stop ids leaves no token",),
    ),
    "a reward module larger than its processes": (
        a_reward_module_too_large,
        ("verifier.components.ones: ", "MemoryError", "memory_mib = 256, raise it"),
    ),
    "a group of one": (
        lambda lab: rewrite(lab, "group_size = 4", "group_size = 1"),
        ("group_size = 1", "use group_size >= 2"),
    ),
    "a reward module that cannot be imported": (
        broken_reward_module,
        ("reward.py", "no_such_module"),
    ),
    "a reward function that is not there": (
        lambda lab: rewrite(lab, "reward.py:share_of_ones", "reward.py:share_of_one"),
        ("share_of_one", "share_of_ones"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_fault_is_named_with_its_place_before_any_work(
    name: str, verb: str, own_lab: Lab, headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_lab.folder)
    break_it, told = FAULTS[name]
    break_it(own_lab)

    ended = headrace(verb, own_lab.recipe)

    assert ended.status == 2, ended
    for text in told:
        assert text in ended.err
    assert "Traceback" not in ended.err
    assert not (own_lab.folder / "runs").exists()


def test_check_lists_faults_of_every_kind_at_once(own_lab: Lab, headrace: Command) -> None:
    rewrite(own_lab, f'"{own_lab.folder / "model"}"', '"nowhere/at/all"')
    break_line_7(own_lab)
    append(own_lab, "heldout.jsonl", '{"question": "1+1="}')
    broken_reward_module(own_lab)
    rewrite(own_lab, "learning_rate", "learning_rat")
    rewrite(own_lab, "group_size = 4", "group_size = 1")

    ended = headrace("check", own_lab.recipe, "--json")

    assert ended.status == 2
    printed = json.loads(ended.out)
    assert printed["ok"] is False
    told = "\n".join(printed["problems"])
    for text in (
        "learner.optimizer.learning_rat: unknown key",
        "group_size = 1 with objective.advantage",
        "nowhere/at/all",
        "train.jsonl, line 7",
        "heldout.jsonl, line 4",
        "no_such_module",
    ):
        assert text in told


def test_a_stop_token_beyond_every_number_is_one_fault_and_not_two(
    own_lab: Lab, headrace: Command
) -> None:
    setting = "sampling.stop_token_ids=[99999999999999999999]"

    ended = headrace("check", own_lab.recipe, "--set", setting, "--json")

    (problem,) = json.loads(ended.out)["problems"]
    assert problem.endswith("no whole number here may lie beyond 2^64")


def test_what_rests_on_a_faulty_key_is_not_reported_as_well(
    own_lab: Lab, headrace: Command
) -> None:
    answers_are_compared(own_lab)
    path = own_lab.folder / "train.jsonl"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"answer"', '"truth"'), encoding="utf-8")
    rewrite(own_lab, "[data]\n", '[data]\nanswer_colum = "truth"\n')

    ended = headrace("check", own_lab.recipe, "--json")

    (problem,) = json.loads(ended.out)["problems"]
    assert problem.startswith("data.answer_colum: unknown key; did you mean")


def test_a_prompt_the_vocabulary_does_not_cover_can_be_skipped(
    own_lab: Lab, headrace: Command
) -> None:
    ordinary_english(own_lab)

    ended = headrace("check", own_lab.recipe, "--set", "data.on_bad_row=skip")

    assert ended.status == 0, ended
    assert "data.train: 1 of 15 rows skipped for a fault" in ended.err


def test_a_relative_model_means_the_folder_of_the_recipe_and_is_recorded_absolute(
    own_lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def prepared(*settings: str) -> PreparedRun:
        return preflight(check_config(own_lab.recipe, settings)).require()

    beside = prepared("model.path=model")
    assert beside.model.directory == own_lab.folder / "model"
    assert beside.config.model.path == str(own_lab.folder / "model")
    write_model(tmp_path / "here")
    assert prepared("model.path=here").config.model.path == str(tmp_path / "here")
    (own_lab.folder / "nano").mkdir()
    settings = ("model.path=nano", "data.max_prompt_tokens=12", "data.eval=null")
    assert prepared(*settings).config.model.path == "nano", "a name stays a name"


def test_an_absent_model_is_told_both_places_that_were_looked_in(
    own_lab: Lab, headrace: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    ended = headrace("check", own_lab.recipe, "--set", "model.path=models/mine")

    assert ended.status == 2
    assert str(tmp_path / "models/mine") in ended.err
    assert str(own_lab.folder / "models/mine") in ended.err


def test_check_of_a_sound_recipe_says_so(lab: Lab, headrace: Command) -> None:
    ended = headrace("check", lab.recipe, "--json")

    assert ended.status == 0
    assert json.loads(ended.out)["problems"] == []


def test_an_extra_that_is_missing_is_named_with_the_command_that_brings_it(
    own_lab: Lab, headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    rewrite(
        own_lab,
        'type = "jsonl"\npath = "train.jsonl"',
        'type = "reasoning_gym"\ntask = "chain_sum"\nsize = 4',
    )

    ended = headrace("check", own_lab.recipe)

    assert ended.status == 2
    assert "pip install -c constraints.txt -e '.[envs]'" in ended.err


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_of_something_else_is_refused_and_kept(
    resume: bool, own_lab: Lab, headrace: Command
) -> None:
    model = own_lab.folder / "model"
    before = sorted(path.name for path in model.iterdir())

    ended = headrace("train", own_lab.recipe, "--output", model, *(["--resume"] if resume else []))

    assert ended.status == 2
    assert ("holds no run" if resume else "already holds other files") in ended.err
    assert sorted(path.name for path in model.iterdir()) == before


# --- a run that is there ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_not_started_over_nor_resumed_as_another(
    lab: Lab, finished: Path, headrace: Command, tmp_path: Path
) -> None:
    def train(*arguments: object) -> Ended:
        return headrace("train", lab.recipe, "--output", finished, *arguments)

    config = (finished / "config.json").read_bytes()
    ended = train()
    assert ended.status == 2
    assert "already holds a run; continue it with --resume" in ended.err

    ended = train("--resume")
    assert ended.status == 2
    assert "has already made 8 of its 8 steps; raise num_steps" in ended.err

    ended = train("--resume", "--set", "learner.optimizer.learning_rate=1e-3")
    assert ended.status == 2
    assert "learner.optimizer.learning_rate was 0.03 and is 0.001" in ended.err

    other = write_model(tmp_path / "other", seed=5)
    ended = train("--resume", "--set", f"model.path={other}")
    assert ended.status == 2
    assert "model.path was" in ended.err

    assert (finished / "config.json").read_bytes() == config, "a refusal changes nothing"


def flip_a_weights_bit(lab: Lab) -> None:
    model = lab.folder / "model/model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(bytes(content))


def change_an_answer(lab: Lab) -> None:
    path = lab.folder / "train.jsonl"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"answer": "6"', '"answer": "7"'), encoding="utf-8")


def change_the_reward(lab: Lab) -> None:
    path = lab.folder / "reward.py"
    path.write_text(path.read_text("utf-8").replace("return ", "return 1 - "), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("change", [flip_a_weights_bit, change_an_answer, change_the_reward])
def test_a_model_data_or_reward_that_changed_under_a_run_is_refused(
    change: Callable[[Lab], None], own_lab: Lab, headrace: Command
) -> None:
    output = ("--output", own_lab.folder / "run")
    assert headrace("train", own_lab.recipe, *output, "--set", "num_steps=1").status == 0
    change(own_lab)

    ended = headrace("train", own_lab.recipe, *output, "--resume")

    assert ended.status == 2
    assert "was trained from another model" in ended.err
    assert "on other prompts" in ended.err
    assert "another reward function" in ended.err


# --- what only the run can find out -------------------------------------------------------------

ALWAYS = "def share_of_ones(prompt, completion, answer, metadata):\n    {fault}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ('raise RuntimeError("the unit price is missing")', "the unit price is missing"),
        ('return float("nan")', "nan"),
        ("return [1.0]", "list"),
    ],
)
def test_a_reward_function_that_always_fails_stops_the_run_with_its_first_failure(
    fault: str, told: str, own_lab: Lab, headrace: Command
) -> None:
    (own_lab.folder / "reward.py").write_text(ALWAYS.format(fault=fault), encoding="utf-8")

    ended = headrace("train", own_lab.recipe, "--output", own_lab.folder / "run")

    assert ended.status == 1, ended
    assert "error: " in ended.err
    assert "rollouts could not be scored" in ended.err
    assert told in ended.err
    assert (own_lab.folder / "run/report.html").is_file()


@pytest.mark.slow
def test_a_reward_function_that_always_declines_stops_the_run_with_the_reason(
    own_lab: Lab, headrace: Command
) -> None:
    source = ALWAYS.format(fault="return None")
    (own_lab.folder / "reward.py").write_text(source, encoding="utf-8")
    settings = ("--set", "data.eval=null", "--output", own_lab.folder / "run")

    ended = headrace("train", own_lab.recipe, *settings)

    assert ended.status == 1, ended
    assert "step 1 never came together: 81 groups were dropped" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_disk_full_while_checkpointing_loses_nothing_and_says_how_to_go_on(
    own_lab: Lab, headrace: Command
) -> None:
    wide = write_model(own_lab.folder / "wide", hidden_size=128, intermediate_size=512)
    arguments = (
        "--set",
        f"model.path={wide}",
        "--set",
        "num_steps=3",
        "--set",
        "checkpoint.every=1",
    )
    run = own_lab.folder / "run"
    command = ("train", own_lab.recipe, "--output", run, *arguments)
    first = headrace(*command, "--set", "num_steps=1")
    assert first.status == 0, first.err
    kept = {path.name: path.read_bytes() for path in (run / "checkpoints/step-000001").glob("*.*")}

    full = own_lab.train("run", *arguments, "--resume", limit=512).wait()

    assert full.status == 1, full
    assert "checkpoint" in full.err
    assert "could not be written" in full.err
    assert "run again with --resume" in full.err
    assert "Traceback" not in full.err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    assert {
        path.name: path.read_bytes() for path in (run / "checkpoints/step-000001").glob("*.*")
    } == kept

    resumed = headrace(*command, "--resume")
    assert resumed.status == 0, resumed.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_is_named(own_lab: Lab, headrace: Command) -> None:
    own_lab.folder.chmod(0o500)
    ended = headrace("train", own_lab.recipe, "--output", own_lab.folder / "run")
    own_lab.folder.chmod(0o700)

    assert ended.status == 2
    assert "cannot be written" in ended.err
