"""Accounting of cache blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.generators.torch_engine.block_manager import BlockManager


def manager(num_blocks: int = 8, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, block_size=block_size)


def filled(blocks: BlockManager, tokens: range) -> list[int]:
    """Take and name the blocks of ``tokens``, as a prefill does."""
    taken = blocks.take(blocks.blocks_for(len(tokens)))
    blocks.name(tokens, taken)
    return taken


def test_a_known_beginning_is_found_up_to_its_last_whole_block() -> None:
    blocks = manager()
    taken = filled(blocks, range(10))
    assert blocks.find(range(10)) == taken[:2]
    assert blocks.find([*range(6), 99, 98, 97]) == taken[:1]
    assert blocks.find([99, *range(1, 10)]) == []


def test_the_last_token_is_always_left_to_compute() -> None:
    blocks = manager()
    taken = filled(blocks, range(8))
    assert blocks.find(range(8)) == taken[:1]
    assert blocks.find(range(9)) == taken


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    blocks = manager()
    filled(blocks, range(8))
    assert blocks.find([9, 9, 9, 9, 4, 5, 6, 7, 0]) == []


def test_what_was_released_is_found_until_its_block_is_needed() -> None:
    blocks = manager(num_blocks=3)
    taken = filled(blocks, range(8))
    blocks.release(taken)
    assert blocks.num_held == 0
    assert blocks.find(range(9)) == taken
    blocks.take(2)
    # The end of the chain went first: its beginning is of more use.
    assert blocks.find(range(9)) == taken[:1]


def test_a_found_block_is_not_given_to_another_once_held() -> None:
    blocks = manager(num_blocks=2)
    taken = filled(blocks, range(8))
    blocks.release(taken)
    blocks.hold(blocks.find(range(9)))
    assert blocks.num_available == 0


def test_nothing_is_found_under_other_weights() -> None:
    blocks = manager(num_blocks=4)
    kept, held = filled(blocks, range(8)), filled(blocks, range(20, 28))
    blocks.release(kept)
    blocks.forget_names()
    assert (blocks.find(range(9)), blocks.find(range(20, 29))) == ([], [])
    blocks.release(held)
    assert (blocks.num_held, blocks.num_available) == (0, 4)
    assert sorted(blocks.take(4)) == [0, 1, 2, 3]


def test_low_numbers_come_first_so_that_memory_is_for_what_was_touched() -> None:
    blocks = manager(num_blocks=1000)
    for _ in range(50):
        blocks.release(blocks.take(3))
    assert blocks.num_touched == 3


def test_no_more_is_kept_than_was_ever_held_at_once() -> None:
    blocks = manager(num_blocks=1000)
    for start in range(0, 1000, 20):
        blocks.release(filled(blocks, range(start, start + 12)))
    assert blocks.num_touched == 6
    assert blocks.find(range(980, 993)) != []


class BlockLife(RuleBasedStateMachine):
    """Random takers, sharers and finders against a literal list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = manager(num_blocks=6, block_size=2)
        self.held: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, tokens: list[int]) -> None:
        found = self.blocks.find(tokens)
        for index, block in enumerate(found):
            assert self.content[block] == tuple(tokens[: 2 * index + 2]), "another's tokens"
        self.blocks.hold(found)
        missing = self.blocks.blocks_for(len(tokens)) - len(found)
        if missing > self.blocks.num_available:
            self.blocks.release(found)
            return
        own = found + self.blocks.take(missing)
        for index, block in enumerate(own[len(found) :], start=len(found)):
            assert not any(block in blocks for blocks in self.held), "given out twice"
            self.content[block] = tuple(tokens[: 2 * index + 2])
        self.blocks.name(tokens, own)
        self.held.append(own)

    @rule(index=st.integers(0, 9))
    def share(self, index: int) -> None:
        if self.held:
            self.blocks.hold(self.held[index % len(self.held)])
            self.held.append(self.held[index % len(self.held)])

    @rule(index=st.integers(0, 9))
    def end(self, index: int) -> None:
        if self.held:
            self.blocks.release(self.held.pop(index % len(self.held)))

    @rule()
    def change_weights(self) -> None:
        self.blocks.forget_names()
        self.content = {}

    @rule()
    def lose_track(self) -> None:
        self.blocks.reset()
        self.held, self.content = [], {}

    @invariant()
    def every_block_is_held_or_available(self) -> None:
        holders = Counter(block for blocks in self.held for block in blocks)
        assert self.blocks.num_held == len(holders)
        assert self.blocks.num_available == self.blocks.num_blocks - len(holders)


BlockLife.TestCase.settings = settings(max_examples=60, deadline=None)
TestBlockLife = pytest.mark.filterwarnings("default")(BlockLife.TestCase)
