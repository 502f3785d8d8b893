from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.objectives.advantages import (
    BatchEstimator,
    GroupEstimator,
    advantages,
    group_advantages,
    has_spread,
)

ESTIMATORS: tuple[GroupEstimator, ...] = ("grpo", "dr_grpo", "rloo", "rloo_std", "opo")
BATCH_ESTIMATORS: tuple[BatchEstimator, ...] = ("reinforce_pp", "reinforce_pp_baseline")
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), min_size=1, max_size=16)


def literal_advantages(scored: list[float], estimator: GroupEstimator) -> list[float]:
    mean = sum(scored) / len(scored)
    found: list[float] = []
    for position, reward in enumerate(scored):
        others = scored[:position] + scored[position + 1 :]
        if estimator == "grpo":
            found.append((reward - mean) / statistics.stdev(scored))
        elif estimator in {"dr_grpo", "opo"}:  # opo with all lengths alike
            found.append(reward - mean)
        else:
            scale = statistics.stdev(scored) if estimator == "rloo_std" else 1.0
            found.append((reward - sum(others) / len(others)) / scale)
    return found


@every_estimator
@settings(deadline=None)
@given(rewards=rewards_of_a_group)
def test_advantages_are_those_of_the_literal_formula_over_the_scored_rollouts(
    estimator: GroupEstimator, rewards: list[float | None]
) -> None:
    result = group_advantages(rewards, estimator=estimator)
    assert [value is None for value in result] == [value is None for value in rewards]
    scored = [reward for reward in rewards if reward is not None]
    found = [value for value in result if value is not None]
    if has_spread(rewards):
        assert found == pytest.approx(literal_advantages(scored, estimator), rel=1e-6, abs=1e-9)
        assert sum(found) == pytest.approx(0.0, abs=1e-8)
    else:
        assert found == [0.0] * len(scored)
    assert all(abs(value) <= len(rewards) for value in found)


@every_estimator
@settings(deadline=None)
@given(rewards=rewards_of_a_group, at=st.integers(0, 16))
def test_an_unscored_rollout_changes_no_sibling(
    estimator: GroupEstimator, rewards: list[float | None], at: int
) -> None:
    alone = group_advantages(rewards, estimator=estimator)
    joined = group_advantages([*rewards[:at], None, *rewards[at:]], estimator=estimator)
    assert joined == [*alone[:at], None, *alone[at:]]


@every_estimator
def test_eight_rewards_of_one_tenth_have_advantages_of_exactly_zero(
    estimator: GroupEstimator,
) -> None:
    assert group_advantages([0.1] * 8, estimator=estimator) == [0.0] * 8
    assert not has_spread([0.1] * 8)


@every_estimator
@pytest.mark.parametrize("rewards", [[0.0] + [0.95] * 7, [1.0, 0.0, 0.0, 0.0], [0.0, 1e-5]])
def test_no_advantage_exceeds_the_group_size(
    estimator: GroupEstimator, rewards: list[float]
) -> None:
    result = group_advantages(rewards, estimator=estimator)
    assert max(abs(value) for value in result if value is not None) <= len(rewards)


@every_estimator
def test_a_middle_group_of_equal_rewards_has_zeros_whatever_its_neighbours(
    estimator: GroupEstimator,
) -> None:
    groups = [[0.0, 1.0, 0.0, 1.0], [5.0, 5.0, 5.0], [9.0, 1.0, 1.0, 1.0]]
    result = [group_advantages(group, estimator=estimator) for group in groups]
    assert result[1] == [0.0, 0.0, 0.0]


@every_estimator
def test_a_rollout_without_a_trainable_token_leaves_the_survivor_at_zero(
    estimator: GroupEstimator,
) -> None:
    # Rewards 100 and 1, action counts 0 and 2: the caller passes None for the first.
    assert group_advantages([None, 1.0], estimator=estimator) == [None, 0.0]


@every_estimator
def test_a_failed_check_is_no_wrong_answer(estimator: GroupEstimator) -> None:
    expected = [0.0, 0.0, 0.0, None]
    assert group_advantages([1.0, 1.0, 1.0, None], estimator=estimator) == expected
    assert group_advantages([None, None], estimator=estimator) == [None, None]
    assert group_advantages([], estimator=estimator) == []


def test_a_nan_reward_abstains_like_none() -> None:
    result = group_advantages([1.0, None, 0.0, math.nan], estimator="dr_grpo")
    assert result == [0.5, None, -0.5, None]


