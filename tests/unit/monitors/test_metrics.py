import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.monitors import Metrics, evaluation_metrics, rollout_metrics, unbiased_pass_at_k
from headrace.types import Outcome, RolloutGroup


@pytest.mark.parametrize("cuts", [(), (1,), (1, 34), (20, 40, 60)])
def test_a_mean_is_the_same_for_every_split(cuts: tuple[int, ...]) -> None:
    tokens = [1.0] + [2.0] * 100
    edges = (0, *cuts, len(tokens))
    whole = Metrics()
    for start, end in itertools.pairwise(edges):
        part = Metrics()
        part.add_mean("loss", math.fsum(tokens[start:end]), end - start)
        whole.merge(part)
    assert whole.compute() == {"loss": pytest.approx(201 / 101, rel=1e-12)}


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=30), st.data())
def test_merging_parts_in_any_order_gives_what_the_whole_gives(
    values: list[int], data: st.DataObject
) -> None:
    where = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)))
    whole, parts = Metrics(), [Metrics() for _ in range(4)]
    for value, part in zip(values, where, strict=True):
        for metrics in (whole, parts[part]):
            metrics.add_mean("mean", value, 1)
            metrics.add_sum("sum", value)
            metrics.add_max("max", value)
            metrics.add_min("min", value)
    merged = Metrics()
    for part in data.draw(st.permutations(parts)):
        merged.merge(part)
    assert merged.compute() == whole.compute()
    assert merged.compute()["mean"] == sum(values) / len(values)
    assert merged.compute()["max"] == max(values)


def test_a_mean_over_nothing_is_absent_and_not_nan() -> None:
    metrics = Metrics()
    metrics.add_mean("empty", 0.0, 0)
    metrics.add_sum("count", 0)
    assert metrics.compute() == {"count": 0}


def test_one_name_cannot_be_a_mean_and_a_maximum() -> None:
    metrics = Metrics()
    metrics.add_mean("x", 1.0, 1)
    with pytest.raises(ValueError, match="metric x: was a Mean and is now a Maximum"):
        metrics.add_max("x", 1.0)


def test_the_raw_reward_is_that_of_every_rollout_before_any_filter(
    make_group: Callable[..., RolloutGroup],
) -> None:
    metrics = rollout_metrics([make_group([1.0, 1.0]), make_group([0.5, 0.0])])
    assert metrics["verifier/reward/raw_mean"] == 0.625
    assert metrics["verifier/rollouts/num_scored"] == 4


def test_a_rollout_that_was_not_scored_counts_as_failed_and_never_as_zero(
    make_group: Callable[..., RolloutGroup],
) -> None:
    metrics = rollout_metrics([make_group([1.0, None, 0.0, None]), make_group([None, None])])
    assert metrics["verifier/reward/raw_mean"] == 0.5
    assert metrics["verifier/component/exact/mean"] == 0.5
    assert metrics["verifier/rollouts/num_scored"] == 2
    assert metrics["verifier/rollouts/num_failed"] == 4
    assert metrics["verifier/groups/num_dropped"] == 1
    assert metrics["verifier/outcome/infra_share"] == pytest.approx(4 / 6)


def test_a_batch_that_nothing_was_scored_of_has_no_reward_at_all(
    make_group: Callable[..., RolloutGroup],
) -> None:
    metrics = rollout_metrics([make_group([None, None])])
    assert "verifier/reward/raw_mean" not in metrics
    assert "verifier/source/sums/reward_mean" not in metrics


def test_rewards_are_reported_by_source(make_group: Callable[..., RolloutGroup]) -> None:
    groups = [make_group([1.0, 0.0], source="a"), make_group([1.0], source="b")]
    metrics = rollout_metrics(groups)
    assert metrics["verifier/source/a/reward_mean"] == 0.5
    assert metrics["verifier/source/b/reward_mean"] == 1.0


