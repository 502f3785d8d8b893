"""Whole runs whose weights are broadcast, which learn what they learn without."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from lab import Command, Lab, Running

pytestmark = pytest.mark.slow

BROADCAST = (
    *("--set", 'placement.generators="disaggregated"'),
    *("--set", "placement.num_generators=2"),
    *("--set", "placement.threads_per_generator=1"),
    *("--set", "placement.backoff_seconds=0"),
    *("--set", 'weight_sync.transport="broadcast"'),
)
MODEL = Path("checkpoints/step-000008/hf/model.safetensors")
SLOW = """
import time

def share_of_ones(prompt, completion, answer, metadata):
    time.sleep(0.02)
    return completion.count("1") / max(len(completion), 1)
"""


def succeed(running: Running) -> None:
    ended = running.wait()
    assert ended.status == 0, ended.err


def generators(run: Running) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(run.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "headrace.generators.pool.hosted" in child.cmdline():
                found.append(child)
    return found


def test_a_run_learns_bit_for_bit_what_it_does_without_also_where_a_generator_is_killed(
    own_lab: Lab, finished: Path
) -> None:
    (own_lab.folder / "reward.py").write_text(SLOW, encoding="utf-8")
    run = own_lab.folder / "broadcast"
    running = own_lab.train(run.name, *BROADCAST)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    generators(running)[0].send_signal(signal.SIGKILL)
    succeed(running)
    assert (run / MODEL).read_bytes() == (finished / MODEL).read_bytes()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (BROADCAST[-2:], 'weight_sync.transport = "broadcast" with placement.generators'),
        ((*BROADCAST, "--set", "weight_sync.delta.whole_every=9"), "a broadcast is of all weights"),
        ((*BROADCAST, "--set", 'generator.engine="vllm"'), "vLLM has processes of its own"),
    ],
)
def test_a_check_refuses_what_does_not_go_with_it(
    lab: Lab, headrace: Command, settings: tuple[str, ...], expected: str
) -> None:
    ended = headrace("check", lab.recipe, *settings)
    assert ended.status == 2
    assert expected in " ".join(ended.err.split())
