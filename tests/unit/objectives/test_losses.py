from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.objectives.aggregation import Aggregation, aggregate_loss, aggregation_weights
from headrace.objectives.kl import k2, k3
from headrace.objectives.losses import masked_log_ratio, ppo_clip

AGGREGATIONS: tuple[Aggregation, ...] = ("token", "sequence", "constant")
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)
finite = st.floats(-2.0, 2.0)


def literal_ppo_clip(log_ratio: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(log_ratio)
    bounded = min(max(ratio, 1 - low), 1 + high)
    return min(ratio * advantage, bounded * advantage)


@settings(deadline=None)
@given(
    tokens=st.lists(st.tuples(finite, finite), min_size=1, max_size=20),
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 2.0),
)
def test_ppo_clip_is_the_literal_formula_and_clipped_tokens_have_no_gradient(
    tokens: list[tuple[float, float]], low: float, high: float
) -> None:
    log_ratio, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    log_ratio.requires_grad_()
    mask = torch.ones(len(tokens), dtype=torch.bool)
    objective, clipped = ppo_clip(
        log_ratio, advantages, loss_mask=mask, clip_low=low, clip_high=high
    )
    expected = [literal_ppo_clip(ratio, adv, low, high) for ratio, adv in tokens]
    assert objective.tolist() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(objective.sum(), log_ratio)
    live = log_ratio.detach().exp() * advantages
    torch.testing.assert_close(gradient, torch.where(clipped, 0.0, live))


