"""Where generators live: what contradicts itself is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import RunConfig, parse_config
from headrace.errors import ConfigError

RECIPE: dict[str, Any] = {
    "num_steps": 1,
    "model": {"path": "nano"},
    "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
    "verifier": {"components": {"answer": {"kind": "exact"}}},
}
AWAY = {"generators": "disaggregated"}


def parsed(**settings: Any) -> RunConfig:  # noqa: ANN401 - whatever a recipe can hold
    return parse_config(RECIPE | settings)


def refusal(**settings: Any) -> str:  # noqa: ANN401 - whatever a recipe can hold
    with pytest.raises(ConfigError) as caught:
        parsed(**settings)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_generators", 2), ("threads_per_generator", 1), ("hang_seconds", 5), ("max_restarts", 0)],
)
def test_what_only_processes_of_their_own_have_is_refused_without_them(
    name: str, value: object
) -> None:
    line = refusal(placement={name: value})
    assert f'placement.{name} = {value} with placement.generators = "colocated"' in line
    parsed(placement=AWAY | {name: value})


@pytest.mark.parametrize("value", [0, -1, 1025, 1.5, "two"])
def test_a_number_of_generators_is_a_number_of_them(value: object) -> None:
    assert "placement.num_generators" in refusal(placement=AWAY | {"num_generators": value})


@pytest.mark.parametrize(
    ("generator", "reason"),
    [
        ({"engine": "vllm"}, "vLLM has processes of its own"),
        ({"engine": "sglang", "sglang": {"urls": ["http://one:1"]}}, "run elsewhere already"),
    ],
)
def test_engines_with_processes_of_their_own_are_not_put_into_others(
    generator: dict[str, Any], reason: str
) -> None:
    settings = {"objective": {"proximal": "recompute"}, "generator": generator}
    assert reason in refusal(placement=AWAY, **settings)


def test_weights_by_reference_stay_in_one_process() -> None:
    line = refusal(placement=AWAY, weight_sync={"transport": "memory"})
    assert line.startswith('weight_sync.transport = "memory" with placement.generators')
    line = refusal(weight_sync={"transport": "shared_memory"})
    assert 'placement.generators = "colocated"' in line
    line = refusal(weight_sync={"delta": {}})
    assert line.startswith('weight_sync.delta with placement.generators = "colocated"')
    parsed(placement=AWAY, weight_sync={"transport": "shared_memory", "delta": {}})
