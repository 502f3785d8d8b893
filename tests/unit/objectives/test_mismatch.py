from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.objectives.mismatch import figures, mismatch_sums
from headrace.objectives.segments import Segments

rollouts = st.lists(st.lists(st.floats(-1.5, 1.5), max_size=5), min_size=1, max_size=6)


def sums_of(rows: list[list[float]]) -> dict[str, float]:
    """Pack with a cell outside the mask, that holds no number, after each rollout."""
    cells = [cell for row in rows for cell in (*row, math.nan)]
    index = [number for number, row in enumerate(rows) for _ in (*row, None)]
    segments = Segments(
        index=torch.tensor(index, dtype=torch.int64),
        count=len(rows),
        loss_mask=~torch.tensor(cells).isnan(),
    )
    sums = mismatch_sums(torch.tensor(cells, dtype=torch.float64), segments)
    return {name: float(value) for name, value in sums.items()}


def literal_figures(rows: list[list[float]]) -> dict[str, float]:
    gaps = [gap for row in rows for gap in row]
    full = [row for row in rows if row]
    weights = [math.exp(gap) for gap in gaps]
    return {
        "k1": sum(-gap for gap in gaps) / len(gaps),
        "k3": sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps),
        "chi2_token": sum(weight**2 for weight in weights) / len(gaps) - 1,
        "chi2_rollout": sum(math.exp(sum(row)) ** 2 for row in full) / len(full) - 1,
        "ess": sum(weights) ** 2 / sum(weight**2 for weight in weights) / len(gaps),
        "perplexity_ratio": math.exp(
            sum(sum(-g for g in row) / len(row) for row in full) / len(full)
        ),
    }


@settings(deadline=None)
@given(rows=rollouts.filter(any), cut=st.integers(0, 6))
def test_figures_are_the_literal_ones_for_every_split(rows: list[list[float]], cut: int) -> None:
    total: dict[str, float] = {}
    for part in (rows[:cut], rows[cut:]):
        for name, value in sums_of(part).items() if part else ():
            total[name] = total.get(name, 0.0) + value
    assert figures(total) == pytest.approx(literal_figures(rows), rel=1e-6, abs=1e-9)


def test_over_an_enumerable_policy_the_estimates_are_the_divergences() -> None:
    generator, learner = [0.5, 0.3, 0.2], [0.7, 0.2, 0.1]
    # Every sequence of two tokens as often as the generator draws it: ten by ten of them.
    drawn = [token for token, share in enumerate(generator) for _ in range(round(10 * share))]
    gap = [math.log(p / mu) for p, mu in zip(learner, generator, strict=True)]
    rows = [[gap[one], gap[two]] for one, two in itertools.product(drawn, repeat=2)]
    kl = sum(mu * -g for mu, g in zip(generator, gap, strict=True))
    chi2 = sum(p * p / mu for p, mu in zip(learner, generator, strict=True)) - 1
    found = figures(sums_of(rows))
    assert found["k1"] == pytest.approx(kl)
    assert found["k3"] == pytest.approx(kl)
    assert found["chi2_token"] == pytest.approx(chi2)
    assert found["chi2_rollout"] == pytest.approx((chi2 + 1) ** 2 - 1)
    assert found["ess"] == pytest.approx(1 / (chi2 + 1))


def test_where_both_agree_nothing_is_off() -> None:
    found = figures(sums_of([[0.0, 0.0], [0.0], []]))
    assert found == {
        "k1": 0.0,
        "k3": 0.0,
        "chi2_token": 0.0,
        "chi2_rollout": 0.0,
        "ess": 1.0,
        "perplexity_ratio": 1.0,
    }


def test_figures_of_impossible_tokens_are_finite() -> None:
    assert all(math.isfinite(value) for value in figures(sums_of([[-1e9], [1e9]])).values())
