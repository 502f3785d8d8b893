"""The sections as a surface: documented, frozen, torch-free, and no larger than agreed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from headrace.config import RunConfig, SamplingConfig, parse_config
from headrace.config.schema import all_keys, sections_in
from headrace.types import SamplingParams

RECIPE = {
    "num_steps": 1,
    "model": {"path": "nano"},
    "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
    "verifier": {"components": {"answer": {"kind": "exact"}}},
}


def sections_below(section: type[BaseModel]) -> set[type[BaseModel]]:
    members = {m for f in section.model_fields.values() for m in sections_in(f.annotation)}
    return {section}.union(*(sections_below(member) for member in members))


SECTIONS = sorted(sections_below(RunConfig), key=lambda section: section.__name__)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_of_a_section_says_what_it_is(section: type[BaseModel]) -> None:
    undocumented = [name for name, field in section.model_fields.items() if not field.description]
    assert not undocumented
    assert section.__doc__


def test_every_kind_of_section_was_looked_at() -> None:
    names = {section.__name__ for section in SECTIONS}
    assert {"RunConfig", "OptimizerConfig", "JsonlSource", "FunctionConfig"} <= names


def test_the_surface_of_a_recipe_is_the_agreed_one() -> None:
    agreed = Path(__file__).with_name("config_keys.txt").read_text(encoding="utf-8").splitlines()
    keys = {".".join(path) for path in all_keys(RunConfig)}
    assert sorted(keys) == agreed, "a new key is a promise: add it to config_keys.txt on purpose"


def test_reading_a_config_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "pyarrow", "numpy", "datasets", "rich", "typer")
    code = f"import sys, headrace.config; print(sorted(sys.modules.keys() & set({heavy})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(RECIPE)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc] - the point of the test
    with pytest.raises(ValidationError, match="frozen"):
        config.sampling.temperature = 0.5  # type: ignore[misc] - the point of the test


def test_evaluation_samples_as_training_does_unless_it_says_otherwise() -> None:
    own = parse_config({**RECIPE, "eval": {"sampling": {"temperature": 0.5}}})
    assert own.eval_sampling == SamplingConfig(temperature=0.5)
    assert parse_config(RECIPE).eval_sampling == SamplingConfig()


def test_sampling_params_add_the_models_own_stop_ids() -> None:
    params = SamplingConfig(stop_token_ids=(7, 3), max_tokens=9).params((3, 2))
    assert params.stop_token_ids == (2, 3, 7)
    assert params.max_tokens == 9


def test_every_key_of_sampling_reaches_the_engine() -> None:
    asked: dict[str, object] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.25,
        "max_tokens": 9,
        "stop_strings": ("x",),
        "stop_token_ids": (3,),
        "min_tokens": 2,
        "allowed_token_ids": (3, 4, 5),
        "banned_token_ids": (5,),
        "raw_logprobs": True,
        "kept_support": True,
    }
    assert {*asked, "forced_prefix"} == {*SamplingConfig.model_fields}
    params = SamplingConfig.model_validate(asked).params((), (6, 7))
    assert params == SamplingParams(**asked, forced_prefix=(6, 7))
