"""top-k, top-p and min-p beside the rule written out token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.generators.torch_engine import filters
from headrace.generators.torch_engine.filters import keep_support, sorted_support

Limits: TypeAlias = tuple[int, float, float]
"""top_k, top_p, min_p."""


def literal(weights: list[float], limits: Limits) -> list[int]:
    """The kept tokens, as the module's docstring words the rule. Sums are exact."""
    top_k, top_p, min_p = limits
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        reached = top_p * math.fsum(weights[token] for token in order)
        passed = [math.fsum(weights[token] for token in order[:n]) for n in range(len(order))]
        order = [token for token, mass in zip(order, passed, strict=True) if mass < reached]
    floor = np.float32(min_p) * np.float32(max(weights))
    return [token for token in order if np.float32(weights[token]) >= floor]


def columns(limits: list[Limits]) -> dict[str, Tensor]:
    top_k, top_p, min_p = zip(*limits, strict=True)
    return {
        "top_k": torch.tensor(top_k),
        "top_p": torch.tensor(top_p, dtype=torch.float64),
        "min_p": torch.tensor(min_p, dtype=torch.float32),
    }


def by_selection(weights: Tensor, limits: list[Limits]) -> Tensor:
    kept = weights.clone()
    keep_support(kept, torch.arange(len(weights)), **columns(limits))
    return kept


def by_sorting(weights: Tensor, limits: list[Limits]) -> Tensor:
    return sorted_support(weights, **columns(limits))


ways = pytest.mark.parametrize("filtered", [by_selection, by_sorting])
Way: TypeAlias = Callable[[Tensor, list[Limits]], Tensor]

limits = st.tuples(
    st.sampled_from([0, 1, 2, 7, 100]),
    st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0]) | st.floats(0.001, 1.0),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@st.composite
def distributions(draw: st.DrawFn) -> Tensor:
    """[V] weights: of random logits, of a few distinct ones, or all alike."""
    size = draw(st.integers(1, 400))
    kind = draw(st.sampled_from(["any", "few", "flat", "tail"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    match kind:
        case "any":
            logits = draw(st.floats(0.1, 8)) * torch.randn(size, generator=generator)
        case "few":
            logits = torch.randint(0, 3, (size,), generator=generator).float()
        case "flat":
            logits = torch.zeros(size)
        case _:
            logits = -torch.arange(size).float() * draw(st.sampled_from([0.01, 1.0, 30.0]))
    return torch.softmax(logits, -1)


@ways
@settings(deadline=None, max_examples=300)
@given(rows=st.lists(st.tuples(distributions(), limits), min_size=1, max_size=4), data=st.data())
def test_what_is_kept_is_what_the_rule_says(
    filtered: Way, rows: list[tuple[Tensor, Limits]], data: st.DataObject
) -> None:
    # Few candidates are sorted at once, so partition down to a few in these small vocabularies.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "SORTED", data.draw(st.sampled_from([1, 5, 2048])))
        patch.setattr(filters, "SAMPLE", data.draw(st.sampled_from([1, 3, 32])))
        width = max(len(weights) for weights, _ in rows)
        # A weight of 0 is an id that can never be drawn, whatever a filter says of it.
        padded = [torch.nn.functional.pad(w, (0, width - len(w))) for w, _ in rows]
        found = filtered(torch.stack(padded), [limit for _, limit in rows])
    for kept, (weights, limit) in zip(found, rows, strict=True):
        expected = torch.zeros(width)
        tokens = literal(weights.tolist(), limit)
        expected[tokens] = weights[tokens]
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 2.5, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_large_vocabulary_is_cut_as_by_sorting_it(scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.softmax(scale * torch.randn(6, 20_000, generator=generator), -1)
    tried: list[Limits] = [
        (0, 0.95, 0.0),
        (0, 0.2, 0.0),
        (0, 0.9999, 0.0),
        (5000, 1.0, 0.0),
        (19_999, 0.7, 0.0),
        (40, 0.9, 0.02),
    ]
    assert torch.equal(by_selection(weights, tried), by_sorting(weights, tried))


def test_the_first_of_equals_are_kept_over_both_limits() -> None:
    weights = torch.full((1, 10), 0.0625)
    weights[0, 3] = 0.4375
    # top-k leaves 3 and then 0, 1, 2, 4; of their mass 0.6875 the first three reach 0.8.
    kept = by_selection(weights, [(5, 0.8, 0.0)])
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 3]


@ways
def test_only_the_chosen_rows_are_filtered(filtered: Way) -> None:
    weights = torch.softmax(torch.randn(3, 50), -1)
    kept = filtered(weights, [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 1.0, 0.0)])
    assert torch.equal(kept[[0, 2]], weights[[0, 2]])
    assert (kept[1] > 0).sum() == 3


def test_a_pivot_that_no_sample_foresees_costs_passes_and_no_token() -> None:
    # Every weight that the sample looks at is 0.
    weights = torch.softmax(torch.randn(1, 60_000), -1)
    weights[0, :: 60_000 // filters.SAMPLE] = 0.0
    tried: list[Limits] = [(0, 0.6, 0.0)]
    assert torch.equal(by_selection(weights, tried), by_sorting(weights, tried))
