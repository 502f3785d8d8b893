"""The parts of a run on Ray by themselves, on a real cluster of two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_lab import cluster

pytest.importorskip("ray", reason="comes with the extra `ray`")
pytestmark = pytest.mark.slow

SLOW_REWARD = '''
import pathlib
import time
import uuid


def number(prompt, completion, answer, metadata):
    """Say that it began, take its time, and pay the number that was written."""
    (pathlib.Path({touched!r}) / uuid.uuid4().hex).touch()
    time.sleep(2)
    return float(completion)
'''


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    with cluster(None, None) as address:
        yield address


def on(address: str, name: str, *arguments: object) -> Any:  # noqa: ANN401 - JSON
    program = Path(__file__).with_name("on_cluster.py")
    command = [sys.executable, str(program), address, name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_groups_of_a_verifier_that_is_killed_are_scored_on_the_other_machine(
    two_nodes: str, tmp_path: Path
) -> None:
    touched, reward = tmp_path / "touched", tmp_path / "slow_reward.py"
    touched.mkdir()
    reward.write_text(SLOW_REWARD.format(touched=str(touched)), encoding="utf-8")
    path = f"{reward}:number"
    found = on(two_nodes, "one_of_two_verifiers_is_killed", path, touched)
    assert found == {"rewards": [0.0, 1.0, 2.0, 3.0], "moved": 2.0}


def test_weights_are_the_same_bits_behind_the_object_store_and_gone_once_released(
    two_nodes: str,
) -> None:
    found = on(two_nodes, "weights_come_back_as_they_were")
    assert found[:2] == [[1, 7, True], [2, 7, True]]
    assert found[2] == "version 2 is gone: it was given up before it was read"


def test_changes_of_weights_are_the_same_bits_behind_the_object_store(two_nodes: str) -> None:
    found = on(two_nodes, "changes_come_back_as_they_were")
    assert found == [[parts, True] for parts in (1, 2, 3, 1) for _ in range(2)]


def test_what_a_pool_asks_begins_in_the_order_in_which_it_was_asked(two_nodes: str) -> None:
    found = on(two_nodes, "calls_that_come_in_another_order_begin_in_theirs")
    assert found == ["earlier", "later"]
