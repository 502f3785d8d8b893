"""What the engine is like after a step that failed half way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.errors import GeneratorFailure
from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.kv_cache import KVCache, block_bytes
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab


class FailingRunner(ModelRunner):
    """Runs out of memory where it is told to."""

    fails_in = ""
    num_wipes = 0

    def reserve(self, num_blocks: int, at_most: int) -> None:
        self._fail("reserve")
        super().reserve(num_blocks, at_most)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._fail("copy_blocks")
        super().copy_blocks(sources, targets)

    def wipe_blocks(self, blocks: Sequence[int]) -> None:
        self.num_wipes += 1
        super().wipe_blocks(blocks)

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    def _fail(self, place: str) -> None:
        if self.fails_in == place:
            raise MemoryError(place)


def engine_of(
    lab: Lab, num_blocks: int, max_prefill_tokens: int = 100
) -> tuple[Engine, FailingRunner, BlockManager]:
    decoder = lab.decoder()
    runner = FailingRunner(decoder.config, 4, torch.float32, torch.device("cpu"))
    blocks = BlockManager(num_blocks=num_blocks, block_size=4)
    scheduler = Scheduler(blocks, max_running=16, max_prefill_tokens=max_prefill_tokens)
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


@pytest.mark.parametrize("num_blocks", [21, 26, 33])
def test_the_cache_takes_no_more_memory_than_its_blocks_were_said_to(
    lab: Lab, num_blocks: int
) -> None:
    engine, runner, blocks = engine_of(lab, num_blocks)
    limit = num_blocks * block_bytes(lab.config(), 4, torch.float32)
    engine.submit([lab.request(str(i), (i, 1), size=3, max_tokens=5 * i) for i in range(1, 9)])
    while engine.has_work:
        engine.step()
        assert runner.cache_bytes <= limit
    assert blocks.num_touched == num_blocks


@pytest.mark.parametrize("how", ["drop", "abort", "preempt"])
def test_what_was_given_back_in_the_middle_of_a_broken_prefill_spoils_nobody(
    lab: Lab, how: str
) -> None:
    engine, runner, _ = engine_of(lab, num_blocks=20, max_prefill_tokens=10)
    requests = [lab.request("short", (1,)), lab.request("long", range(2, 11))]
    expected = lab.run_out(engine, requests)
    assert runner.num_wipes == 0
    broken = lab.decoder()
    for parameter in broken.parameters():
        parameter.fill_(float("nan"))
    engine.load(lab.update(broken, 2))
    collectors = engine.submit([lab.request("a", range(1, 20))])
    engine.step()
    assert engine.num_held_blocks > 0
    if how == "drop":
        engine.drop({*collectors})
    elif how == "abort":
        engine.abort({*collectors})
    engine.load(lab.update(lab.decoder(), 1), on_update="recompute")
    if how == "preempt":
        engine.drop({*collectors})
    lab.assert_alike(lab.run_out(engine, requests), expected)
    assert runner.num_wipes == 1


def test_the_cache_grows_ahead_of_what_is_asked_for_but_not_past_its_limit(lab: Lab) -> None:
    cache = KVCache(lab.config(), 4, torch.float32, torch.device("cpu"))
    sizes = []
    for num_blocks in (100, 101, 126, 140):
        cache.ensure(num_blocks, at_most=140)
        sizes.append(cache.num_blocks)
    assert sizes == [100, 125, 140, 140]
