"""What the engine is like after a step that failed half way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.errors import GeneratorFailure
from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab


class FailingRunner(ModelRunner):
    """Runs out of memory where it is told to."""

    fails_in = ""

    def reserve(self, num_blocks: int) -> None:
        self._fail("reserve")
        super().reserve(num_blocks)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._fail("copy_blocks")
        super().copy_blocks(sources, targets)

    def _fail(self, place: str) -> None:
        if self.fails_in == place:
            raise MemoryError(place)


def engine_of(lab: Lab, num_blocks: int) -> tuple[Engine, FailingRunner, BlockManager]:
    decoder = lab.decoder()
    runner = FailingRunner(decoder.config, 4, torch.float32, torch.device("cpu"))
    blocks = BlockManager(num_blocks=num_blocks, block_size=4)
    scheduler = Scheduler(blocks, max_running=16, max_prefill_tokens=100)
    engine = Engine(runner, scheduler, blocks, lab.decode)
    engine.load(lab.update(decoder))
    return engine, runner, blocks


@pytest.mark.parametrize("place", ["reserve", "copy_blocks"])
def test_no_block_is_lost_to_a_step_that_failed_half_way(lab: Lab, place: str) -> None:
    engine, runner, blocks = engine_of(lab, num_blocks=20)
    expected = lab.run_out(engine, [lab.request("b", range(1, 20), max_tokens=8)])
    for _ in range(6):
        engine.submit([lab.request("a", range(1, 20), size=3)])
        runner.fails_in = place
        with pytest.raises(MemoryError, match=place):
            engine.step()
        engine.clear()
        assert (engine.has_work, blocks.num_held, blocks.num_touched) == (False, 0, 0)
    runner.fails_in = ""
    again = lab.run_out(engine, [lab.request("b", range(1, 20), max_tokens=8)])
    lab.assert_alike(again, expected)


def test_a_step_that_can_do_nothing_says_so_instead_of_being_taken_for_progress(lab: Lab) -> None:
    engine, _, blocks = engine_of(lab, num_blocks=20)
    blocks.take(16)  # by nobody who would ever give them back
    engine.submit([lab.request("a", range(1, 20))])
    with pytest.raises(GeneratorFailure, match=r"group a .* 16 of 20 blocks"):
        engine.step()
