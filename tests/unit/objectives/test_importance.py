"""The weights of the importance correction, against plain loops and enumerated policies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.objectives.importance import (
    ImportanceWeights,
    WeightLevel,
    WeightMode,
    effective_sample_share,
    importance_weights,
)
from headrace.objectives.losses import masked_log_ratio, ppo_clip
from headrace.objectives.segments import Segments

LARGE = 1e6
"""A bound that nothing here reaches."""

# Probabilities that learner and generator give the first of two tokens, and the second one after
# each first one.
LEARNER = ((0.7, 0.2, 0.1), ((0.5, 0.3, 0.2), (0.1, 0.1, 0.8), (0.3, 0.3, 0.4)))
GENERATOR = ((0.5, 0.3, 0.2), ((0.6, 0.2, 0.2), (0.4, 0.4, 0.2), (0.3, 0.3, 0.4)))

logprob = st.floats(-60.0, 0.0)


def literal_tis(proximal: float, generator: float, bound: float) -> float:
    difference = proximal - generator
    difference = min(difference, 20.0)
    difference = max(difference, -20.0)
    return min(math.exp(difference), bound)


def tis(
    proximal: Tensor, generator: Tensor, *, loss_mask: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    """Return the weights of level ``token`` and mode ``truncate``, and where they were altered."""
    flat = loss_mask.flatten()
    segments = Segments(index=torch.zeros_like(flat, dtype=torch.int64), count=1, loss_mask=flat)
    found = importance_weights(
        (proximal - generator).flatten(),
        segments=segments,
        level="token",
        mode="truncate",
        low=0.0,
        high=bound,
    )
    shape = proximal.shape
    assert torch.equal(found.kept, flat), "truncation takes nothing out"
    return found.weights.view(shape), found.altered.view(shape)


def everywhere(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


@settings(deadline=None)
@given(
    tokens=st.lists(st.tuples(logprob, logprob), min_size=1, max_size=20),
    bound=st.floats(1e-3, 1e9),
)
def test_tis_is_the_literal_formula(tokens: list[tuple[float, float]], bound: float) -> None:
    proximal, generator = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    weights, truncated = tis(proximal, generator, loss_mask=everywhere(proximal), bound=bound)

    expected = [literal_tis(p, mu, bound) for p, mu in tokens]
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert truncated.tolist() == [literal_tis(p, mu, math.inf) > bound for p, mu in tokens]


def test_a_token_that_the_learner_likes_more_counts_more_and_at_most_the_bound() -> None:
    ratio = torch.tensor([0.25, 1.0, 1.5, 2.0, 2.5])
    proximal = torch.full((5,), -3.0)
    weights, truncated = tis(
        proximal, proximal - ratio.log(), loss_mask=everywhere(ratio), bound=2.25
    )

    torch.testing.assert_close(weights, torch.tensor([0.25, 1.0, 1.5, 2.0, 2.25]))
    assert truncated.tolist() == [False, False, False, False, True]


def test_weights_and_their_squares_are_finite_however_far_apart_the_logprobs_are() -> None:
    far = torch.tensor([-500.0, -1.0, 0.0])
    weights, truncated = tis(far, far.flip(0), loss_mask=everywhere(far), bound=1e30)

    limits = [math.exp(-20.0), 1.0, math.exp(20.0)]
    assert weights.tolist() == pytest.approx(limits, rel=1e-6)
    assert weights.square().sum().isfinite()
    assert not truncated.any(), "the limit is not the bound"


def test_where_learner_and_generator_agree_every_weight_is_one_and_the_gradient_is_reinforces() -> (
    None
):
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -31.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.25])
    mask = everywhere(logprobs)
    weights, truncated = tis(logprobs, logprobs.detach(), loss_mask=mask, bound=2.0)
    ratio = masked_log_ratio(logprobs, logprobs, loss_mask=mask)
    objective, _ = ppo_clip(ratio, advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad((weights * objective).sum(), logprobs)

    assert torch.equal(weights, torch.ones(4))
    assert not truncated.any()
    assert torch.equal(gradient, advantages)


# --- enumerated -------------------------------------------------------------------------------


def sequences() -> list[tuple[int, int]]:
    return list(itertools.product(range(3), repeat=2))


def logprobs_of(policy: tuple[Sequence[float], Sequence[Sequence[float]]]) -> Tensor:
    """Return [9, 2]: the log-prob of each token of each sequence."""
    first, second = policy
    rows = [(first[one], second[one][two]) for one, two in sequences()]
    return torch.tensor(rows, dtype=torch.float64).log()


def test_the_generator_expects_every_weight_and_every_product_of_weights_to_be_one() -> None:
    proximal, generator = logprobs_of(LEARNER), logprobs_of(GENERATOR)
    weights, _ = tis(proximal, generator, loss_mask=everywhere(proximal), bound=LARGE)
    probability = generator.sum(dim=1).exp()

    assert (weights - 1.0).abs().max() > 0.3, "or it would prove nothing"
    assert (probability @ weights).tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    assert float(probability @ weights.prod(dim=1)) == pytest.approx(1.0, abs=1e-12)


def test_what_the_bound_takes_away_is_the_mass_above_it() -> None:
    proximal, generator = logprobs_of(LEARNER), logprobs_of(GENERATOR)
    weights, truncated = tis(proximal, generator, loss_mask=everywhere(proximal), bound=2.0)
    probability = generator.sum(dim=1).exp()

    # Of the first tokens none is above 2; of the second ones only that of 0.8 against 0.2, which
    # the generator reaches with 0.3 * 0.2: (4 - 2) * 0.06 is missing.
    assert (probability @ weights).tolist() == pytest.approx([1.0, 0.88], abs=1e-12)
    assert truncated.sum(dim=0).tolist() == [0, 1]


def test_weighted_the_generators_tokens_give_the_learners_own_policy_gradient() -> None:
    logits = torch.tensor(LEARNER[0], dtype=torch.float64).log().requires_grad_()
    generator = torch.tensor(GENERATOR[0], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, dim=-1)
    mask = everywhere(logprobs)

    def gradient(weights: Tensor) -> Tensor:
        ratio = masked_log_ratio(logprobs, logprobs, loss_mask=mask)
        objective, _ = ppo_clip(ratio, advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2)
        value = (generator.exp() * weights * objective).sum()
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    own = torch.autograd.grad((logprobs.exp() * advantages).sum(), logits, retain_graph=True)[0]
    weights, _ = tis(logprobs, generator, loss_mask=mask, bound=LARGE)
    torch.testing.assert_close(gradient(weights), own, atol=1e-12, rtol=0.0)
    unweighted = gradient(torch.ones_like(weights))
    assert (unweighted - own).abs().max() > 0.05, "the bias that the weights are there to take away"


def test_the_weighted_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 2, 1, 1])
    advantages = torch.tensor([1.0, -0.7, 0.3, 2.0], dtype=torch.float64)
    sampled = torch.rand(4, generator=generator, dtype=torch.float64) - 1.5
    proximal = torch.log_softmax(table.detach(), -1)[torch.arange(4), ids] - 0.05
    mask = everywhere(ids)

    def loss(table: Tensor) -> Tensor:
        logprobs = torch.log_softmax(table, -1)[torch.arange(4), ids]
        ratio = masked_log_ratio(logprobs, proximal, loss_mask=mask)
        objective, _ = ppo_clip(ratio, advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2)
        weights, _ = tis(proximal, sampled, loss_mask=mask, bound=1.2)
        return -(weights * objective).sum()

    assert torch.autograd.gradcheck(loss, (table,))


# --- constants and masks ----------------------------------------------------------------------


def test_weights_are_constants_to_the_gradient() -> None:
    logprobs = torch.tensor([-0.5, -1.0], requires_grad=True)
    generator = torch.tensor([-0.7, -0.8], requires_grad=True)
    weights, _ = tis(logprobs, generator, loss_mask=everywhere(logprobs), bound=2.0)

    assert not weights.requires_grad


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e9])
def test_what_masked_cells_hold_changes_no_bit_of_weight_and_gradient(garbage: float) -> None:
    mask = torch.tensor([True, False, True, False, True])

    def found(hole: float, other: float) -> tuple[Tensor, Tensor, Tensor]:
        clean = torch.tensor([-0.5, -0.1, -1.5, -0.2, -0.9])
        logprobs = torch.where(mask, clean, hole).requires_grad_()
        advantages = torch.where(mask, torch.tensor([1.0, 2.0, -1.0, 3.0, -1.0]), hole)
        generator = torch.where(mask, clean - torch.tensor([0.1, 0.0, 2.0, 0.0, -0.3]), other)
        weights, truncated = tis(logprobs, generator, loss_mask=mask, bound=2.0)
        ratio = masked_log_ratio(logprobs, logprobs, loss_mask=mask)
        objective, _ = ppo_clip(ratio, advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2)
        loss = -(weights * objective).sum()
        return weights, truncated, torch.autograd.grad(loss, logprobs)[0]

    weights, truncated, gradient = found(-0.3, -0.3)
    assert weights[~mask].tolist() == [0.0, 0.0]
    assert truncated.tolist() == [False, False, True, False, False]
    assert gradient.isfinite().all()
    for holes in ((garbage, -0.3), (-0.3, garbage), (garbage, garbage)):
        assert all(map(torch.equal, found(*holes), (weights, truncated, gradient)))


def test_where_nothing_is_trained_on_no_token_counts() -> None:
    nothing = torch.full((3,), math.nan)
    mask = torch.zeros(3, dtype=torch.bool)
    weights, truncated = tis(nothing, nothing, loss_mask=mask, bound=2.0)

    assert weights.tolist() == [0.0] * 3
    assert not truncated.any()


def test_a_trained_token_without_a_number_for_a_logprob_is_not_covered_up() -> None:
    generator = torch.tensor([-1.0, math.nan])
    weights, _ = tis(torch.full((2,), -1.0), generator, loss_mask=everywhere(generator), bound=2.0)

    assert weights.isnan().tolist() == [False, True]


# --- every level and mode -----------------------------------------------------------------------

LEVELS: tuple[WeightLevel, ...] = ("token", "sequence", "geometric")
MODES: tuple[WeightMode, ...] = ("truncate", "clip", "mask")
rollouts_of_gaps = st.lists(st.lists(st.floats(-9.0, 9.0), max_size=6), min_size=1, max_size=5)


def flat_gaps(rollouts: Sequence[Sequence[float]]) -> tuple[Tensor, Segments]:
    """Pack rollouts with a cell outside the mask, that holds garbage, after each of them."""
    cells = [cell for gaps in rollouts for cell in (*gaps, math.nan)]
    index = [row for row, gaps in enumerate(rollouts) for _ in (*gaps, None)]
    mask = [flag for gaps in rollouts for flag in (*[True] * len(gaps), False)]
    segments = Segments(
        index=torch.tensor(index), count=len(rollouts), loss_mask=torch.tensor(mask)
    )
    return torch.tensor(cells, dtype=torch.float64), segments


def literal_weight(
    gaps: Sequence[float], t: int, level: WeightLevel, mode: WeightMode, low: float, high: float
) -> float:
    exponent = {"token": gaps[t], "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}[level]
    weight = math.exp(max(-20.0, min(20.0, exponent)))
    if mode == "truncate":
        return min(weight, high)
    if mode == "clip":
        return max(low, min(weight, high))
    return weight if low <= weight <= high else 0.0


def weights_of(
    rollouts: Sequence[Sequence[float]],
    level: WeightLevel,
    mode: WeightMode,
    low: float = 0.5,
    high: float = 2.0,
) -> ImportanceWeights:
    gaps, segments = flat_gaps(rollouts)
    return importance_weights(gaps, segments=segments, level=level, mode=mode, low=low, high=high)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(rollouts=rollouts_of_gaps, low=st.floats(0.01, 1.0), high=st.floats(1.0, 50.0))
def test_every_level_and_mode_is_the_literal_formula(
    level: WeightLevel,
    mode: WeightMode,
    rollouts: list[list[float]],
    low: float,
    high: float,
) -> None:
    expected = [
        weight
        for gaps in rollouts
        for weight in (
            *(literal_weight(gaps, t, level, mode, low, high) for t in range(len(gaps))),
            0.0,
        )
    ]
    found = weights_of(rollouts, level, mode, low, high)
    assert found.weights.tolist() == pytest.approx(expected, rel=1e-9)
    _, segments = flat_gaps(rollouts)
    if mode == "mask":
        assert torch.equal(found.kept, found.weights > 0)
    else:
        assert torch.equal(found.kept, segments.loss_mask)


@settings(deadline=None)
@given(rollouts=rollouts_of_gaps)
def test_a_sequence_weight_is_the_product_of_its_tokens_and_the_geometric_its_root(
    rollouts: list[list[float]],
) -> None:
    small = [[gap / 10 for gap in gaps] for gaps in rollouts]
    found = {
        level: weights_of(small, level, "truncate", high=1e8).weights.tolist() for level in LEVELS
    }
    start = 0
    for gaps in rollouts:
        cells = slice(start, start + len(gaps))
        start += len(gaps) + 1
        for whole, root in zip(found["sequence"][cells], found["geometric"][cells], strict=True):
            assert whole == pytest.approx(math.prod(found["token"][cells]))
            assert root ** len(gaps) == pytest.approx(whole)


@settings(deadline=None)
@given(rollouts=rollouts_of_gaps)
def test_masked_sequence_weights_are_the_truncated_ones_of_rollouts_in_bounds(
    rollouts: list[list[float]],
) -> None:
    masked = weights_of(rollouts, "sequence", "mask")
    truncated = weights_of(rollouts, "sequence", "truncate")
    raw = weights_of(rollouts, "sequence", "truncate", high=1e9).weights
    in_bounds = (raw >= 0.5) & (raw <= 2.0)
    assert torch.equal(masked.weights, truncated.weights * in_bounds)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_where_both_agree_every_weight_is_one(level: WeightLevel, mode: WeightMode) -> None:
    found = weights_of([[0.0] * 5, [0.0], []], level, mode)
    _, segments = flat_gaps([[0.0] * 5, [0.0], []])
    assert torch.equal(found.weights, segments.loss_mask.to(torch.float64))
    assert not found.altered.any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_a_gap_that_is_no_number_is_covered_up_by_no_bound(
    level: WeightLevel, mode: WeightMode
) -> None:
    found = weights_of([[0.1, math.nan], [0.2]], level, mode)
    assert found.weights[1].isnan()
    assert found.weights[3].isfinite()


def test_trls_sequence_mask_is_the_level_sequence_with_a_mask_above_three() -> None:
    # TRL 1.16, GRPOTrainer with vllm_importance_sampling_mode="sequence_mask": exp of the summed
    # difference, and 0 above vllm_importance_sampling_clip_max = 3.
    rollouts = [[0.3, 0.4, -0.1], [0.9, 0.9], [-2.0, -3.0], [1.0986]]
    expected = []
    for gaps in rollouts:
        ratio = math.exp(sum(gaps))
        expected += [0.0 if ratio > 3.0 else ratio] * len(gaps) + [0.0]
    found = weights_of(rollouts, "sequence", "mask", low=0.0, high=3.0)
    assert found.weights.tolist() == pytest.approx(expected)


# --- effective sample size --------------------------------------------------------------------


@given(st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=20), st.floats(0.1, 10.0))
def test_the_effective_share_is_that_of_the_literal_formula_at_any_scale(
    weights: list[float], scale: float
) -> None:
    mean = sum(weights) / len(weights)
    literal = 1 / (sum((weight / mean) ** 2 for weight in weights) / len(weights))
    scaled = [scale * weight for weight in weights]
    found = effective_sample_share(sum(scaled), sum(w * w for w in scaled), len(scaled))

    assert found == pytest.approx(literal)
    assert 1 / len(weights) - 1e-9 <= found <= 1 + 1e-9


def test_equal_weights_are_all_effective_and_a_lone_one_is_one_of_its_number() -> None:
    assert effective_sample_share(8.0, 16.0, 4.0) == 1.0
    assert effective_sample_share(2.0, 4.0, 4.0) == 0.25
