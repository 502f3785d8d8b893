"""A learner whose ranks are on several machines of a cluster: real Ray, real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab import Lab, is_timeless
from ray_lab import cluster

pytest.importorskip("ray", reason="comes with the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

from headrace.runtime.ray.interface import interface_with, talking_over  # noqa: E402 - is an extra
from headrace.runtime.ray.rank_actor import RankActor  # noqa: E402 - is an extra
from headrace.runtime.ray.reach import Place, unreached, unseen  # noqa: E402 - is an extra

RANKED = (
    *("--set", "num_steps=20", "--set", "data.eval=null", "--set", "learner.parallel.shards=2"),
    *("--set", "faults.backoff_seconds=0.01"),
)


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[str]:
    """The address of a cluster of three nodes with one core each."""
    with cluster(None, None, None) as address:
        yield address


def steps(run: Path) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in line["metrics"].items()
            if is_timeless(name) and not name.startswith("verifier/")
        }
        for line in lines(run / "metrics.jsonl")
        if line["kind"] == "step"
    ]


def restarts(run: Path) -> list[str]:
    found = lines(run / "events.jsonl")
    return [line["message"] for line in found if line["kind"] == "learner_restart"]


def lines(path: Path) -> list[dict[str, Any]]:
    said = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in said if line.endswith("\n")]


def ranks() -> dict[psutil.Process, psutil.Process]:
    """Return the ranks on the cluster of these tests, each with its machine."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if "headrace.learners.parallel.rank" in process.cmdline():
                found[process] = next(p for p in process.parents() if p.name() == "raylet")
        except psutil.NoSuchProcess:
            continue
    return found


def lose(machine: psutil.Process) -> None:
    """Kill everything on ``machine``."""
    for process in (machine, *machine.children(recursive=True)):
        process.kill()


def test_a_learner_on_two_machines_outlives_a_rank_and_a_machine_and_ends_as_one_on_this_machine(
    lab: Lab, three_nodes: str
) -> None:
    here = lab.train("ranks-here", *RANKED).wait()
    assert here.status == 0, here.err

    run = lab.folder / "ranks-on-ray"
    running = lab.train("ranks-on-ray", *RANKED, "--runtime", "ray", "--address", three_nodes)
    assert running.wait_until(lambda: len(steps(run)) >= 1)
    first = ranks()
    assert len(set(first.values())) == 2, "one machine has both"
    next(iter(first)).kill()
    assert running.wait_until(lambda: len(restarts(run)) == 1)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    # The run's process holds on to the head's.
    lose(next(machine for machine in ranks().values() if "--head" not in machine.cmdline()))
    ended = running.wait()
    assert ended.status == 0, ended.err
    killed, lost = restarts(run)
    assert "was killed by SIGKILL" in killed
    assert "was lost with its machine" in lost
    assert "from step 0" not in lost
    assert steps(run) == steps(lab.folder / "ranks-here")
    assert not ranks()


def test_more_ranks_than_a_cluster_has_are_refused_before_there_is_a_run(
    lab: Lab, three_nodes: str
) -> None:
    many = ("--set", "learner.parallel.shards=16", "--runtime", "ray", "--address", three_nodes)
    ended = lab.train("too-many-ranks", *many).wait()
    assert ended.status == 2
    assert "learner.parallel: 16 ranks of the learner of 1 CPUs each are wanted" in ended.err
    assert not (lab.folder / "too-many-ranks").exists()


def test_machines_that_do_not_reach_each_other_or_the_files_are_named(tmp_path: Path) -> None:
    own = Place(host="here", address="127.0.0.1", port=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = Place(host="there", address="127.0.0.1", port=listening.getsockname()[1])
        assert unreached(own, there) is None
    said = unreached(own, there)
    assert said is not None
    assert said.startswith("here (127.0.0.1) cannot connect to there (127.0.0.1): ")

    mark = tmp_path / "mark"
    mark.write_text("one", encoding="utf-8")
    assert unseen(own, mark, "one") is None
    for path, text in ((mark, "another"), (tmp_path / "none", "one")):
        assert f"here (127.0.0.1) does not see {tmp_path} as this" in str(unseen(own, path, text))


def test_a_rank_that_nobody_asks_for_any_more_is_ended_by_its_own_machine() -> None:
    async def forgotten() -> int | None:
        actor = RankActor.__ray_metadata__.modified_class()
        await actor.start(patience_seconds=4.0)
        for _ in range(4):  # longer than that, but asked
            assert not (await actor.read()).is_over
        await asyncio.wait_for(actor._own.wait(), 120.0)
        found: int | None = actor._own.returncode
        actor._own.close()
        return found

    assert asyncio.run(forgotten()) == -signal.SIGKILL


def test_ranks_talk_over_the_interface_that_has_the_machines_address() -> None:
    name = interface_with("127.0.0.1")
    assert name in {name for _, name in socket.if_nameindex()}
    assert talking_over("127.0.0.1") == {
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
    }
    assert talking_over("192.0.2.250") == {}
