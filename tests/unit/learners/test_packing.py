"""What a minibatch trains on, what each token counts, and how it is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import ObjectiveConfig
from headrace.learners.loss import LossSetting, microbatch_loss
from headrace.learners.metrics import LossSums
from headrace.learners.packing import LEAST_SHARED, Microbatch, microbatches
from headrace.learners.selection import Selection, score, select, trained_rewards
from headrace.types import RolloutGroup

CPU = torch.device("cpu")


def chosen(
    groups: Sequence[RolloutGroup], *, estimator: str = "grpo", aggregation: str = "token"
) -> Selection:
    return select(
        score(groups, trained_rewards(groups), estimator=estimator),  # type: ignore[arg-type]
        aggregation=aggregation,  # type: ignore[arg-type]
        max_tokens=16,
        keep_no_spread=False,
    )


def packed(selection: Selection, budget: int = 10_000) -> list[Microbatch]:
    return microbatches(selection.groups, max_tokens=budget, device=CPU)


def advantages(selection: Selection) -> list[list[float]]:
    return [[row.advantage for row in group.rows] for group in selection.groups]


def test_an_end_of_sequence_id_is_trained_wherever_it_stands_and_nothing_pads_it(
    make_group: Callable[..., RolloutGroup],
) -> None:
    # 0 is end of sequence and would be padding: an ending, a cut-off one, and one in mid-text.
    group = make_group([1, 2], [[5, 6, 0], [5, 6, 7], [0, 5]], [1.0, 0.0, 0.5])
    (part,) = packed(chosen([group]))
    assert part.target_ids.tolist() == [5, 6, 0, 5, 6, 7, 0, 5]
    assert part.input_ids.tolist() == [1, 2, 5, 6, 5, 6, 0]
    assert part.source_rows.tolist() == [1, 2, 3, 1, 4, 5, 1, 6]
    assert part.positions.tolist() == [0, 1, 2, 3, 2, 3, 2]


def test_only_trained_tokens_are_predicted_and_nothing_after_the_last_is_fed_in(
    make_group: Callable[..., RolloutGroup],
) -> None:
    masks = [[True, False, False, True, False, False], [False, True]]
    group = make_group([1], [[10, 11, 12, 13, 14, 15], [20, 21]], [1.0, 0.0], masks=masks)
    (part,) = packed(chosen([group]))
    assert part.target_ids.tolist() == [10, 13, 21]
    # The observation in the middle is context; the one at the end is nobody's.
    assert part.input_ids.tolist() == [1, 10, 11, 12, 20]
    assert part.source_rows.tolist() == [0, 3, 4]


def test_rewards_without_spread_give_advantages_of_exactly_zero_and_are_counted(
    make_group: Callable[..., RolloutGroup],
) -> None:
    flat = make_group([1], [[2]] * 8, [0.1] * 8)
    selection = chosen([flat])
    assert (selection.groups, selection.num_no_spread) == ((), 1)
    kept = select(
        score([flat], trained_rewards([flat]), estimator="grpo"),
        aggregation="token",
        max_tokens=16,
        keep_no_spread=True,
    )
    assert advantages(kept) == [[0.0] * 8]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.0] + [0.95] * 7, [1.0, 0.0, 0.0, 0.0]])
def test_no_advantage_is_larger_than_the_group(
    estimator: str, rewards: list[float], make_group: Callable[..., RolloutGroup]
) -> None:
    selection = chosen([make_group([1], [[2]] * len(rewards), rewards)], estimator=estimator)
    assert max(abs(a) for row in advantages(selection) for a in row) <= len(rewards)


def test_uneven_groups_are_compared_with_themselves_only(
    make_group: Callable[..., RolloutGroup],
) -> None:
    groups = [
        make_group([1], [[2]] * 4, [1.0, 0.0, 0.0, 1.0], group_id="0/a"),
        make_group([3], [[2]] * 3, [5.0] * 3, group_id="0/b"),
        make_group([4], [[2]] * 4, [0.0, 0.0, 1.0, 1.0], group_id="0/c"),
    ]
    selection = chosen(groups, estimator="dr_grpo")
    assert advantages(selection) == [[0.5, -0.5, -0.5, 0.5], [-0.5, -0.5, 0.5, 0.5]]
    assert selection.num_no_spread == 1


def test_a_rollout_without_a_trained_token_has_no_vote(
    make_group: Callable[..., RolloutGroup],
) -> None:
    for nothing in ([], [7]):
        masks = [[False] * len(nothing), [True, True], [True]]
        group = make_group([1], [nothing, [5, 6], [5]], [100.0, 1.0, 0.0], masks=masks)
        assert advantages(chosen([group], estimator="dr_grpo")) == [[0.5, -0.5]]
    lone = make_group([1], [[], [5, 6]], [100.0, 1.0])
    assert chosen([lone]).groups == ()


def test_an_unscored_rollout_is_in_no_mean_no_denominator_and_no_row(
    make_group: Callable[..., RolloutGroup],
) -> None:
    failed = make_group([1], [[2], [3], [4], [5, 6]], [1.0, 1.0, 1.0, None])
    assert chosen([failed]).groups == ()
    pair = make_group([1], [[2], [3, 4], [5] * 9], [1.0, 0.0, None])
    (group,) = chosen([pair]).groups
    assert [row.weight for row in group.rows] == [1 / 3, 1 / 3]
    alone = make_group([1], [[2], [3]], [1.0, None])
    assert (chosen([alone]).groups, chosen([alone]).num_no_spread) == ((), 1)


def test_a_lone_end_of_sequence_is_trained_and_an_empty_completion_is_not(
    make_group: Callable[..., RolloutGroup],
) -> None:
    group = make_group([1, 2], [[0], [], [0], [0]], [1.0, 1.0, 0.0, 0.0])
    (part,) = packed(chosen([group]))
    assert part.completion_lengths == (0, 0, 0)
    assert (part.target_ids.tolist(), part.source_rows.tolist()) == ([0] * 3, [1] * 3)


def test_the_weights_of_groups_left_out_stay_in_the_denominator(
    make_group: Callable[..., RolloutGroup],
) -> None:
    groups = [
        make_group([1], [[2], [3, 4]], [1.0, 0.0], group_id="0/a"),
        make_group([1], [[2] * 4, [3] * 3], [1.0, 1.0], group_id="0/b"),
    ]
    expected = {"token": [1 / 10, 1 / 10], "sequence": [1 / 4, 1 / 8], "constant": [1 / 64] * 2}
    for aggregation, weights in expected.items():
        (group,) = chosen(groups, aggregation=aggregation).groups
        assert [row.weight for row in group.rows] == pytest.approx(weights), aggregation


# --- the loss of a split ----------------------------------------------------------------------


def setting(objective: ObjectiveConfig) -> LossSetting:
    return LossSetting(objective=objective, max_tokens=16, policy_version=0)


def losses_of(selection: Selection, budget: int, values: dict[int, float]) -> LossSums:
    """Sum over micro-batches of the loss in which every token of ``values``' ids has that loss."""
    total = LossSums()
    for part in packed(selection, budget):
        part.advantages = -torch.tensor([values[i] for i in part.target_ids.tolist()])
        logprobs = torch.full_like(part.weights, -1.0)
        # Its own proximal: every ratio is 1, and the loss of a token is minus its advantage.
        objective = ObjectiveConfig(proximal="recompute")
        _, sums = microbatch_loss(part, logprobs, logprobs, setting(objective), None)
        total.add(sums)
    return total


