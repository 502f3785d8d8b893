"""exact and numeric: string work in this process."""

import asyncio
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import verifiers
from headrace.config import ExactConfig, NumericConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers import check_answer, parse_number
from headrace.verifiers.component import Score
from headrace.verifiers.exact import ExactComponent
from headrace.verifiers.numbers import DASHES
from headrace.verifiers.numeric import NumericComponent


def prompt(answer: str | None) -> Prompt:
    return Prompt(prompt_id="p", source="s", text="t", token_ids=(1,), answer=answer)


def exact(answer: str | None, completion: str, **config: object) -> Score:
    component = ExactComponent(ExactConfig.model_validate({"kind": "exact", **config}))
    return asyncio.run(component.score(prompt(answer), completion))


def numeric(answer: str | None, completion: str, **config: object) -> Score:
    component = NumericComponent(NumericConfig.model_validate({"kind": "numeric", **config}))
    return asyncio.run(component.score(prompt(answer), completion))


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("14", " 14\r\n", 1.0),
        ("a\nb", "a\r\nb", 1.0),
        ("14", "14.", 0.0),
        ("14", "014", 0.0),
        ("14", "", 0.0),
        ("yes", "Yes", 0.0),
        ("1" * 5000, "1" * 5000, 1.0),
    ],
)
def test_exact_pays_for_the_same_characters(answer: str, completion: str, reward: float) -> None:
    assert exact(answer, completion).reward == reward


def test_exact_without_strip_sees_white_space() -> None:
    assert exact("14", "14 ", strip=False).reward == 0.0


def test_an_empty_completion_is_wrong_even_where_the_expected_answer_is_empty() -> None:
    assert exact("", "").reward == 0.0


@pytest.mark.parametrize("score", [exact(None, "5"), numeric(None, "5"), numeric("five", "5")])
def test_a_prompt_without_a_usable_answer_is_not_scored(score: Score) -> None:
    assert score.reward is None
    assert score.outcome is Outcome.INFRA


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("3", "3e0", 1.0),
        ("1234", "1,234", 1.0),
        ("3.5", "7/2", 1.0),
        ("0.1", "0.1000", 1.0),
        ("-5", "\u22125", 1.0),
        ("5", "-5", 0.0),
        *[("-5", f"{dash}5", 1.0) for dash in DASHES],
        *[("5", f"{dash}5", 0.0) for dash in DASHES],
        ("1", "True", 0.0),
        ("1", "nan", 0.0),
        ("1", "inf", 0.0),
        ("1", "1e999999999", 0.0),
        ("1", "1" * 5000, 0.0),
        ("1", "1/0", 0.0),
        ("1", "", 0.0),
        ("1", "\u0661", 0.0),
    ],
)
def test_numeric_compares_exactly(answer: str, completion: str, reward: float) -> None:
    assert numeric(answer, completion, extract="whole").reward == reward


def test_numeric_allows_no_more_than_its_tolerance() -> None:
    assert numeric("3", "3.01", absolute_tolerance=0.015625).reward == 1.0
    assert numeric("3", "3.02", absolute_tolerance=0.015625).reward == 0.0
    assert numeric("-200", "-202", relative_tolerance=0.015625).reward == 1.0
    assert numeric("-200", "202", relative_tolerance=0.015625).reward == 0.0


@given(st.text(max_size=60))
def test_no_text_makes_the_number_reader_raise(text: str) -> None:
    parse_number(text)


@given(st.integers(-(10**30), 10**30))
def test_every_integer_reads_as_itself_with_and_without_commas(number: int) -> None:
    assert parse_number(str(number)) == Fraction(number) == parse_number(f"{number:,}")


def test_an_expected_answer_that_is_no_number_is_found_before_the_run() -> None:
    config = NumericConfig(kind="numeric")
    assert check_answer(config, "3/4") is None
    assert "no number" in (check_answer(config, "about 3") or "")
    assert "empty" in (check_answer(ExactConfig(kind="exact"), "  ") or "")


def test_every_public_name_is_found() -> None:
    for name in verifiers.__all__:
        assert callable(getattr(verifiers, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        verifiers.nothing  # noqa: B018 - the look-up is what is tested


@pytest.mark.parametrize("module", ["headrace.verifiers.build", "headrace.verifiers.worker"])
def test_no_torch_and_no_algebra_are_imported_outside_of_a_worker(module: str) -> None:
    code = f"import sys, {module}; print(*{{'torch', 'flint', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_worker_starts_without_reading_the_config() -> None:
    code = "import sys, headrace.verifiers.worker; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
