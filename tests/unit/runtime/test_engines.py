"""Which engines are there, found without importing them, and what is said where one is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest

from headrace.config import check_config
from headrace.recipes import find_recipe
from headrace.runtime.diagnosis import diagnose
from headrace.runtime.engines import missing_engine, vllm_version
from headrace.runtime.preflight import preflight


@pytest.fixture
def has_vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    find_really = importlib.util.find_spec

    def pretend(*, there: bool) -> None:
        def find(name: str, package: str | None = None) -> ModuleSpec | None:
            if name == "vllm":
                return ModuleSpec("vllm", None) if there else None
            return find_really(name, package)

        monkeypatch.setattr("importlib.util.find_spec", find)

    return pretend


def test_a_missing_vllm_is_a_problem_of_the_recipe_that_says_how_to_get_it(
    has_vllm: Callable[..., None],
) -> None:
    has_vllm(there=False)
    recipe = check_config(find_recipe("quickstart"), ["generator.engine=vllm"])
    (problem,) = preflight(recipe).problems
    assert problem.startswith('generator.engine = "vllm": vLLM is not installed')
    assert "make vllm" in problem
    (finding,) = [finding for finding in diagnose() if finding.name == "engine vllm"]
    assert not finding.present
    assert "make vllm" in finding.remedy


def test_an_engine_that_is_there_is_no_problem(has_vllm: Callable[..., None]) -> None:
    has_vllm(there=True)
    assert missing_engine("vllm") is None
    assert missing_engine("torch") is None
    assert vllm_version()


def test_the_context_that_vllm_is_given_bounds_the_prompts(
    has_vllm: Callable[..., None],
) -> None:
    has_vllm(there=True)
    settings = ["generator.engine=vllm", "generator.vllm.max_model_len=30"]
    problems = preflight(check_config(find_recipe("quickstart"), settings)).problems
    assert any("context of 30 tokens" in problem for problem in problems)
