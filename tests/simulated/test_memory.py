"""A long run over fakes: nothing grows with the number of steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from fakes import World

from headrace.types import StepRecord

WARM_UP, NUM_STEPS = 100, 300


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("max_staleness", [0, 3])
def test_memory_and_queues_stay_bounded_over_many_steps(max_staleness: int) -> None:
    world = World(
        num_steps=NUM_STEPS, groups_per_step=4, max_staleness=max_staleness, num_prompts=16
    )
    world.learner.keep_batches = world.monitor.keep = False
    resident: list[int] = []
    queued: list[int] = []

    def look(record: StepRecord) -> None:
        world.journal.clear()
        world.ledger.settled_groups.clear()
        queued.append(len(world.buffer._groups))
        if record.step in {WARM_UP, NUM_STEPS}:
            gc.collect()
            resident.append(resident_bytes())

    world.monitor.on_each_step = look
    world.run()

    # The ledger is in memory here and keeps a row for each group: about 100 bytes of it.
    slope = (resident[1] - resident[0]) / (NUM_STEPS - WARM_UP)
    assert slope < 10_000, f"{slope:.0f} bytes a step"
    assert max(queued) <= world.buffer.num_slots