@pytest.mark.parametrize("budget", [1, 2, 9, 10, 100])
def test_a_token_mean_over_lengths_one_and_nine_is_the_same_for_every_split(
    budget: int, make_group: Callable[..., RolloutGroup]
) -> None:
    group = make_group([1], [[2], [3] * 9], [0.0, 1.0])
    sums = losses_of(chosen([group]), budget, {2: 3.0, 3: 1.0})
    assert sums["loss"] == pytest.approx(1.2)
    assert sums["tokens"] == 10


def test_one_token_at_one_and_a_hundred_at_two_have_the_mean_of_all_of_them(
    make_group: Callable[..., RolloutGroup],
) -> None:
    group = make_group([1], [[2], [3] * 100], [0.0, 1.0])
    for budget in (1, 60, 1000):
        sums = losses_of(chosen([group]), budget, {2: 1.0, 3: 2.0})
        assert sums["loss"] == pytest.approx(201 / 101)


@pytest.mark.parametrize("garbage", [math.nan, -1e9, math.inf])
def test_what_a_masked_token_says_leaves_no_trace(
    garbage: float, make_group: Callable[..., RolloutGroup]
) -> None:
    masks = [[True, False, True], [False, True]]
    found = []
    for value in (-1.0, garbage):
        logprobs = [[-2.0, value, -3.0], [value, -1.5]]
        group = make_group([1], [[2, 3, 4], [5, 6]], [1.0, 0.0], masks=masks, logprobs=logprobs)
        (part,) = packed(chosen([group]))
        q = torch.tensor([-2.1, -2.9, -1.4], requires_grad=True)
        loss, sums = microbatch_loss(part, q, q.detach(), setting(ObjectiveConfig()), None)
        (gradient,) = torch.autograd.grad(loss, q)
        found.append((loss.item(), gradient.tolist(), sums))
    assert found[0] == found[1]


