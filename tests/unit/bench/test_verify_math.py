from __future__ import annotations

import importlib.util
import os
from fractions import Fraction
from pathlib import Path

import pytest

from headrace.bench import verify_math
from headrace.bench.verify_math import graded_by_peer, measure
from headrace.bench.verify_math_tasks import MathTask, number_tasks, symbolic_tasks
from headrace.errors import ConfigError, RunError
from headrace.verifiers.math.algebra import BallDecider
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.judging import judge

FAKE = """
from fractions import Fraction

def parse(text):
    return text.strip("So $").removeprefix(r"\\boxed{").removesuffix("}")

def verify(gold, answer):
    if gold == "quit":
        raise SystemExit(3)
    return gold == answer
"""


def test_the_answers_of_a_group_are_right_and_wrong_as_they_say() -> None:
    rules = Rules()
    for task in number_tasks(20) + symbolic_tasks(20):
        found = [
            judge(task.gold, text, rules, BallDecider(rules.tolerance)).right
            for text, _ in task.answers
        ]
        assert found == [is_right for _, is_right in task.answers], task
        assert len(found) == 8
        assert sum(found) == 4


def test_no_two_groups_have_the_same_expected_answer() -> None:
    golds = [task.gold for task in number_tasks(200)] + [task.gold for task in symbolic_tasks(200)]
    assert len(set(golds)) == len(golds)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text(FAKE, encoding="utf-8")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.usefixtures("peer")
def test_the_peer_is_counted_by_what_is_known_of_each_answer() -> None:
    tasks = [MathTask(gold=str(n), answers=((str(n), True), ("0", n == 3))) for n in range(1, 5)]
    rate, share = graded_by_peer(tasks)
    assert rate > 0
    assert share == pytest.approx(Fraction(1, 8))


@pytest.mark.usefixtures("peer")
def test_a_peer_that_ends_early_is_a_failure_and_no_figure() -> None:
    with pytest.raises(RunError, match="status 3"):
        graded_by_peer([MathTask(gold="quit", answers=(("1", True),))] * 2)


def test_figures_of_headrace_alone_have_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_math, "NUM_NUMBER_GROUPS", 4)
    monkeypatch.setattr(verify_math, "NUM_SYMBOLIC_GROUPS", 5)
    figures = measure((), lambda _line: None)
    assert set(figures) == {
        "math_verdicts_per_second",
        "math_wrong_verdicts",
        "symbolic_verdicts_per_second",
        "symbolic_wrong_verdicts",
    }
    assert figures["math_wrong_verdicts"] == figures["symbolic_wrong_verdicts"] == 0


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="it is installed")
def test_a_missing_peer_is_told_with_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install .*math-verify"):
        measure(("math-verify",), lambda _line: None)