def test_asymmetric_bounds_mean_what_they_say() -> None:
    log_ratio = torch.tensor([1.25, 1.35, 0.75, 0.65, 9.0, 0.1]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    mask = torch.ones(6, dtype=torch.bool)
    objective, clipped = ppo_clip(
        log_ratio, advantages, loss_mask=mask, clip_low=0.3, clip_high=0.3
    )
    assert clipped.tolist() == [False, True, False, True, False, False]
    torch.testing.assert_close(objective, torch.tensor([1.25, 1.3, -0.75, -0.7, -9.0, 0.1]))


def test_an_overflowing_ratio_that_is_clipped_or_worth_nothing_has_a_gradient_of_zero() -> None:
    log_ratio = torch.tensor([200.0, 200.0], requires_grad=True)
    objective, clipped = ppo_clip(
        log_ratio,
        torch.tensor([1.0, 0.0]),
        loss_mask=torch.tensor([True, True]),
        clip_low=0.2,
        clip_high=0.2,
    )
    objective.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [0.0, 0.0]
    assert clipped.tolist() == [True, False]
    assert objective.tolist() == pytest.approx([1.2, 0.0])


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    mask = torch.ones(3, dtype=torch.bool)
    ratio = masked_log_ratio(logprobs, logprobs, loss_mask=mask)
    objective, clipped = ppo_clip(ratio, advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(objective.sum(), logprobs)
    assert torch.equal(gradient, advantages)
    assert not clipped.any()


@every_aggregation
def test_weights_are_those_of_the_literal_average(aggregation: Aggregation) -> None:
    values = [[3.0], [1.0] * 9, [], [2.0, 4.0]]
    weights = aggregation_weights(
        [len(row) for row in values], aggregation=aggregation, max_tokens=16
    )
    found = sum(weight * sum(row) for weight, row in zip(weights, values, strict=True))
    rows = [row for row in values if row]
    expected = {
        "token": sum(map(sum, rows)) / sum(map(len, rows)),
        "sequence": sum(sum(row) / len(row) for row in rows) / len(rows),
        "constant": sum(map(sum, rows)) / (len(rows) * 16),
    }
    assert found == pytest.approx(expected[aggregation])


def test_lengths_one_and_nine_average_to_one_point_two_over_tokens() -> None:
    objective = -torch.tensor([3.0] + [1.0] * 9)
    index = torch.tensor([0] + [1] * 9)
    weights = torch.tensor(aggregation_weights([1, 9], aggregation="token", max_tokens=9))
    for pieces in ([slice(0, 10)], [slice(0, 1), slice(1, 10)], [slice(0, 4), slice(4, 10)]):
        loss = sum(
            aggregate_loss(
                objective[piece],
                weights=weights,
                rollout_index=index[piece],
                loss_mask=torch.ones_like(index[piece], dtype=torch.bool),
            ).item()
            for piece in pieces
        )
        assert loss == pytest.approx(1.2)


class TabularPolicy:
    """Softmax over 3 tokens at each of 4 positions, and a loss over rollouts sampled from it."""

    lengths = (1, 4, 3, 0, 2)

    def __init__(self, aggregation: Aggregation) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        self.index = torch.repeat_interleave(torch.arange(5), torch.tensor(self.lengths))
        self.position = torch.cat([torch.arange(length) for length in self.lengths])
        count = len(self.index)
        self.ids = torch.randint(0, 3, (count,), generator=generator)
        self.old = torch.rand(count, generator=generator, dtype=torch.float64) - 1.5
        self.advantages = torch.tensor([1.0, -0.7, 0.0, 9.0, 0.4], dtype=torch.float64)[self.index]
        weights = aggregation_weights(self.lengths, aggregation=aggregation, max_tokens=4)
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def loss(self, table: Tensor, rows: list[int]) -> Tensor:
        """The loss of one micro-batch; ``rows`` in the order in which they were packed."""
        tokens = torch.cat([(self.index == row).nonzero().squeeze(-1) for row in rows])
        logprobs = torch.log_softmax(table, -1)[self.position[tokens], self.ids[tokens]]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        ratio = masked_log_ratio(logprobs, self.old[tokens], loss_mask=mask)
        objective, _ = ppo_clip(
            ratio, self.advantages[tokens], loss_mask=mask, clip_low=0.2, clip_high=0.2
        )
        return aggregate_loss(
            objective - 0.1 * k3(logprobs, self.old[tokens], loss_mask=mask),
            weights=self.weights,
            rollout_index=self.index[tokens],
            loss_mask=mask,
        )

    def gradient(self, split: list[list[int]]) -> Tensor:
        table = self.table.clone().requires_grad_()
        for rows in split:
            self.loss(table, rows).backward()
        assert table.grad is not None
        return table.grad


@every_aggregation
@settings(deadline=None)
@given(order=st.permutations(range(5)), cuts=st.sets(st.integers(1, 4)))
def test_every_split_and_packing_gives_the_same_gradient(
    aggregation: Aggregation, order: list[int], cuts: set[int]
) -> None:
    policy = TabularPolicy(aggregation)
    edges = [0, *sorted(cuts), 5]
    split = [order[start:end] for start, end in itertools.pairwise(edges)]
    whole = policy.gradient([list(range(5))])
    torch.testing.assert_close(policy.gradient(split), whole, atol=1e-12, rtol=1e-9)


@every_aggregation
def test_leaving_out_a_rollout_of_advantage_zero_changes_no_policy_gradient(
    aggregation: Aggregation,
) -> None:
    policy = TabularPolicy(aggregation)
    table = policy.table.clone().requires_grad_()
    mask = torch.ones_like(policy.ids, dtype=torch.bool)
    logprobs = torch.log_softmax(table, -1)[policy.position, policy.ids]
    ratio = masked_log_ratio(logprobs, policy.old, loss_mask=mask)
    objective, _ = ppo_clip(ratio, policy.advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2)

    def gradient(keep: Tensor) -> Tensor:
        loss = aggregate_loss(
            objective[keep],
            weights=policy.weights,
            rollout_index=policy.index[keep],
            loss_mask=mask[keep],
        )
        return torch.autograd.grad(loss, table, retain_graph=True)[0]

    torch.testing.assert_close(gradient(policy.advantages != 0), gradient(mask))


@every_aggregation
def test_the_gradient_equals_finite_differences(aggregation: Aggregation) -> None:
    policy = TabularPolicy(aggregation)
    table = policy.table.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda value: policy.loss(value, [0, 1, 2, 3, 4]), (table,))


@every_aggregation
@pytest.mark.parametrize("garbage", [math.nan, -1e9, math.inf])
def test_what_masked_cells_hold_changes_no_bit_of_loss_and_gradient(
    aggregation: Aggregation, garbage: float
) -> None:
    mask = torch.tensor([True, False, True, False, True])
    index = torch.tensor([0, 0, 1, 1, 1])
    weights = torch.tensor(aggregation_weights([1, 2], aggregation=aggregation, max_tokens=4))

    def loss_and_gradient(hole: float) -> tuple[Tensor, Tensor]:
        clean = torch.tensor([-0.5, -0.1, -1.5, -0.2, -0.9])
        logprobs = torch.where(mask, clean, hole).requires_grad_()
        old = torch.where(mask, clean - 0.1, hole)
        advantages = torch.where(mask, torch.tensor([1.0, 2.0, -1.0, 3.0, -1.0]), hole)
        ratio = masked_log_ratio(logprobs, old, loss_mask=mask)
        objective, _ = ppo_clip(ratio, advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2)
        penalty = k2(logprobs, old, loss_mask=mask) + k3(logprobs, old, loss_mask=mask)
        loss = aggregate_loss(
            objective - penalty, weights=weights, rollout_index=index, loss_mask=mask
        )
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]

    loss, gradient = loss_and_gradient(-0.3)
    found_loss, found_gradient = loss_and_gradient(garbage)
    assert torch.equal(found_loss, loss)
    assert torch.equal(found_gradient, gradient)
    assert loss.isfinite()
    assert not gradient[~mask].any()


@every_aggregation
def test_a_batch_that_is_masked_altogether_has_loss_and_gradient_zero(
    aggregation: Aggregation,
) -> None:
    weights = aggregation_weights([0, 0], aggregation=aggregation, max_tokens=4)
    assert weights == [0.0, 0.0]
    assert aggregation_weights([], aggregation=aggregation, max_tokens=4) == []
    logprobs = torch.full((3,), math.nan, requires_grad=True)
    mask = torch.zeros(3, dtype=torch.bool)
    ratio = masked_log_ratio(logprobs, logprobs, loss_mask=mask)
    objective, clipped = ppo_clip(ratio, logprobs, loss_mask=mask, clip_low=0.2, clip_high=0.2)
    loss = aggregate_loss(
        objective,
        weights=torch.tensor(weights),
        rollout_index=torch.tensor([0, 0, 1]),
        loss_mask=mask,
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0] * 3
    assert not clipped.any()
