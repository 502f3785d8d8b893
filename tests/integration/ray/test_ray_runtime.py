"""`headrace train --runtime ray`: the same run, on real Ray, with or without a cluster."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab import Command, Lab, is_timeless
from ray_lab import cluster, ray_processes_below, refused_on

import headrace

pytest.importorskip("ray", reason="comes with the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON_RAY = ("--runtime", "ray")
SHORT = ("--set", "num_steps=4")
POOL = (
    *("--set", 'placement.generators="disaggregated"', "--set", "placement.num_generators=2"),
    *("--set", "placement.threads_per_generator=1"),
)


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What joins a cluster of these tests finds it on 127.0.0.1, without a token."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes that run this headrace."""
    with cluster(None, None) as address:
        yield address


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    said = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    found = [json.loads(line) for line in said if line.endswith("\n")]
    return [line for line in found if line["kind"] == kind]


def steps(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line["metrics"].items() if is_timeless(name)}
        for line in lines(run, "step")
    ]


def num_steps(run: Path) -> int:
    return (run / "metrics.jsonl").read_text(encoding="utf-8").count('"kind": "step"')


def without_placing(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave out what tells of the places alone."""
    return {name: value for name, value in metrics.items() if not name.startswith("verifier/")}


def own_folders() -> set[Path]:
    return set(Path("/tmp").glob("headrace-ray-*"))  # noqa: S108 - where they are


def test_a_run_on_two_nodes_of_a_cluster_is_the_run_without_ray_and_leaves_the_cluster_as_it_was(
    lab: Lab, finished: Path, two_nodes: str
) -> None:
    for name in ("on-ray", "on-ray-again"):
        ended = lab.train(name, *ON_RAY, "--address", two_nodes, *SHORT).wait()
        assert ended.status == 0, ended.err
        expected = [without_placing(step) for step in steps(finished)[:4]]
        assert [without_placing(step) for step in steps(lab.folder / name)] == expected


def test_a_pool_of_actors_over_two_nodes_samples_what_one_generator_does(
    lab: Lab, finished: Path, two_nodes: str
) -> None:
    ended = lab.train("pool-on-ray", *ON_RAY, "--address", two_nodes, *SHORT, *POOL).wait()
    assert ended.status == 0, ended.err
    found = steps(lab.folder / "pool-on-ray")
    assert [step["generator/pool/num_restarts"] for step in found] == [0.0] * 4
    rewards = [step["verifier/reward/raw_mean"] for step in found]
    assert rewards == [step["verifier/reward/raw_mean"] for step in steps(finished)[:4]]


def test_an_actor_that_is_killed_is_started_again_while_the_run_goes_on(lab: Lab) -> None:
    run = lab.folder / "actor-killed"
    # Nothing is learned, so that there is something to learn for as long as it takes.
    still = ("--set", "learner.optimizer.learning_rate=1e-12")
    long = (*still, "--set", "num_steps=3000", "--set", "data.eval=null")
    running = lab.train("actor-killed", *ON_RAY, *POOL, *long)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    below = ray_processes_below(running.process.pid)
    actors = [process for process in below if "GeneratorActor" in " ".join(process.cmdline())]
    assert actors
    actors[0].send_signal(signal.SIGKILL)
    metrics = run / "metrics.jsonl"
    assert running.wait_until(lambda: '"generator/pool/num_restarts": 1.0' in metrics.read_text())
    running.process.send_signal(signal.SIGINT)
    ended = running.wait()
    assert ended.status == 0, ended.err


def test_a_ray_of_the_runs_own_answers_on_this_machine_alone_and_is_gone_with_the_run(
    lab: Lab,
) -> None:
    before = own_folders()
    running = lab.train("own-ray", *ON_RAY, *SHORT)
    assert running.wait_until((lab.folder / "own-ray/checkpoints").is_dir)
    processes = ray_processes_below(running.process.pid)
    assert any("raylet" in process.name() for process in processes)
    own = psutil.Process(running.process.pid)
    lines = [line for process in (own, *processes) for line in process.net_connections("tcp")]
    listened = {line.laddr.ip for line in lines if line.status == psutil.CONN_LISTEN}
    assert listened <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert listened
    ended = running.wait()
    assert ended.status == 0, ended.err
    assert own_folders() == before
    psutil.wait_procs(processes, timeout=60)
    assert not [process for process in processes if process.is_running()]


def test_a_run_on_ray_that_is_killed_leaves_no_process_and_goes_on(
    lab: Lab, finished: Path
) -> None:
    run = lab.folder / "killed-on-ray"
    running = lab.train("killed-on-ray", *ON_RAY)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    processes = ray_processes_below(running.process.pid)
    folders = own_folders()
    running.process.send_signal(signal.SIGKILL)
    running.wait()
    assert folders
    psutil.wait_procs(processes, timeout=60)
    assert not [process for process in processes if process.is_running()]
    deadline = time.monotonic() + 60
    while own_folders() & folders and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not own_folders() & folders

    resumed = lab.train("killed-on-ray", *ON_RAY, "--resume").wait()
    assert resumed.status == 0, resumed.err
    expected = [without_placing(step) for step in steps(finished)]
    assert [without_placing(step) for step in steps(run)] == expected


def test_nodes_with_another_headrace_are_refused_with_both_versions(
    lab: Lab, tmp_path: Path
) -> None:
    source = Path(headrace.__file__).parent
    shutil.copytree(source, tmp_path / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "headrace" / "__init__.py").write_text('__version__ = "0.0.7"\n', encoding="utf-8")
    with cluster(None, tmp_path) as address:
        ended = lab.train("mixed", *ON_RAY, "--address", address).wait()
    assert ended.status == 2
    assert "has headrace 0.0.7 (source " in ended.err
    assert f"and this one {headrace.__version__} (source " in ended.err
    assert not (lab.folder / "mixed").exists()


def test_more_machines_than_come_are_refused_with_those_that_came(two_nodes: str) -> None:
    said = refused_on(two_nodes, "nodes.wait_for_nodes(3, timeout_seconds=0)")
    assert said.startswith(f"--nodes 3: the cluster at {two_nodes} has 2 within 0 s")
    assert said.count("1 CPUs, 0 GPUs") == 2


def test_more_than_the_cluster_has_is_refused_at_once_with_what_is_wanted_and_what_there_is(
    two_nodes: str,
) -> None:
    demand = 'room.Demand(what="generators", setting="it", count=3, num_cpus=1, num_gpus={})'
    cores = refused_on(two_nodes, f"room.reserved(joined, [{demand.format(0)}]).__enter__()")
    assert "3 generators of 1 CPUs each are wanted, and the cluster has room for 2" in cores
    devices = refused_on(two_nodes, f"room.reserved(joined, [{demand.format(1)}]).__enter__()")
    assert "3 generators of 1 CPUs and 1 GPUs each are wanted" in devices
    assert "has room for 0 of them" in devices
    assert devices.count("1 CPUs, 0 GPUs") == 2


def test_what_others_do_not_give_back_is_refused_at_the_deadline(two_nodes: str) -> None:
    demand = '[room.Demand(what="generators", setting="it", count=2, num_cpus=1, num_gpus=0)]'
    said = refused_on(
        two_nodes,
        f"held = room.reserved(joined, {demand}); held.__enter__(); "
        f"room.reserved(joined, {demand}, timeout_seconds=1).__enter__()",
    )
    assert "others did not make room for them within 1 s: 0 CPUs" in said


def test_options_of_ray_without_ray_are_refused(lab: Lab) -> None:
    for option in (("--address", "auto"), ("--nodes", 2)):
        ended = lab.train("none", *option).wait()
        assert ended.status == 2
        assert "add --runtime ray" in ended.err


def test_a_run_on_ray_grows_publishes_changes_and_comes_back_when_its_process_is_killed(
    lab: Lab, headrace: Command
) -> None:
    run, folders = lab.folder / "kept-on-ray", own_folders()
    one = ("--set", "placement.num_generators=1", "--set", "weight_sync.delta.whole_every=3")
    long = ("--set", "num_steps=3000", "--set", "data.eval=null", "--set", "max_staleness=1")
    still = ("--set", "learner.optimizer.learning_rate=1e-12")
    settings = (*ON_RAY, *POOL, *one, *long, *still, "--restarts", 2)
    running = lab.train("kept-on-ray", *settings)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    grown = headrace("scale", run, "generators=2")
    assert (grown.status, grown.out) == (0, "2 generators, where there were 1\n"), grown.err

    (process,) = psutil.Process(running.process.pid).children()
    left = [*ray_processes_below(process.pid), process]
    process.kill()
    assert running.wait_until(lambda: '"kind": "resume"' in (run / "events.jsonl").read_text())
    # Before the next one began nothing of the last one was left.
    assert not [process for process in left if process.is_running()]
    resumed_at = num_steps(run)
    assert running.wait_until(lambda: num_steps(run) > resumed_at + 3)
    running.process.send_signal(signal.SIGINT)
    ended = running.wait()
    assert ended.status == 0, ended.err
    assert "restart 1 of 2" in ended.err
    numbers = [step["step"] for step in lines(run, "step")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert own_folders() == folders
