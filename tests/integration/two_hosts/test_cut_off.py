"""Runs over two hosts, one of which is cut off for a while and comes back."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts import Host, two_hosts, why_not
from lab import Lab, Running

pytest.importorskip("ray", reason="comes with the extra `ray`")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

PORT = 6379
CUT_SECONDS = 20.0
PATIENCE_SECONDS = 240.0
OPEN = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nobody there tells names, and torch asks for that of everybody who connects.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
"""The line between the hosts is theirs alone."""
POOL = (
    'placement.generators="disaggregated"',
    "placement.num_generators=2",
    "placement.threads_per_generator=1",
    "placement.hang_seconds=5",
    # Nothing is learned, so that there is something to learn for as long as it takes.
    "learner.optimizer.learning_rate=1e-12",
    "num_steps=100000",
    "data.eval=null",
    "monitors.rollouts_every=0",
)
AHEAD = ("max_staleness=1", "checkpoint.every=1000")
# A rank has two cores, so that one of these hosts has not room for both.
RANKED = ("learner.parallel.shards=2", "num_threads=2", "checkpoint.every=2")


def start_ray(host: Host, num_cpus: int, *words: str) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", f"--num-cpus={num_cpus}", *words]
    own = (f"--node-ip-address={host.address}", "--object-store-memory=100000000")
    assert host.start([*command, *own], OPEN).wait(PATIENCE_SECONDS) == 0


@contextmanager
def run_on_two_hosts(
    lab: Lab, settings: Sequence[str], *, num_cpus: int
) -> Iterator[tuple[Running, Host]]:
    """Train with the run's process on the first of two hosts; yield it and the second one."""
    # Not pytest's folder: the name of a socket has 107 characters.
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, two_hosts() as (first, second):
        own = f"--temp-dir={folder}"
        head = ("--head", f"--port={PORT}", "--include-dashboard=false", own)
        start_ray(first, num_cpus, *head)
        start_ray(second, num_cpus, f"--address={first.address}:{PORT}")
        command = [
            *(sys.executable, "-m", "headrace", "train", str(lab.recipe)),
            *(word for setting in (*POOL, *settings) for word in ("--set", setting)),
            *("--output", str(lab.folder / "run"), "--runtime", "ray"),
            *("--address", f"{first.address}:{PORT}", "--nodes", "2"),
        ]
        with (lab.folder / "said").open("w", encoding="utf-8") as said:
            process = first.start(command, OPEN, cwd=lab.folder, stdout=said, stderr=said)
            yield Running(process), second


def steps(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if '"kind": "step"' in line and line.endswith("}")]


def wait_for(running: Running, what: str, condition: Any) -> None:  # noqa: ANN401 - any callable
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert running.process.poll() is None, f"the run ended before {what}"
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.5)


def stop(running: Running, lab: Lab) -> None:
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(PATIENCE_SECONDS) == 0, (lab.folder / "said").read_text()
    numbers = [step["step"] for step in steps(lab.folder / "run")]
    assert numbers == list(range(1, len(numbers) + 1))


def ranks_on(host: Host) -> list[int]:
    found = []
    for pid in host.pids():
        with suppress(psutil.NoSuchProcess):
            if "headrace.learners.parallel.rank" in psutil.Process(pid).cmdline():
                found.append(pid)
    return found


def test_a_run_goes_on_while_one_of_its_hosts_is_cut_off_and_has_it_again_afterwards(
    own_lab: Lab,
) -> None:
    run = own_lab.folder / "run"

    def members() -> float:
        made = steps(run)
        return made[-1]["metrics"]["generator/pool/num_members"] if made else 0.0

    with run_on_two_hosts(own_lab, AHEAD, num_cpus=1) as (running, second):
        wait_for(running, "two generators sampled", lambda: members() == 2.0)
        second.cut_off()
        cut_at, made_before = time.monotonic(), len(steps(run))
        wait_for(running, "the one that was cut off was given up", lambda: members() == 1.0)
        time.sleep(max(0.0, cut_at + CUT_SECONDS - time.monotonic()))
        wait_for(running, "steps were made without it", lambda: len(steps(run)) > made_before + 2)
        second.join()
        wait_for(running, "both sampled again", lambda: members() == 2.0)
        stop(running, own_lab)


def test_ranks_on_two_hosts_of_which_one_is_cut_off_meet_again_without_those_that_were_before(
    own_lab: Lab,
) -> None:
    run = own_lab.folder / "run"

    def restarts() -> list[str]:
        said = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in said if '"learner_restart"' in line]

    with run_on_two_hosts(own_lab, RANKED, num_cpus=3) as (running, second):
        wait_for(running, "steps were made", (run / "checkpoints" / "step-000002").is_dir)
        before = ranks_on(second)
        assert len(before) == 1
        second.cut_off()
        wait_for(running, "the rank that was cut off was given up", lambda: bool(restarts()))
        assert "was lost with its machine, which was silent for 5 s" in restarts()[0]
        wait_for(running, "it was ended where nobody reaches it", lambda: not ranks_on(second))
        second.join()
        made_before = len(steps(run))
        wait_for(running, "more steps were made", lambda: len(steps(run)) > made_before + 2)
        assert len(ranks_on(second)) == 1
        stop(running, own_lab)
