from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.objectives.rejection import (
    Divergence,
    Reduction,
    on_policy_enough,
    second_moment_limit,
    within_divergence,
    without_veto,
)
from headrace.objectives.segments import Segments

DIVERGENCES: tuple[Divergence, ...] = ("k1", "k2", "k3")
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "max")
rollouts = st.lists(st.lists(st.floats(-3.0, 3.0), max_size=6), min_size=1, max_size=5)


def packed(rows: Sequence[Sequence[float]], hole: float = math.nan) -> tuple[Tensor, Segments]:
    """Pack with a cell outside the mask, that holds ``hole``, after each rollout."""
    cells = [cell for row in rows for cell in (*row, hole)]
    index = [number for number, row in enumerate(rows) for _ in (*row, hole)]
    mask = [flag for row in rows for flag in (*[True] * len(row), False)]
    segments = Segments(index=torch.tensor(index), count=len(rows), loss_mask=torch.tensor(mask))
    return torch.tensor(cells, dtype=torch.float64), segments


def literal_keeps(
    gaps: Sequence[float], divergence: Divergence, reduction: Reduction, low: float, high: float
) -> bool:
    if not gaps:
        return True
    if divergence == "k1":
        ratios = {
            "sum": [math.exp(sum(gaps))],
            "mean": [math.exp(sum(gaps) / len(gaps))],
            "max": [math.exp(gap) for gap in gaps],
        }[reduction]
        return all(low <= ratio <= high for ratio in ratios)
    values = [g * g / 2 if divergence == "k2" else math.exp(g) - 1 - g for g in gaps]
    reduced = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}
    return reduced[reduction] <= high


@pytest.mark.parametrize(("divergence", "reduction"), [*itertools.product(DIVERGENCES, REDUCTIONS)])
@settings(deadline=None)
@given(rows=rollouts, low=st.floats(0.05, 0.99), high=st.floats(1.01, 9.0))
def test_every_reduction_of_every_divergence_keeps_what_the_literal_loop_keeps(
    divergence: Divergence,
    reduction: Reduction,
    rows: list[list[float]],
    low: float,
    high: float,
) -> None:
    gaps, segments = packed(rows)
    found = within_divergence(
        gaps, segments=segments, divergence=divergence, reduction=reduction, low=low, high=high
    )
    assert found.tolist() == [literal_keeps(r, divergence, reduction, low, high) for r in rows]


def test_asymmetric_bounds_keep_the_ratios_they_name() -> None:
    # "0.5 to 5.0" keeps 4 and 0.6; read upside down it would keep [0.2, 2.0].
    gaps, segments = packed([[math.log(ratio)] for ratio in (0.3, 0.6, 1.0, 4.0, 6.0)])
    for reduction in REDUCTIONS:
        found = within_divergence(
            gaps, segments=segments, divergence="k1", reduction=reduction, low=0.5, high=5.0
        )
        assert found.tolist() == [False, True, True, True, False]


def test_a_rollout_whose_sum_overflows_is_rejected_by_a_finite_bound() -> None:
    gaps, segments = packed([[500.0, 500.0], [-500.0]])
    for divergence in DIVERGENCES:
        found = within_divergence(
            gaps, segments=segments, divergence=divergence, reduction="sum", low=1e-3, high=1e3
        )
        assert found.tolist() == [False, divergence == "k3"]


@settings(deadline=None)
@given(rows=rollouts, threshold=st.floats(0.05, 0.9))
def test_one_token_below_the_threshold_vetoes_its_rollout(
    rows: list[list[float]], threshold: float
) -> None:
    gaps, segments = packed(rows)
    found = without_veto(gaps, segments=segments, threshold=threshold)
    assert found.tolist() == [all(gap >= math.log(threshold) for gap in row) for row in rows]


def test_only_bad_rollouts_that_the_policy_left_are_dropped_as_off_policy() -> None:
    moved = [[0.5, 0.3], [0.5, 0.3], [0.1], [-5.0], [0.2, 0.2]]
    advantage = [-1.0, 1.0, -1.0, -1.0, 0.0]
    generator, segments = packed([[-1.0] * len(row) for row in moved])
    gaps, _ = packed(moved)
    advantages = torch.tensor(advantage, dtype=torch.float64)[segments.index]
    found = on_policy_enough(
        generator - gaps, generator, advantages, segments=segments, threshold=0.15
    )
    # The mean is 0.4, 0.4, 0.1, -5 and 0.2.
    assert found.tolist() == [False, True, True, True, True]


def test_trls_own_function_drops_the_same_rollouts() -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    draw = torch.Generator().manual_seed(1)
    q, mu = (torch.randn(12, 5, generator=draw) * 0.3 - 1.0 for _ in range(2))
    mask = torch.rand(12, 5, generator=draw) < 0.7
    mask[:, 0] = True
    advantages = torch.randn(12, 1, generator=draw)
    theirs = trainer.get_off_policy_mask(advantages, q, mu, mask.int(), 0.05)
    segments = Segments(
        index=torch.arange(12).repeat_interleave(5), count=12, loss_mask=mask.flatten()
    )
    ours = on_policy_enough(
        q.flatten(),
        mu.flatten(),
        advantages.expand(12, 5).flatten(),
        segments=segments,
        threshold=0.05,
    )
    assert 0 < ours.sum() < 12
    assert ours.tolist() == theirs.squeeze(1).bool().tolist()


@settings(deadline=None)
@given(
    gaps=st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.1, 0.5, 1.5]), max_size=12),
    threshold=st.floats(0.001, 3.0),
    data=st.data(),
)
def test_the_largest_second_moments_go_until_the_mean_of_the_rest_is_in_bounds(
    gaps: list[float], threshold: float, data: st.DataObject
) -> None:
    kept = sorted(gap * gap for gap in gaps)
    while kept and sum(kept) / len(kept) > threshold:
        # Those as large as the largest one go with it.
        kept = [square for square in kept if square < kept[-1]]
    limit = second_moment_limit(torch.tensor(gaps, dtype=torch.float64), threshold=threshold)
    assert sorted(gap * gap for gap in gaps if not gap * gap > limit) == kept
    shuffled = data.draw(st.permutations(gaps))
    assert second_moment_limit(torch.tensor(shuffled), threshold=threshold) == pytest.approx(limit)


def test_a_gap_that_is_no_number_rejects_nothing() -> None:
    gaps, segments = packed([[0.1, math.nan]])
    assert without_veto(gaps, segments=segments, threshold=0.5).all()
    for divergence, reduction in itertools.product(DIVERGENCES, REDUCTIONS):
        assert within_divergence(
            gaps, segments=segments, divergence=divergence, reduction=reduction, low=0.5, high=2.0
        ).all()