@settings(deadline=None)
@given(offset=st.sampled_from([-1e8, 0.0, 1e8]))
def test_a_large_offset_costs_no_digits(offset: float) -> None:
    rewards = [offset + 0.0, offset + 0.25, offset + 1.0]
    expected = group_advantages([0.0, 0.25, 1.0], estimator="grpo")
    assert group_advantages(rewards, estimator="grpo") == expected


# --- lengths and whole batches ------------------------------------------------------------------


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.one_of(st.none(), st.floats(0.0, 1.0)), st.integers(1, 50)),
        min_size=1,
        max_size=10,
    )
)
def test_opos_baseline_weighs_each_reward_by_the_length_of_its_rollout(
    rows: list[tuple[float | None, int]],
) -> None:
    rewards, lengths = [reward for reward, _ in rows], [length for _, length in rows]
    result = group_advantages(rewards, estimator="opo", lengths=lengths)
    scored = [(reward, length) for reward, length in rows if reward is not None]
    if not has_spread(rewards):
        assert [value for value in result if value is not None] == [0.0] * len(scored)
        return
    total = sum(length for _, length in scored)
    baseline = sum(reward * length for reward, length in scored) / total
    for reward, value in zip(rewards, result, strict=True):
        assert (value is None) == (reward is None)
        if reward is not None:
            assert value == pytest.approx(reward - baseline, abs=1e-9)


batches = st.lists(rewards_of_a_group, min_size=1, max_size=5)


def literal_batch(
    groups: list[list[float | None]], estimator: BatchEstimator
) -> list[list[float | None]]:
    centred = []
    for rewards in groups:
        scored = [reward for reward in rewards if reward is not None]
        mean = sum(scored) / len(scored) if scored else 0.0
        flat = estimator == "reinforce_pp_baseline" and not has_spread(rewards)
        shift = mean if estimator == "reinforce_pp_baseline" else 0.0
        centred.append([None if r is None else (0.0 if flat else r - shift) for r in rewards])
    values = [value for row in centred for value in row if value is not None]
    mean = sum(values) / len(values) if estimator == "reinforce_pp" else 0.0
    std = statistics.stdev(values)
    return [[None if v is None else (v - mean) / std for v in row] for row in centred]


@pytest.mark.parametrize("estimator", BATCH_ESTIMATORS)
@settings(deadline=None)
@given(groups=batches)
def test_over_a_batch_advantages_are_those_of_the_literal_formula(
    estimator: BatchEstimator, groups: list[list[float | None]]
) -> None:
    lengths = [[1] * len(rewards) for rewards in groups]
    result = advantages(groups, lengths, estimator=estimator)
    flat = [reward for rewards in groups for reward in rewards]
    if estimator == "reinforce_pp":
        has_signal = has_spread(flat)
    else:
        has_signal = any(has_spread(rewards) for rewards in groups)
    if not has_signal:
        values = [value for row in result for value in row if value is not None]
        assert values == [0.0] * len(values)
        return
    for row, expected in zip(result, literal_batch(groups, estimator), strict=True):
        assert [v is None for v in row] == [v is None for v in expected]
        numbers = [value for value in expected if value is not None]
        found = [value for value in row if value is not None]
        assert found == pytest.approx(numbers, rel=1e-6, abs=1e-9)
        assert all(abs(value) <= len(flat) for value in found)


def test_under_a_group_baseline_a_group_of_equal_rewards_has_exactly_zero_beside_others() -> None:
    groups = [[1.0, 0.0, 0.3], [0.1] * 8]
    result = advantages(groups, [[1] * 3, [1] * 8], estimator="reinforce_pp_baseline")
    assert result[1] == [0.0] * 8
    over_batch = advantages(groups, [[1] * 3, [1] * 8], estimator="reinforce_pp")
    assert all(value != 0.0 for value in over_batch[1])


@every_estimator
def test_uneven_groups_are_each_their_own_whatever_lies_beside_them(
    estimator: GroupEstimator,
) -> None:
    groups = [[0.0, 1.0, 0.5, 1.0], [5.0, 5.0, 5.0], [9.0, None, 1.0, 1.0, 2.0]]
    lengths = [[3, 1, 4, 1], [5, 9, 2], [6, 5, 3, 5, 8]]
    result = advantages(groups, lengths, estimator=estimator)
    for rewards, counts, row in zip(groups, lengths, result, strict=True):
        assert row == group_advantages(rewards, estimator=estimator, lengths=counts)
    assert advantages(groups[::-1], lengths[::-1], estimator=estimator) == result[::-1]
