"""From a TOML file and overrides to one frozen config, and back through JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import JsonlSource, RunConfig, dump_config, load_config, parse_config
from headrace.errors import ConfigError

RECIPE = """\
num_steps = 3
[model]
path = "nano"
[data.train]
type = "jsonl"
path = "train.jsonl"
[verifier.components.answer]
kind = "exact"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def tree(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever TOML can hold
    return {
        "num_steps": 3,
        "model": {"path": "nano"},
        "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
        "verifier": {"components": {"answer": {"kind": "exact"}}},
        **settings,
    }


def test_a_recipe_file_and_the_same_mapping_give_the_same_config(
    recipe: Callable[[str], Path],
) -> None:
    path = recipe(RECIPE)
    assert load_config(path) == parse_config(tree(), base=path.parent)


@given(
    seed=st.integers(0, 2**64),
    temperature=st.floats(0.01, 100.0),
    stops=st.lists(st.text(min_size=1), max_size=3),
    name=st.text(min_size=1),
    option=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_a_dumped_config_parses_to_an_equal_one(
    seed: int, temperature: float, stops: list[str], name: str, option: object
) -> None:
    source = {"type": "reasoning_gym", "task": "chain_sum", "size": 3, "options": {"x": option}}
    config = parse_config(
        tree(
            seed=seed,
            sampling={"temperature": temperature, "stop_strings": stops},
            verifier={"components": {name: {"kind": "math", "weight": -0.5}}},
            data={"train": source},
        )
    )
    assert parse_config(json.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("seed=7", lambda c: c.seed == 7),
        (" seed = 7 ", lambda c: c.seed == 7),
        ("sampling.temperature=0.5", lambda c: c.sampling.temperature == 0.5),
        ("name=pilot-2", lambda c: c.name == "pilot-2"),
        ('name="pilot"', lambda c: c.name == "pilot"),
        ("data.shuffle=false", lambda c: c.data.shuffle is False),
        ("model.path=/models/a=b", lambda c: c.model.path == "/models/a=b"),
        ("sampling.stop_token_ids=[1, 2]", lambda c: c.sampling.stop_token_ids == (1, 2)),
        ('sampling.stop_strings=["a", "b"]', lambda c: c.sampling.stop_strings == ("a", "b")),
        ("learner.optimizer.betas=[0.9, 0.95]", lambda c: c.learner.optimizer.betas == (0.9, 0.95)),
        ("data.train.answer_column=null", lambda c: c.data.train.answer_column is None),
        (
            "verifier.components.answer.weight=2",
            lambda c: c.verifier.components["answer"].weight == 2,
        ),
        ('verifier.components."a.b".kind=math', lambda c: "a.b" in c.verifier.components),
        ("data.system_prompt=", lambda c: c.data.system_prompt == ""),
        ("data.system_prompt=1\nseed = 9", lambda c: c.data.system_prompt == "1\nseed = 9"),
    ],
)
def test_an_override_replaces_one_key(
    recipe: Callable[[str], Path], override: str, read: Callable[[RunConfig], bool]
) -> None:
    assert read(load_config(recipe(RECIPE), [override]))


def test_the_last_of_two_overrides_wins(recipe: Callable[[str], Path]) -> None:
    assert load_config(recipe(RECIPE), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("override", ["seed", "=3", "", ".seed=3", "a..b=3", "two words=3"])
def test_an_override_that_is_no_assignment_is_an_error(
    recipe: Callable[[str], Path], override: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(RECIPE), [override])
    assert caught.value.problems == (f"--set {override}: write it as section.key=value",)


def test_bad_overrides_are_reported_together_with_the_recipes_own_faults(
    recipe: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe("zzz = 1\n" + RECIPE), ["seed", "num_steps.x=3", "sampling.top_k=-1"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "--set seed",
        "--set num_steps.x=3",
        "zzz",
        "sampling.top_k = -1",
    ]


def test_a_toml_fault_is_reported_with_its_line(recipe: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"recipe .*recipe\.toml: not TOML: .*line 3"):
        load_config(recipe("seed = 1\n\nnum_steps 3\n"))


def test_a_key_given_twice_is_an_error(recipe: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        load_config(recipe("seed = 1\nseed = 2\n"))


def test_a_recipe_that_is_not_text_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"seed = 1\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="line 2 is not UTF-8 text"):
        load_config(path)


def test_a_missing_recipe_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_a_date_is_reported_with_its_key(recipe: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(RECIPE + "marker = 2026-01-01\n[eval]\npass_at_k = [12:00:00]\n"))
    first, second = caught.value.problems
    assert first.startswith("verifier.components.answer.marker = 2026-01-01: dates and times")
    assert second.startswith("eval.pass_at_k = ")


def train_path(config: RunConfig) -> Path:
    assert isinstance(config.data.train, JsonlSource)
    return config.data.train.path


def test_a_relative_path_means_the_recipes_folder(
    recipe: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for folder in (tmp_path, elsewhere):
        (folder / "train.jsonl").touch()
    assert train_path(load_config(recipe(RECIPE))) == tmp_path / "train.jsonl"


def test_a_relative_path_absent_beside_the_recipe_means_the_current_folder(
    recipe: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert train_path(load_config(recipe(RECIPE))) == elsewhere / "train.jsonl"


def test_an_absolute_path_stays_as_it_is() -> None:
    data = {"train": {"type": "jsonl", "path": "/data/train.jsonl"}}
    assert train_path(parse_config(tree(data=data), base=Path("/x"))) == Path("/data/train.jsonl")


def test_a_number_of_thousands_of_digits_is_a_wrong_value_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("num_steps = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"seed = \"9+\.\.\.: must be a whole number"):
        load_config(path, [f"seed={'9' * 5000}"])
    path.write_text(f"seed = {'9' * 5000}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"recipe\.toml: a whole number .* too many digits"):
        load_config(path)