def test_outcomes_components_and_labels_are_reported_by_source_too(
    make_group: Callable[..., RolloutGroup],
) -> None:
    groups = [make_group([1.0, None], source="a"), make_group([0.0], source="b")]
    assert groups[0].verdicts is not None
    noted = [dataclasses.replace(v, labels=("exits_early",)) for v in groups[0].verdicts]
    metrics = rollout_metrics([groups[0].scored(noted), groups[1]])
    assert metrics["verifier/outcome/pass_share"] == pytest.approx(1 / 3)
    assert metrics["verifier/source/a/outcome/pass_share"] == 0.5
    assert metrics["verifier/source/a/outcome/infra_share"] == 0.5
    assert metrics["verifier/source/b/outcome/wrong_share"] == 1.0
    assert metrics["verifier/source/a/component/exact/mean"] == 1.0
    assert metrics["verifier/source/b/component/exact/mean"] == 0.0
    assert metrics["verifier/label/exits_early/num_rollouts"] == 2
    assert metrics["verifier/source/a/label/exits_early/num_rollouts"] == 2
    assert "verifier/source/b/label/exits_early/num_rollouts" not in metrics


def test_lengths_and_finish_reasons_are_those_of_the_completions(
    make_group: Callable[..., RolloutGroup],
) -> None:
    metrics = rollout_metrics([make_group([1.0, 0.0, 0.0])])
    assert metrics["generator/tokens/num_completion_tokens"] == 6 + 7 + 8
    assert metrics["generator/completion_tokens/mean"] == 7
    assert metrics["generator/completion_tokens/min"] == 6
    assert metrics["generator/completion_tokens/max"] == 8
    assert metrics["generator/prompt_tokens/mean"] == 3
    assert metrics["generator/finish/stop_share"] == 1.0
    assert metrics["generator/finish/length_share"] == 0.0


def test_the_metrics_of_no_groups_are_counts_of_zero() -> None:
    assert rollout_metrics([]) == {
        "generator/tokens/num_completion_tokens": 0,
        "verifier/groups/num_dropped": 0,
        "verifier/rollouts/num_failed": 0,
        "verifier/rollouts/num_scored": 0,
    }


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_pass(
    num_rollouts: int, data: st.DataObject
) -> None:
    passed = data.draw(st.lists(st.booleans(), min_size=num_rollouts, max_size=num_rollouts))
    k = data.draw(st.integers(1, num_rollouts))
    choices = list(itertools.combinations(passed, k))
    expected = Fraction(sum(any(choice) for choice in choices), len(choices))
    value = unbiased_pass_at_k(num_rollouts, sum(passed), k)
    assert value == pytest.approx(float(expected), abs=1e-12)


def test_pass_at_k_is_averaged_over_prompts_and_leaves_out_the_unscored(
    make_group: Callable[..., RolloutGroup],
) -> None:
    groups = [
        make_group([1.0, 0.0, 0.0, 0.0], source="a"),
        make_group([1.0, None, None, None], source="b"),
        make_group([None, None, None, None], source="b"),
    ]
    metrics = evaluation_metrics(groups, "sampled", (1, 2))
    assert metrics["eval/sampled/pass_at_1"] == pytest.approx((0.25 + 1.0) / 2)
    assert metrics["eval/sampled/pass_at_2"] == pytest.approx(0.5)
    assert metrics["eval/sampled/num_left_out_at_1"] == 1
    assert metrics["eval/sampled/num_left_out_at_2"] == 2
    assert metrics["eval/sampled/num_failed"] == 7
    assert metrics["eval/sampled/num_prompts"] == 3
    assert metrics["eval/sampled/source/a/pass_at_1"] == 0.25
    assert metrics["eval/sampled/source/b/pass_at_1"] == 1.0
    assert metrics["eval/sampled/reward_mean"] == pytest.approx(2 / 5)


def test_what_the_verifier_calls_a_pass_counts_as_one(
    make_group: Callable[..., RolloutGroup],
) -> None:
    # The verifier allows for rounding: 0.7 + 0.1 is below 0.8 and reaches a threshold of it.
    group = make_group([0.7 + 0.1, 0.1])
    assert group.verdicts is not None
    outcomes = (Outcome.PASS, Outcome.WRONG)
    verdicts = [
        dataclasses.replace(verdict, outcome=outcome)
        for verdict, outcome in zip(group.verdicts, outcomes, strict=True)
    ]
    groups = [dataclasses.replace(group, verdicts=tuple(verdicts))]
    assert evaluation_metrics(groups, "greedy", (1,))["eval/greedy/pass_at_1"] == 0.5
