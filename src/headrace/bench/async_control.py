"""The part of `bench async` about control: what controller, waves and buffer cost by themselves.

Roles that answer at once (`async_roles`) stand in for generator, verifier, learner and weight sync;
everything between them is the real thing. ``buffer_groups_per_second``: groups drawn, generated,
scored, delivered, trained on and settled in a second of one thread, two batches under way, the
ledger in memory. ``step_control_ms``: between the end of one learner step of 256 groups and the
beginning of the next, whose batch lies there whole, the ledger on the disk; the median. Not
measured: writing rollouts and metrics to files, which is the monitors' part.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.async_roles import (
    IN_MEMORY,
    Cast,
    InstantGenerator,
    InstantLearner,
    InstantVerifier,
    VersionSync,
    run_controller,
)
from headrace.bench.result import Figures, Peers, Progress
from headrace.buffer import RolloutBuffer

NUM_STEPS = 40
GROUPS_PER_STEP = 256
GROUP_SIZE = 8

_LEARNER_SECONDS = 0.1
"""Of a step whose end the next batch waits for: longer than 256 groups take to be delivered."""


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Return the figures of control."""
    rate = groups_per_second()
    progress(f"control: {rate:.0f} groups a second")
    overhead = 1e3 * statistics.median(control_gaps())
    progress(f"control: {overhead:.2f} ms between two steps of {GROUPS_PER_STEP} groups")
    return {"buffer_groups_per_second": rate, "step_control_ms": overhead}


def groups_per_second(num_steps: int = NUM_STEPS) -> float:
    """Return how many groups go through the controller in a second; the best of three runs."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        _run(InstantLearner(seconds=0.0), num_steps, IN_MEMORY)
        seconds.append(time.perf_counter() - began)
    return num_steps * GROUPS_PER_STEP / min(seconds)


def control_gaps(num_steps: int = NUM_STEPS) -> Sequence[float]:
    """Return the seconds between each two steps whose batches were whole beforehand."""
    learner = InstantLearner(seconds=_LEARNER_SECONDS)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        _run(learner, num_steps, Path(folder) / "ledger.sqlite")
    ends, begins = learner.ended_at[:-1], learner.began_at[1:]
    return [begin - end for end, begin in zip(ends, begins, strict=True)]


def _run(learner: InstantLearner, num_steps: int, ledger_path: Path) -> None:
    generator = InstantGenerator(GROUP_SIZE)
    cast = Cast(
        generator=generator,
        verifier=InstantVerifier(GROUP_SIZE),
        learner=learner,
        weight_sync=VersionSync(generator),
        buffer=RolloutBuffer(groups_per_step=GROUPS_PER_STEP, max_staleness=1),
    )
    run_controller(
        cast,
        num_steps=num_steps,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        ledger_path=ledger_path,
    )
