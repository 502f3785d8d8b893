from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.objectives.advantages import AdvantageEstimator, group_advantages, has_spread

ESTIMATORS: tuple[AdvantageEstimator, ...] = ("grpo", "dr_grpo", "rloo")
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), min_size=1, max_size=16)


def literal_advantages(scored: list[float], estimator: AdvantageEstimator) -> list[float]:
    mean = sum(scored) / len(scored)
    advantages = []
    for position, reward in enumerate(scored):
        others = scored[:position] + scored[position + 1 :]
        if estimator == "grpo":
            advantages.append((reward - mean) / statistics.stdev(scored))
        elif estimator == "dr_grpo":
            advantages.append(reward - mean)
        else:
            advantages.append(reward - sum(others) / len(others))
    return advantages


@every_estimator
@settings(deadline=None)
@given(rewards=rewards_of_a_group)
def test_advantages_are_those_of_the_literal_formula_over_the_scored_rollouts(
    estimator: AdvantageEstimator, rewards: list[float | None]
) -> None:
    advantages = group_advantages(rewards, estimator=estimator)
    assert [value is None for value in advantages] == [value is None for value in rewards]
    scored = [reward for reward in rewards if reward is not None]
    found = [value for value in advantages if value is not None]
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
    estimator: AdvantageEstimator, rewards: list[float | None], at: int
) -> None:
    alone = group_advantages(rewards, estimator=estimator)
    joined = group_advantages([*rewards[:at], None, *rewards[at:]], estimator=estimator)
    assert joined == [*alone[:at], None, *alone[at:]]


@every_estimator
def test_eight_rewards_of_one_tenth_have_advantages_of_exactly_zero(
    estimator: AdvantageEstimator,
) -> None:
    assert group_advantages([0.1] * 8, estimator=estimator) == [0.0] * 8
    assert not has_spread([0.1] * 8)


@every_estimator
@pytest.mark.parametrize("rewards", [[0.0] + [0.95] * 7, [1.0, 0.0, 0.0, 0.0], [0.0, 1e-5]])
def test_no_advantage_exceeds_the_group_size(
    estimator: AdvantageEstimator, rewards: list[float]
) -> None:
    advantages = group_advantages(rewards, estimator=estimator)
    assert max(abs(value) for value in advantages if value is not None) <= len(rewards)


@every_estimator
def test_a_middle_group_of_equal_rewards_has_zeros_whatever_its_neighbours(
    estimator: AdvantageEstimator,
) -> None:
    groups = [[0.0, 1.0, 0.0, 1.0], [5.0, 5.0, 5.0], [9.0, 1.0, 1.0, 1.0]]
    advantages = [group_advantages(group, estimator=estimator) for group in groups]
    assert advantages[1] == [0.0, 0.0, 0.0]


@every_estimator
def test_a_rollout_without_a_trainable_token_leaves_the_survivor_at_zero(
    estimator: AdvantageEstimator,
) -> None:
    # Rewards 100 and 1, action counts 0 and 2: the caller passes None for the first.
    assert group_advantages([None, 1.0], estimator=estimator) == [None, 0.0]


@every_estimator
def test_a_failed_check_is_no_wrong_answer(estimator: AdvantageEstimator) -> None:
    expected = [0.0, 0.0, 0.0, None]
    assert group_advantages([1.0, 1.0, 1.0, None], estimator=estimator) == expected
    assert group_advantages([None, None], estimator=estimator) == [None, None]
    assert group_advantages([], estimator=estimator) == []


def test_a_nan_reward_abstains_like_none() -> None:
    advantages = group_advantages([1.0, None, 0.0, math.nan], estimator="dr_grpo")
    assert advantages == [0.5, None, -0.5, None]


@settings(deadline=None)
@given(offset=st.sampled_from([-1e8, 0.0, 1e8]))
def test_a_large_offset_costs_no_digits(offset: float) -> None:
    rewards = [offset + 0.0, offset + 0.25, offset + 1.0]
    expected = group_advantages([0.0, 0.25, 1.0], estimator="grpo")
    assert group_advantages(rewards, estimator="grpo") == expected
