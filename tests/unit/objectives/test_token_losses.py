"""Every token and sequence objective against a plain loop over its paper's formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.objectives.losses import cispo, dppo_tv, masked_log_ratio, ppo_clip, reinforce, sapo
from headrace.objectives.segments import Segments
from headrace.objectives.sequence_losses import gmpo, gspo


@dataclass(frozen=True)
class Token:
    q: float
    p: float
    advantage: float


Rollout = Sequence[Token]
Objective = Callable[[Tensor, Tensor, Tensor, Segments], tuple[Tensor, Tensor]]
"""q, p, advantages and segments -> objective and clipped."""


def ratio(token: Token) -> float:
    return math.exp(token.q - token.p)


def bounded(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def literal_dual_clip(rollout: Rollout, t: int) -> float:
    token = rollout[t]
    value = min(ratio(token) * token.advantage, bounded(ratio(token), 0.8, 1.28) * token.advantage)
    return max(value, 3.0 * token.advantage) if token.advantage < 0 else value


def literal_ppo(rollout: Rollout, t: int) -> float:
    token = rollout[t]
    return min(ratio(token) * token.advantage, bounded(ratio(token), 0.8, 1.28) * token.advantage)


def literal_reinforce(rollout: Rollout, t: int) -> float:
    return rollout[t].q * rollout[t].advantage


def literal_cispo(rollout: Rollout, t: int) -> float:
    token = rollout[t]
    return bounded(ratio(token), 0.5, 2.0) * token.advantage * token.q


def literal_sapo(rollout: Rollout, t: int) -> float:
    token = rollout[t]
    tau = 1.0 if token.advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio(token) - 1)))
    return 4 / tau * gate * token.advantage


def literal_dppo(rollout: Rollout, t: int) -> float:
    token = rollout[t]
    moved = math.exp(token.q) - math.exp(token.p)
    beyond = moved > 0.2 if token.advantage > 0 else moved < -0.2
    kept = 0.0 if beyond else token.advantage * ratio(token)
    return kept - 1e-3 * (token.q - token.p) ** 2


def literal_gspo(rollout: Rollout, t: int) -> float:
    s = math.exp(sum(token.q - token.p for token in rollout) / len(rollout))
    advantage = rollout[t].advantage
    return min(s * advantage, bounded(s, 0.9, 1.2) * advantage)


def literal_gmpo(rollout: Rollout, t: int) -> float:
    advantage = rollout[t].advantage
    sign = math.copysign(1.0, advantage)
    product = 1.0
    for token in rollout:
        clipped = bounded(ratio(token), math.exp(-0.4), math.exp(0.3))
        # The paper raises to the sign, so that the smaller one is the more cautious one.
        product *= min(ratio(token) ** sign, clipped**sign)
    return product ** (sign / len(rollout)) * advantage


def token_level(function: Callable[..., tuple[Tensor, Tensor]], **options: float) -> Objective:
    def objective(q: Tensor, p: Tensor, a: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        mask = segments.loss_mask
        return function(masked_log_ratio(q, p, loss_mask=mask), a, loss_mask=mask, **options)

    return objective


def sequence_level(function: Callable[..., tuple[Tensor, Tensor]], **options: object) -> Objective:
    def objective(q: Tensor, p: Tensor, a: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        log_ratio = masked_log_ratio(q, p, loss_mask=segments.loss_mask)
        return function(log_ratio, a, segments=segments, **options)

    return objective


def of_reinforce(q: Tensor, p: Tensor, a: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    del p
    return reinforce(q, a, loss_mask=segments.loss_mask)


def of_cispo(q: Tensor, p: Tensor, a: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    mask = segments.loss_mask
    log_ratio = masked_log_ratio(q, p, loss_mask=mask)
    return cispo(q, log_ratio, a, loss_mask=mask, min_ratio=0.5, max_ratio=2.0)


def of_dppo(q: Tensor, p: Tensor, a: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    return dppo_tv(q, p, a, loss_mask=segments.loss_mask, delta=0.2, anchor=1e-3)


CASES: dict[str, tuple[Objective, Callable[[Rollout, int], float]]] = {
    "ppo_clip": (token_level(ppo_clip, clip_low=0.2, clip_high=0.28), literal_ppo),
    "dual_clip": (
        token_level(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        literal_dual_clip,
    ),
    "reinforce": (of_reinforce, literal_reinforce),
    "cispo": (of_cispo, literal_cispo),
    "sapo": (token_level(sapo, tau_positive=1.0, tau_negative=1.05), literal_sapo),
    "dppo_tv": (of_dppo, literal_dppo),
    "gspo": (
        sequence_level(gspo, clip_low=0.1, clip_high=0.2, level="sequence"),
        literal_gspo,
    ),
    "gspo_token": (sequence_level(gspo, clip_low=0.1, clip_high=0.2, level="token"), literal_gspo),
    "gmpo": (sequence_level(gmpo, clip_low=0.4, clip_high=0.3), literal_gmpo),
}
every_objective = pytest.mark.parametrize("name", CASES)

logprob = st.floats(-4.0, -0.01)
rollouts = st.lists(
    st.tuples(
        st.sampled_from([-2.0, -0.5, 0.0, 0.7, 1.0]),
        st.lists(st.tuples(logprob, logprob), max_size=5),
    ),
    min_size=1,
    max_size=5,
)
Batch = list[tuple[float, list[tuple[float, float]]]]


def packed(
    batch: Batch, hole: float = math.nan, order: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Segments]:
    """Pack with a cell outside the mask, that holds ``hole``, before each rollout."""
    q, p, a, index, mask = [], [], [], [], []
    for row in order if order is not None else range(len(batch)):
        advantage, tokens = batch[row]
        for values in ((hole, hole, hole, False), *((x, y, advantage, True) for x, y in tokens)):
            for column, value in zip((q, p, a, mask), values, strict=True):
                column.append(value)
            index.append(row)
    segments = Segments(index=torch.tensor(index), count=len(batch), loss_mask=torch.tensor(mask))
    double = [torch.tensor(column, dtype=torch.float64) for column in (q, p, a)]
    return double[0].requires_grad_(), double[1], double[2], segments


@every_objective
@settings(deadline=None)
@given(batch=rollouts)
def test_every_objective_is_its_literal_formula_whatever_masked_cells_hold(
    name: str, batch: Batch
) -> None:
    objective, literal = CASES[name]
    q, p, a, segments = packed(batch)
    found, clipped = objective(q, p, a, segments)
    expected = []
    for advantage, tokens in batch:
        rollout = [Token(x, y, advantage) for x, y in tokens]
        expected += [0.0, *(literal(rollout, t) for t in range(len(rollout)))]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert not clipped[~segments.loss_mask].any()


@every_objective
@settings(deadline=None)
@given(batch=rollouts, hole=st.sampled_from([math.nan, math.inf, -1e9]))
def test_masked_cells_change_no_bit_of_value_and_gradient(
    name: str, batch: Batch, hole: float
) -> None:
    objective, _ = CASES[name]
    outcomes = []
    for value in (-0.5, hole):
        q, p, a, segments = packed(batch, value)
        found, clipped = objective(q, p, a, segments)
        (gradient,) = torch.autograd.grad(found.sum(), q)
        outcomes.append((found, clipped, gradient))
        assert gradient[~segments.loss_mask].tolist() == [0.0] * len(batch)
    assert all(map(torch.equal, *outcomes))


@every_objective
@settings(deadline=None)
@given(batch=rollouts, data=st.data())
def test_no_order_of_the_rollouts_changes_what_a_token_has(
    name: str, batch: Batch, data: st.DataObject
) -> None:
    objective, _ = CASES[name]
    order = data.draw(st.permutations(range(len(batch))))
    q, p, a, segments = packed(batch)
    plain, _ = objective(q, p, a, segments)
    *moved, moved_segments = packed(batch, order=order)
    found, _ = objective(*moved, moved_segments)
    for row in range(len(batch)):
        torch.testing.assert_close(
            found[moved_segments.index == row], plain[segments.index == row], rtol=1e-12, atol=0.0
        )


@every_objective
def test_on_policy_the_gradient_is_that_of_reinforce(name: str) -> None:
    objective, _ = CASES[name]
    batch: Batch = [(1.5, [(-0.5, -0.5), (-2.0, -2.0)]), (-0.7, [(-1.0, -1.0)]), (0.0, [(-1, -1)])]
    q, p, a, segments = packed(batch)
    found, clipped = objective(q, p, a, segments)
    # A mean over each rollout's tokens, for which sequence objectives are meant.
    (gradient,) = torch.autograd.grad(segments.mean(found).sum(), q)
    advantages = torch.where(segments.loss_mask, a, 0.0)
    torch.testing.assert_close(gradient, advantages / segments.spread(segments.lengths.clamp(1)))
    assert not clipped.any()


@every_objective
def test_the_gradient_equals_finite_differences_on_a_tabular_policy(name: str) -> None:
    objective, _ = CASES[name]
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    position = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3])
    ids = torch.randint(0, 3, (8,), generator=generator)
    advantages = torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64)[index]
    base = torch.log_softmax(table.detach(), -1)[position, ids]
    # Small gaps, so that no token lies at the edge of a clip.
    sampled = base + 0.05 * torch.randn(8, generator=generator, dtype=torch.float64)
    segments = Segments(index=index, count=3, loss_mask=torch.ones(8, dtype=torch.bool))
    frozen = name in {"reinforce", "cispo", "gspo_token"}

    def value(table: Tensor) -> Tensor:
        q = torch.log_softmax(table, -1)[position, ids]
        found, _ = objective(q, sampled, advantages, segments)
        return segments.mean(found).sum()

    if not frozen:
        assert torch.autograd.gradcheck(value, (table,))
        return
    # These hold a part constant: what is differentiated is the weight times A q.
    q = torch.log_softmax(table, -1)[position, ids]
    gaps = q.detach() - sampled
    weight = {
        "reinforce": torch.ones(8, dtype=torch.float64),
        "cispo": gaps.exp().clamp(0.5, 2.0),
        "gspo_token": segments.spread(segments.mean(gaps)).exp(),
    }[name]

    def held(table: Tensor) -> Tensor:
        q = torch.log_softmax(table, -1)[position, ids]
        return segments.mean(weight * advantages * q).sum()

    assert torch.autograd.gradcheck(held, (table,))
    (found,) = torch.autograd.grad(value(table), table)
    (expected,) = torch.autograd.grad(held(table), table)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [name for name in CASES if name not in {"reinforce", "cispo"}])
def test_ratios_that_overflow_leave_no_gradient_that_is_no_number(name: str) -> None:
    objective, _ = CASES[name]
    # Far too likely in a good rollout, far too unlikely in a bad one, and both in one of A = 0.
    batch: Batch = [
        (1.0, [(0.0, -2000.0)]),
        (-1.0, [(-2000.0, 0.0)]),
        (0.0, [(0.0, -2000.0), (-2000.0, 0.0)]),
    ]
    q, p, a, segments = packed(batch)
    found, _ = objective(q, p, a, segments)
    (gradient,) = torch.autograd.grad(found.sum(), q)
    assert gradient.isfinite().all()


def test_both_levels_of_gspo_have_one_gradient_where_a_rollouts_tokens_have_one_advantage() -> None:
    batch: Batch = [(1.0, [(-0.5, -0.6), (-1.0, -0.9)]), (-1.0, [(-2.0, -2.05), (-0.3, -0.2)])]
    gradients = []
    for name in ("gspo", "gspo_token"):
        q, p, a, segments = packed(batch)
        found, _ = CASES[name][0](q, p, a, segments)
        gradients.append(torch.autograd.grad(found.sum(), q)[0])
    torch.testing.assert_close(*gradients)


def test_dual_clip_ends_the_pull_of_a_bad_token_that_became_likely() -> None:
    log_ratio = torch.tensor([2.0, 3.5, 3.5, 0.5]).log().requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    mask = torch.ones(4, dtype=torch.bool)
    found, clipped = ppo_clip(
        log_ratio, advantages, loss_mask=mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    found.sum().backward()
    assert log_ratio.grad is not None
    assert found.tolist() == pytest.approx([-2.0, -3.0, 1.2, -0.8])
    assert clipped.tolist() == [False, True, True, True]
    assert log_ratio.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, 0.0])


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    q = torch.tensor([-0.1, -3.0], requires_grad=True)
    p = torch.tensor([-3.0, -0.1])
    mask = torch.ones(2, dtype=torch.bool)
    log_ratio = masked_log_ratio(q, p, loss_mask=mask)
    found, clipped = cispo(
        q, log_ratio, torch.ones(2), loss_mask=mask, min_ratio=0.25, max_ratio=4.0
    )
    (gradient,) = torch.autograd.grad(found.sum(), q)
    assert clipped.tolist() == [True, True]
    assert gradient.tolist() == [4.0, 0.25]


def test_sapos_gate_has_slope_one_on_policy_and_fades_on_both_sides() -> None:
    log_ratio = torch.tensor([0.0, 1.5, -3.0], dtype=torch.float64, requires_grad=True)
    found, _ = sapo(
        log_ratio,
        torch.ones(3, dtype=torch.float64),
        loss_mask=torch.ones(3, dtype=torch.bool),
        tau_positive=2.0,
        tau_negative=1.0,
    )
    (gradient,) = torch.autograd.grad(found.sum(), log_ratio)
    slopes = (gradient / log_ratio.detach().exp()).tolist()
    assert slopes[0] == pytest.approx(1.0)
    assert 0.0 < slopes[1] < 0.05
    assert 0.0 < slopes[2] < 0.5
