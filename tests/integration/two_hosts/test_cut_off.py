"""A run over two hosts, one of which is cut off for twenty seconds and comes back."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""The line between the hosts is theirs alone."""
SETTINGS = (
    'placement.generators="disaggregated"',
    "placement.num_generators=2",
    "placement.threads_per_generator=1",
    "placement.hang_seconds=5",
    "max_staleness=1",
    # Nothing is learned, so that there is something to learn for as long as it takes.
    "learner.optimizer.learning_rate=1e-12",
    "num_steps=100000",
    "data.eval=null",
    "checkpoint.every=1000",
    "monitors.rollouts_every=0",
)


def start_ray(host: Host, *words: str) -> None:
    command = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", *words]
    own = (f"--node-ip-address={host.address}", "--object-store-memory=100000000")
    assert host.start([*command, *own], OPEN).wait(PATIENCE_SECONDS) == 0


@pytest.fixture
def second_host(own_lab: Lab) -> Iterator[tuple[Running, Host]]:
    """A run whose process is on the first of two hosts; yield it and the second one."""
    # Not pytest's folder: the name of a socket has 107 characters.
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, two_hosts() as (first, second):
        own = f"--temp-dir={folder}"
        start_ray(first, "--head", f"--port={PORT}", "--include-dashboard=false", own)
        start_ray(second, f"--address={first.address}:{PORT}")
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        command = [
            *(sys.executable, "-m", "headrace", "train", str(own_lab.recipe), *settings),
            *("--output", str(own_lab.folder / "run"), "--runtime", "ray"),
            *("--address", f"{first.address}:{PORT}", "--nodes", "2"),
        ]
        with (own_lab.folder / "said").open("w", encoding="utf-8") as said:
            process = first.start(command, OPEN, cwd=own_lab.folder, stdout=said, stderr=said)
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


def test_a_run_goes_on_while_one_of_its_hosts_is_cut_off_and_has_it_again_afterwards(
    own_lab: Lab, second_host: tuple[Running, Host]
) -> None:
    running, second = second_host
    run = own_lab.folder / "run"

    def members() -> float:
        made = steps(run)
        return made[-1]["metrics"]["generator/pool/num_members"] if made else 0.0

    wait_for(running, "two generators sampled", lambda: members() == 2.0)
    second.cut_off()
    cut_at, made_before = time.monotonic(), len(steps(run))
    wait_for(running, "the one that was cut off was given up", lambda: members() == 1.0)
    time.sleep(max(0.0, cut_at + CUT_SECONDS - time.monotonic()))
    wait_for(running, "steps were made without it", lambda: len(steps(run)) > made_before + 2)
    second.join()
    wait_for(running, "both sampled again", lambda: members() == 2.0)
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(PATIENCE_SECONDS) == 0, (own_lab.folder / "said").read_text()
    numbers = [step["step"] for step in steps(run)]
    assert numbers == list(range(1, len(numbers) + 1))
