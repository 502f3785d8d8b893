"""Rows that bring tests: checked when they are loaded, and shown where the template says so."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from headrace.config import VerifierConfig
from headrace.data import LoadReport
from headrace.errors import DataError
from headrace.verifiers import needs_answer, row_tasks

Load = Callable[..., LoadReport]

VERIFIER = VerifierConfig(components={"tests": {"kind": "code"}})
GOOD = {"prompt": "Add.", "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
OPTIONS = {"needs_answer": False, "answer_column": None, "template": "raw"}


def test_a_verifier_of_code_alone_needs_no_answer() -> None:
    assert not needs_answer(VERIFIER)
    assert row_tasks(VerifierConfig(components={"a": {"kind": "exact"}})) is None


def test_the_whole_row_reaches_the_verifier(load: Load) -> None:
    (prompt,) = load([GOOD], tasks=row_tasks(VERIFIER), **OPTIONS).prompts
    assert prompt.metadata == GOOD


def test_a_template_may_show_the_visible_tests_and_none_of_the_others(load: Load) -> None:
    rows = [GOOD | {"prompt": "Add {tests}."}]
    options = OPTIONS | {"user_template": "{prompt}\nPass:\n{tests}\n"}
    (prompt,) = load(rows, tasks=row_tasks(VERIFIER), **options).prompts
    head, _, shown = prompt.text.partition("\nPass:\n")
    assert head == "Add {tests}."
    assert shown.strip() in GOOD["test_list"]


def test_rows_that_cannot_be_graded_are_named_by_number(load: Load) -> None:
    rows = [GOOD, {"prompt": "b", "tests": []}, {"prompt": "c"}, {"prompt": "d", "tests": [{}]}]
    with pytest.raises(DataError) as error:
        load(rows, tasks=row_tasks(VERIFIER), **OPTIONS)
    (line,) = error.value.problems
    assert "lines 2 (tests: no test at all), 3 (tests: no column that holds tests" in line
    assert line.endswith("its tests cannot be used")


def test_a_template_that_shows_tests_needs_a_verifier_that_runs_them(load: Load) -> None:
    options = OPTIONS | {"user_template": "{prompt} {tests}"}
    with pytest.raises(DataError, match=r"data.user_template has \{tests\}"):
        load([{"prompt": json.dumps(1)}], **options)
