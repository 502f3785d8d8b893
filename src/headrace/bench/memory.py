"""`bench memory`: does a long run grow?

Measured: the resident memory of `headrace train quickstart` at the end of every step, as Linux
counts it, and its slope over the steps once it has warmed up. The recipe is as shipped, except for
its length and the held-out evaluation, which is left out. Not measured: the verifier's processes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression

from headrace.bench.command import run_headrace
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.errors import ConfigError, RunError
from headrace.monitors.run_directory import METRICS_FILE

NUM_STEPS = 320
WARM_UP_STEPS = 50
"""Allocators, caches and lazy imports settle in these; they are not part of the slope."""

_STATM = Path("/proc/self/statm")

Sample = tuple[int, int]
"""A step and the resident bytes after it."""


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Train once, sampling after each step. Raises ConfigError off Linux."""
    if not _STATM.is_file():
        msg = f"bench memory: reads {_STATM}, which only Linux has; run it on Linux"
        raise ConfigError(msg)
    settings = ("--set", "data.eval=null", "--set", f"num_steps={NUM_STEPS}")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        output = Path(folder) / "run"
        sampler = ResidentMemorySampler(output / METRICS_FILE)
        run_headrace(
            ["train", "quickstart", *settings, "--output", str(output)],
            progress=progress,
            on_tick=sampler,
        )
        return figures(sampler.samples)


class ResidentMemorySampler:
    """Called often with a process id; samples its memory whenever its run has ended a step."""

    def __init__(self, metrics: Path) -> None:
        self.samples: list[Sample] = []
        self._metrics = metrics
        self._offset = 0
        self._step = 0

    def __call__(self, process_id: int) -> None:
        """Sample if a step ended since the last call."""
        before = self._step
        self._read_new_lines()
        resident = resident_bytes(process_id)
        if self._step > before and resident is not None:
            self.samples.append((self._step, resident))

    def _read_new_lines(self) -> None:
        if not self._metrics.is_file():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            # Only up to the last line end: the line after it is still being written.
            complete, end, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(end)
        for line in complete.splitlines():
            record = json.loads(line)
            if record["kind"] == "step":
                self._step = record["step"]


def resident_bytes(process_id: int) -> int | None:
    """Return the resident memory of a process; None once it has ended."""
    try:
        statm = Path(f"/proc/{process_id}/statm").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def figures(samples: Sequence[Sample]) -> Figures:
    """Return the slope after the warm-up in KiB a step, and the last sample in MiB.

    Raises RunError when fewer than two samples follow the warm-up.
    """
    warm = [(step, resident) for step, resident in samples if step > WARM_UP_STEPS]
    if len({step for step, _ in warm}) <= 1:
        msg = f"{len(warm)} samples after step {WARM_UP_STEPS}: a slope needs two; run it again"
        raise RunError(msg)
    slope = linear_regression(*zip(*warm, strict=True)).slope
    return {
        "rss_slope_kb_per_step": slope / 2**10,
        "rss_mb_end": samples[-1][1] / 2**20,
    }


BENCHMARK = Benchmark(
    name="memory",
    summary="growth of resident memory over 300 steps of the nano model",
    measure=measure,
)
