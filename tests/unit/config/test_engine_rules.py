"""What an engine cannot honour is refused with the recipe, in words."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import parse_config
from headrace.errors import ConfigError

RECIPE: dict[str, Any] = {
    "num_steps": 1,
    "model": {"path": "nano"},
    "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
    "verifier": {"components": {"answer": {"kind": "exact"}}},
}


def refusal(**settings: Any) -> str:  # noqa: ANN401 - whatever a recipe can hold
    with pytest.raises(ConfigError) as caught:
        parse_config(RECIPE | settings)
    (line,) = caught.value.problems
    return line


def test_options_of_vllm_are_refused_where_another_engine_samples() -> None:
    line = refusal(generator={"vllm": {"block_size": 64}})
    assert line.startswith('generator.vllm with generator.engine = "torch": nothing reads')


def test_options_of_vllm_at_their_defaults_are_no_fault() -> None:
    parse_config(RECIPE | {"generator": {"vllm": {"block_size": 32}}})


@pytest.mark.parametrize("section", ["sampling", "eval"])
def test_a_temperature_that_vllm_would_raise_is_refused(section: str) -> None:
    sampling = {"temperature": 0.001}
    settings = {"sampling": sampling} if section == "sampling" else {"eval": {"sampling": sampling}}
    line = refusal(generator={"engine": "vllm"}, **settings)
    assert "sampling.temperature = 0.001" in line
    assert "vLLM would sample at 0.01 instead" in line


def test_filters_that_vllm_applies_in_another_order_are_refused_together() -> None:
    settings = {"objective": {"proximal": "recompute"}, "generator": {"engine": "vllm"}}
    line = refusal(sampling={"min_p": 0.1, "top_p": 0.9}, **settings)
    assert line.startswith("sampling.min_p with sampling.top_p")
    for alone in ({"min_p": 0.1, "top_k": 5}, {"top_p": 0.9, "top_k": 5}):
        parse_config(RECIPE | settings | {"sampling": alone})


@pytest.mark.parametrize("name", ["raw_logprobs", "kept_support"])
def test_records_that_vllm_cannot_give_are_refused(name: str) -> None:
    settings = {"objective": {"proximal": "recompute"}, "generator": {"engine": "vllm"}}
    line = refusal(sampling={name: True, "top_p": 0.9}, **settings)
    assert line.startswith(f'sampling.{name} = true with generator.engine = "vllm"')


def test_the_torch_engine_takes_all_of_them() -> None:
    sampling = {"min_p": 0.1, "top_p": 0.9, "temperature": 0.001}
    parse_config(RECIPE | {"objective": {"proximal": "recompute"}, "sampling": sampling})
