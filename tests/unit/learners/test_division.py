"""Which rank gets which rollouts, and where parts lie in their whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.learners.division import divided
from headrace.learners.parallel.regions import Region
from headrace.learners.selection import TrainingGroup, TrainingRow, plain_rollout


def group(prompt: int, lengths: list[int]) -> TrainingGroup:
    rows = tuple(
        TrainingRow(rollout=plain_rollout(length), advantage=1.0, weight=1.0) for length in lengths
    )
    return TrainingGroup(prompt_ids=(0,) * prompt, rows=rows)


groups_of_any_size = st.lists(
    st.builds(group, st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=6)),
    max_size=7,
)


@given(groups=groups_of_any_size, count=st.integers(1, 5))
def test_every_rollout_is_computed_by_exactly_one_rank(
    groups: list[TrainingGroup], count: int
) -> None:
    shares = divided(groups, count)
    assert len(shares) == count
    found = [id(row.rollout) for share in shares for part in share for row in part.rows]
    assert sorted(found) == sorted(id(row.rollout) for g in groups for row in g.rows)
    assert all(part.rows for share in shares for part in share)


@given(groups=groups_of_any_size, count=st.integers(1, 5))
def test_no_rank_has_much_more_to_compute_than_another(
    groups: list[TrainingGroup], count: int
) -> None:
    shares = divided(groups, count)
    tokens = [sum(part.num_tokens for part in share) for share in shares]
    largest = max((part.num_tokens for share in shares for part in share), default=0)
    assert max(tokens) - min(tokens) <= largest


def test_one_large_group_is_split_between_its_rollouts() -> None:
    shares = divided([group(4, [9, 9, 9, 9])], 2)
    assert [sum(len(part.rows) for part in share) for share in shares] == [2, 2]


@pytest.mark.parametrize("size", [0, 1, 5, 8, 61])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_chunks_are_those_that_torch_cuts(size: int, count: int) -> None:
    tensor = torch.arange(size)
    chunks = [Region.whole((size,)).chunk(index, count) for index in range(count)]
    theirs = [list(part) for part in torch.chunk(tensor, count)] if size else []
    ours = [tensor[chunk.within(Region.whole((size,)))] for chunk in chunks]
    assert [list(part) for part in ours if len(part)] == theirs


def test_two_parts_share_what_both_hold() -> None:
    whole = torch.arange(48).view(6, 8)
    rows = Region(offsets=(2, 0), sizes=(3, 8))
    columns = Region(offsets=(0, 4), sizes=(6, 4))
    both = rows.overlap(columns)
    assert both == Region(offsets=(2, 4), sizes=(3, 4))
    outer = Region.whole((6, 8))
    assert torch.equal(
        whole[rows.within(outer)][both.within(rows)],
        whole[columns.within(outer)][both.within(columns)],
    )
    assert rows.overlap(Region(offsets=(5, 0), sizes=(1, 8))) is None