# --- cutting ----------------------------------------------------------------------------------


def sizes(parts: Sequence[Microbatch]) -> list[int]:
    return [len(part.input_ids) for part in parts]


def test_a_row_over_the_budget_goes_alone(make_group: Callable[..., RolloutGroup]) -> None:
    group = make_group([1] * 10, [[2] * 5, [3] * 240, [4] * 5], [1.0, 0.0, 0.5])
    parts = packed(chosen([group]), 100)
    assert sizes(parts) == [249, 28]
    assert [part.completion_lengths for part in parts] == [(239,), (4, 4)]


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
        HealthCheck.too_slow,
    ],
)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=2, max_size=5)),
        min_size=1,
        max_size=5,
    ),
    budget=st.integers(1, 80),
)
def test_every_token_is_trained_once_and_only_a_single_row_may_exceed_the_budget(
    shapes: list[tuple[int, list[int]]], budget: int, make_group: Callable[..., RolloutGroup]
) -> None:
    groups = [
        make_group([index] * prompt, [[t % 60] * t for t in lengths], list(range(len(lengths))))
        for index, (prompt, lengths) in enumerate(shapes)
    ]
    selection = chosen(groups)
    parts = packed(selection, budget)
    assert sum(float(part.weights.sum()) for part in parts) == pytest.approx(1.0)
    assert sum(len(part.target_ids) for part in parts) == sum(sum(lengths) for _, lengths in shapes)
    for part in parts:
        assert len(part.input_ids) <= budget or len(part.completion_lengths) == 1
        assert len(part.input_ids) == sum(part.prompt_lengths) + sum(part.completion_lengths)


def test_the_longest_sequences_come_first(make_group: Callable[..., RolloutGroup]) -> None:
    lengths = [3, 12, 30]
    groups = [make_group([1], [[n] * n, [n + 1] * n], [1.0, 0.0]) for n in lengths]
    parts = packed(chosen(groups), 40)
    assert [max(part.completion_lengths) for part in parts] == [29, 29, 11]


@pytest.mark.parametrize("num_left", [0, 1, 3])
def test_what_all_prompts_begin_with_is_held_once_but_for_one_token(
    num_left: int, make_group: Callable[..., RolloutGroup]
) -> None:
    begin = list(range(1, LEAST_SHARED + 2))
    prompts = [[*begin, 40, 41], [*begin, *range(50, 50 + num_left)]]
    groups = [make_group(prompt, [[5, 6], [7]], [1.0, 0.0]) for prompt in prompts]
    (part,) = packed(chosen(groups))
    # Of a prompt that is whole in the other one, its last token is its own.
    shared = LEAST_SHARED + 1 if num_left else LEAST_SHARED
    assert part.num_shared == shared
    assert sorted(part.prompt_lengths) == sorted(map(len, prompts))
    assert part.input_ids[:shared].tolist() == begin[:shared]
    assert part.positions[:shared].tolist() == list(range(shared))
    ends = [prompts[owner][-1] for owner in range(2)]
    longest_first = sorted(range(2), key=lambda owner: len(prompts[owner]), reverse=True)
    firsts = [part.source_rows[i] for i, t in enumerate(part.target_ids.tolist()) if t in {5, 7}]
    found = part.input_ids[torch.stack(firsts)].tolist()
    assert sorted(found) == sorted([*ends, *ends])
    starts = part.input_ids[shared:].tolist()
    assert starts[: len(prompts[longest_first[0]]) - shared] == prompts[longest_first[0]][shared:]


def test_little_that_prompts_have_in_common_is_held_for_each(
    make_group: Callable[..., RolloutGroup],
) -> None:
    begin = list(range(1, LEAST_SHARED))
    groups = [make_group([*begin, last], [[5], [6, 7]], [1.0, 0.0]) for last in (40, 41)]
    (part,) = packed(chosen(groups))
    assert part.num_shared == 0
    (alone,) = packed(chosen(groups[:1]))
    assert alone.num_shared == 0
