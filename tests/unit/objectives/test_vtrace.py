"""V-trace and GAE against slow literal transcriptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.objectives.segments import Segments
from headrace.objectives.vtrace import VTrace, gae, vtrace

number = st.floats(-2.0, 2.0)


@dataclass(frozen=True)
class Step:
    log_weight: float
    reward: float
    value: float
    discount: float


steps = st.builds(Step, number, number, number, st.floats(0.0, 1.0))
Rows = list[tuple[list[Step], float]]
"""Steps of each rollout, and the value after the last of them."""
batches: st.SearchStrategy[Rows] = st.lists(
    st.tuples(st.lists(steps, max_size=6), number), min_size=1, max_size=4
)


def packed(rows: Rows) -> tuple[dict[str, Tensor], Tensor, Segments]:
    """Pack the rollouts' tokens in turns, with cells outside the mask that hold no number."""
    cells: list[tuple[int, Step | None]] = []
    for place in range(max(len(own) for own, _ in rows)):
        for row, (own, _) in enumerate(rows):
            if place < len(own):
                cells += [(row, None), (row, own[place])]
    cells.append((0, None))
    segments = Segments(
        index=torch.tensor([row for row, _ in cells]),
        count=len(rows),
        loss_mask=torch.tensor([step is not None for _, step in cells]),
    )
    columns = {
        name: torch.tensor(
            [math.nan if step is None else getattr(step, name) for _, step in cells],
            dtype=torch.float64,
        )
        for name in ("log_weight", "reward", "value", "discount")
    }
    return columns, torch.tensor([last for _, last in rows], dtype=torch.float64), segments


def run_vtrace(rows: Rows, **bounds: float) -> tuple[VTrace, Segments]:
    columns, bootstrap, segments = packed(rows)
    found = vtrace(
        columns["log_weight"],
        columns["reward"],
        columns["value"],
        bootstrap=bootstrap,
        discounts=columns["discount"],
        segments=segments,
        **bounds,
    )
    return found, segments


def literal_vtrace(
    own: Sequence[Step], bootstrap: float, rho_bar: float, c_bar: float, rho_pg_bar: float
) -> tuple[list[float], list[float]]:
    """Equation 1 of the paper as it stands: a sum of products, not a recursion."""
    values = [step.value for step in own] + [bootstrap]
    weights = [math.exp(step.log_weight) for step in own]
    targets = []
    for s in range(len(own)):
        target = values[s]
        for t in range(s, len(own)):
            factor = 1.0
            for i in range(s, t):
                factor *= own[i].discount * min(c_bar, weights[i])
            delta = own[t].reward + own[t].discount * values[t + 1] - values[t]
            target += factor * min(rho_bar, weights[t]) * delta
        targets.append(target)
    later = [*targets[1:], bootstrap]
    advantages = [
        min(rho_pg_bar, weights[s]) * (own[s].reward + own[s].discount * later[s] - values[s])
        for s in range(len(own))
    ]
    return targets, advantages


@settings(deadline=None)
@given(rows=batches, bars=st.tuples(*[st.floats(0.1, 3.0)] * 3))
def test_vtrace_is_the_papers_sum_of_products(rows: Rows, bars: tuple[float, float, float]) -> None:
    found, segments = run_vtrace(rows, rho_bar=bars[0], c_bar=bars[1], rho_pg_bar=bars[2])
    for row, (own, bootstrap) in enumerate(rows):
        targets, advantages = literal_vtrace(own, bootstrap, *bars)
        cells = (segments.index == row) & segments.loss_mask
        assert found.targets[cells].tolist() == pytest.approx(targets, rel=1e-9, abs=1e-9)
        assert found.advantages[cells].tolist() == pytest.approx(advantages, rel=1e-9, abs=1e-9)
    assert not found.targets[~segments.loss_mask].any()
    assert not found.advantages[~segments.loss_mask].any()


@settings(deadline=None)
@given(rows=batches)
def test_on_policy_the_targets_are_the_n_step_returns(rows: Rows) -> None:
    on_policy = [
        ([Step(0.0, s.reward, s.value, s.discount) for s in own], last) for own, last in rows
    ]
    found, segments = run_vtrace(on_policy)
    for row, (own, bootstrap) in enumerate(on_policy):
        returns, running = [], bootstrap
        for step in reversed(own):
            running = step.reward + step.discount * running
            returns.insert(0, running)
        cells = (segments.index == row) & segments.loss_mask
        assert found.targets[cells].tolist() == pytest.approx(returns, abs=1e-9)


@settings(deadline=None)
@given(rows=batches)
def test_with_rho_bar_towards_zero_the_values_stay_as_they_are(rows: Rows) -> None:
    found, segments = run_vtrace(rows, rho_bar=1e-12)
    for row, (own, _) in enumerate(rows):
        cells = (segments.index == row) & segments.loss_mask
        assert found.targets[cells].tolist() == pytest.approx([s.value for s in own], abs=1e-9)


def test_targets_and_advantages_are_constants_to_the_gradient() -> None:
    values = torch.zeros(2, requires_grad=True)
    segments = Segments(
        index=torch.zeros(2, dtype=torch.int64), count=1, loss_mask=torch.tensor([True, True])
    )
    shared = {"bootstrap": torch.zeros(1), "segments": segments}
    found = vtrace(values, values, values, discounts=torch.ones(2), **shared)
    assert not found.targets.requires_grad
    assert not found.advantages.requires_grad
    assert not gae(values, values, gamma=1.0, lambda_=1.0, **shared).requires_grad


def run_gae(rows: Rows, gamma: float, lambda_: float) -> tuple[Tensor, Segments]:
    columns, bootstrap, segments = packed(rows)
    found = gae(
        columns["reward"],
        columns["value"],
        bootstrap=bootstrap,
        segments=segments,
        gamma=gamma,
        lambda_=lambda_,
    )
    return found, segments


@settings(deadline=None)
@given(rows=batches, gamma=st.floats(0.0, 1.0), lambda_=st.floats(0.0, 1.0))
def test_gae_is_the_literal_sum_over_action_tokens_alone(
    rows: Rows, gamma: float, lambda_: float
) -> None:
    found, segments = run_gae(rows, gamma, lambda_)
    for row, (own, bootstrap) in enumerate(rows):
        values = [step.value for step in own] + [bootstrap]
        deltas = [own[t].reward + gamma * values[t + 1] - values[t] for t in range(len(own))]
        expected = [
            sum((gamma * lambda_) ** k * delta for k, delta in enumerate(deltas[t:]))
            for t in range(len(own))
        ]
        cells = (segments.index == row) & segments.loss_mask
        assert found[cells].tolist() == pytest.approx(expected, abs=1e-9)
    assert not found[~segments.loss_mask].any()


def test_gae_with_lambda_one_is_the_return_less_the_value_and_vtrace_agrees() -> None:
    own = [Step(0.0, reward, value, 0.9) for reward, value in ((0.0, 0.3), (0.0, 0.5), (1.0, 0.1))]
    advantages, segments = run_gae([(own, 0.0)], 0.9, 1.0)
    found, _ = run_vtrace([(own, 0.0)])
    values = [step.value for step in own]
    returns = [a + v for a, v in zip(advantages[segments.loss_mask].tolist(), values, strict=True)]
    assert returns == pytest.approx([0.81, 0.9, 1.0])
    assert found.targets[segments.loss_mask].tolist() == pytest.approx(returns)
