"""Which engines are there, found without importing them, and what is said where one is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from headrace.config import check_config
from headrace.recipes import find_recipe
from headrace.runtime import engines
from headrace.runtime.diagnosis import diagnose
from headrace.runtime.engines import missing_engine, vllm_version
from headrace.runtime.preflight import preflight


@pytest.fixture
def has_vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    find_really = importlib.util.find_spec

    version_really = importlib.metadata.version

    def pretend(*, there: bool, version: str = "0.32.0") -> None:
        def version_of(name: str) -> str:
            return version if name == "vllm" else version_really(name)

        def find(name: str, package: str | None = None) -> ModuleSpec | None:
            if name == "vllm":
                return ModuleSpec("vllm", None) if there else None
            return find_really(name, package)

        monkeypatch.setattr("importlib.util.find_spec", find)
        monkeypatch.setattr("importlib.metadata.version", version_of)

    return pretend


@pytest.fixture(autouse=True)
def no_vllm_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where `make vllm` would have put the command."""
    command = tmp_path / "headrace"
    monkeypatch.setattr(engines, "VLLM_COMMAND", command)
    return command


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
    assert vllm_version() == "vllm 0.32.0"
    (finding,) = [finding for finding in diagnose() if finding.name == "engine vllm"]
    assert (finding.present, finding.detail, finding.remedy) == (True, "vllm 0.32.0", "")


def test_a_vllm_in_the_environment_beside_is_named_with_its_command(
    has_vllm: Callable[..., None], no_vllm_beside: Path
) -> None:
    has_vllm(there=False)
    no_vllm_beside.touch()
    said = f"run {no_vllm_beside} instead of headrace"
    assert said in str(missing_engine("vllm"))
    (finding,) = [finding for finding in diagnose() if finding.name == "engine vllm"]
    assert said in finding.remedy


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.32.0"])
def test_another_release_of_vllm_is_refused_with_both_numbers(
    has_vllm: Callable[..., None], version: str
) -> None:
    has_vllm(there=True, version=version)
    assert f"vllm {version} is installed and headrace works with vLLM 0.32" in str(
        missing_engine("vllm")
    )
    (finding,) = [finding for finding in diagnose() if finding.name == "engine vllm"]
    assert not finding.present
    assert "0.32" in finding.remedy


def test_more_context_than_the_model_has_positions_is_refused_with_both_numbers(
    has_vllm: Callable[..., None],
) -> None:
    has_vllm(there=True)
    settings = ["generator.engine=vllm", "generator.vllm.max_model_len=100000"]
    problems = preflight(check_config(find_recipe("quickstart"), settings)).problems
    (problem,) = problems
    assert problem.startswith("generator.vllm.max_model_len = 100000: the model has ")


def test_the_context_that_vllm_is_given_bounds_the_prompts(
    has_vllm: Callable[..., None],
) -> None:
    has_vllm(there=True)
    settings = ["generator.engine=vllm", "generator.vllm.max_model_len=30"]
    problems = preflight(check_config(find_recipe("quickstart"), settings)).problems
    assert any("context of 30 tokens" in problem for problem in problems)
