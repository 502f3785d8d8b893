from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.generators.torch_engine.masks import TokenMasks
from headrace.generators.torch_engine.rollout_state import sampling_rows
from headrace.generators.torch_engine.sampling import (
    Drawn,
    device_uniforms,
    draw,
    packed,
    uniforms,
    unpacked,
)
from headrace.types import LEAST_TEMPERATURE, SamplingParams

CPU = torch.device("cpu")


def draw_many(
    logits: Sequence[float], params: SamplingParams, count: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` tokens from one distribution."""
    rows = torch.tensor([logits]).repeat(count, 1)
    uniform = uniforms(torch.full((count,), seed), torch.arange(count), CPU)
    return pair(draw(rows, sampling_rows([params] * count), uniform))


def pair(drawn: Drawn) -> tuple[Tensor, Tensor]:
    return drawn.ids, drawn.logprobs


def literal(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution, token by token, as the docstring of SamplingParams words it."""
    scaled = [value / params.temperature for value in logits]
    peak = max(scaled)
    mass = [math.exp(value - peak) for value in scaled]
    order = sorted(range(len(mass)), key=lambda token: -mass[token])
    if params.top_k:
        order = order[: params.top_k]
    total, kept, reached = sum(mass[token] for token in order), [], 0.0
    for token in order:
        if reached < params.top_p * total or params.top_p >= 1:
            kept.append(token)
            reached += mass[token]
    kept = [token for token in kept if mass[token] >= params.min_p * mass[order[0]]]
    total = sum(mass[token] for token in kept)
    return [mass[token] / total if token in kept else 0.0 for token in range(len(mass))]


FILTERS = {
    "plain": SamplingParams(),
    "warm": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(top_p=0.7),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(min_p=0.3),
    "all": SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.2),
}
LOGITS = (0.3, 2.0, -1.0, 1.1, 0.0, 1.7, -2.0)


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_are_the_probabilities(name: str) -> None:
    count, expected = 12_000, literal(LOGITS, FILTERS[name])
    ids, _ = draw_many(LOGITS, FILTERS[name], count)
    seen = torch.bincount(ids, minlength=len(LOGITS)).tolist()
    pairs = [(s, e * count) for s, e in zip(seen, expected, strict=True)]
    assert all(s == 0 for s, e in pairs if e == 0)
    chi_square = sum((s - e) ** 2 / e for s, e in pairs if e)
    assert chi_square < 27  # six degrees of freedom: 1 in 7000 at a fixed seed


@pytest.mark.parametrize("vocabulary", [3, 256, 257, 1000])
@pytest.mark.parametrize("name", FILTERS)
def test_log_probs_are_those_of_the_renormalised_support(name: str, vocabulary: int) -> None:
    logits = (2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))).tolist()
    ids, logprobs = draw_many(logits, FILTERS[name], 200)
    expected = literal(logits, FILTERS[name])
    for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.6, -0.2026), (1.0, -0.4076)], ids=["T=.6", "T=1"]
)
def test_temperature_is_inside_the_softmax(temperature: float, expected: float) -> None:
    ids, logprobs = draw_many((2.0, 1.0, 0.0), SamplingParams(temperature=temperature), 50)
    assert logprobs[ids == 0][0].item() == pytest.approx(expected, abs=1e-4)


def test_top_p_reports_the_support_it_kept() -> None:
    logits = [math.log(p) for p in (0.665, 0.245, 0.090)]
    ids, logprobs = draw_many(logits, SamplingParams(top_p=0.9), 200)
    assert set(ids.tolist()) == {0, 1}
    gap = logprobs[ids == 0][0].item() - math.log(0.665)
    assert gap == pytest.approx(0.094, abs=1e-3)


def test_top_k_of_one_is_greedy_and_ties_go_to_the_first() -> None:
    logits = (0.0, 1.0, 1.0, 0.5)
    for params in (SamplingParams(top_k=1), SamplingParams(temperature=0.0)):
        ids, logprobs = draw_many(logits, params, 20)
        assert set(ids.tolist()) == {1}
        assert logprobs.abs().max() < 1e-6


def test_greedy_has_the_log_prob_of_a_point_whatever_the_filters() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.5, min_p=0.1, top_k=3)
    ids, logprobs = draw_many(LOGITS, params, 5)
    assert ids.tolist() == [1] * 5
    assert logprobs.tolist() == [0.0] * 5


COMPANY = [
    *FILTERS.values(),
    SamplingParams(temperature=0.0, raw_logprobs=True),
    SamplingParams(temperature=0.7, raw_logprobs=True),
    SamplingParams(top_p=0.9, raw_logprobs=True, kept_support=True),
    SamplingParams(banned_token_ids=(0, 2), raw_logprobs=True),
    SamplingParams(allowed_token_ids=(0, 3, 4), min_p=0.1, kept_support=True),
]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), vocabulary=st.sampled_from([5, 256, 300, 700, 5000]))
def test_a_row_does_not_depend_on_its_company(data: st.DataObject, vocabulary: int) -> None:
    params = data.draw(st.lists(st.sampled_from(COMPANY), min_size=1, max_size=6))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = data.draw(st.sampled_from([0.0, 1.0, 3.0])) * torch.randn(len(params), vocabulary)
    uniform = uniforms(torch.arange(len(params)), torch.zeros(len(params), dtype=torch.int64), CPU)
    together = masked_draw(logits, params, uniform)
    for row, param in enumerate(params):
        one = slice(row, row + 1)
        alone = masked_draw(logits[one], [param], uniform[one])
        assert alone.ids.item() == together.ids[row].item()
        assert alone.logprobs.item() == together.logprobs[row].item()
        assert alone.kept_support.get(0) == together.kept_support.get(row)
        if param.raw_logprobs:
            assert alone.raw_logprobs is not None
            assert together.raw_logprobs is not None
            assert alone.raw_logprobs.item() == together.raw_logprobs[row].item()


def masked_draw(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Drawn:
    """Draw the first token of each row, which no `draw` may overwrite in ``logits``."""
    masks = TokenMasks()
    early, _ = masks.assign(params)
    forbidden = masks.forbidden(early, logits.shape[1], logits.device)
    return draw(logits.clone(), sampling_rows(params), uniform, forbidden)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
def test_no_token_of_probability_zero_is_drawn_at_the_ends_of_the_unit_interval(
    uniform: float,
) -> None:
    logits = torch.full((1, 600), -math.inf)
    logits[0, [300, 301, 555]] = torch.tensor([0.1, 0.7, 0.2])
    u = torch.tensor([uniform], dtype=torch.float64)
    ids, logprobs = pair(draw(logits, sampling_rows([SamplingParams()]), u))
    assert ids.item() in {300, 301, 555}
    assert math.isfinite(logprobs.item())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_no_filtered_token_is_ever_drawn(seed: int, shift: float) -> None:
    logits = 5 * torch.randn(4, 520, generator=torch.Generator().manual_seed(seed))
    kept = logits.topk(2, dim=-1).indices
    uniform = torch.full((4,), shift, dtype=torch.float64)
    rows = sampling_rows([SamplingParams(top_k=2)] * 4)
    ids, logprobs = pair(draw(logits.clone(), rows, uniform))
    assert bool((kept == ids.unsqueeze(1)).any(1).all())
    assert bool(logprobs.isfinite().all())


@pytest.mark.parametrize("params", [*FILTERS.values(), SamplingParams(temperature=0.0)])
@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_row_whose_logits_are_not_finite_has_no_log_prob_and_spoils_no_other(
    fault: float, params: SamplingParams
) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    rows, uniform = sampling_rows([params] * 3), torch.full((3,), 0.5, dtype=torch.float64)
    expected, expected_logprobs = pair(draw(logits.clone(), rows, uniform))
    logits[1, 7] = fault
    ids, logprobs = pair(draw(logits, rows, uniform))
    assert logprobs.isnan().tolist() == [False, True, False]
    assert 0 <= ids[1].item() < 300
    assert ids[::2].tolist() == expected[::2].tolist()
    assert logprobs[::2].tolist() == expected_logprobs[::2].tolist()


def test_uniforms_differ_by_seed_and_position_and_fill_the_unit_interval() -> None:
    seeds = torch.arange(100).repeat_interleave(100)
    found = uniforms(seeds, torch.arange(100).repeat(100), CPU)
    assert len(set(found.tolist())) == 10_000
    assert 0 <= found.min() < 0.001
    assert 0.999 < found.max() < 1
    assert found.mean().item() == pytest.approx(0.5, abs=0.01)


def test_the_least_temperature_draws_and_what_fp32_holds_as_0_is_greedy() -> None:
    logits = [1e30, 3.0, -1e30]
    ids, logprobs = draw_many(logits, SamplingParams(temperature=LEAST_TEMPERATURE), 5)
    assert (ids.tolist(), logprobs.tolist()) == ([0] * 5, [0.0] * 5)
    ids, logprobs = draw_many([0.1, 0.3, 0.2], SamplingParams(temperature=1e-46), 50)
    assert (ids.tolist(), logprobs.tolist()) == ([1] * 50, [0.0] * 50)


def test_a_uniform_is_the_same_bits_on_every_device() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=generator)
    seeds[:3] = torch.tensor([0, 2**63 - 1, -(2**63)])
    positions = torch.randint(0, 2**40, (20_000,), generator=generator)
    assert torch.equal(device_uniforms(seeds, positions), uniforms(seeds, positions, CPU))


@pytest.mark.parametrize("has_raw", [True, False])
def test_a_drawn_token_survives_the_one_copy_that_takes_it_from_a_device(*, has_raw: bool) -> None:
    logprobs = torch.tensor([-0.1, 0.0, -math.inf, math.nan, -1e-30])
    drawn = Drawn(
        ids=torch.tensor([0, 1, 2**31, 262_143, 7]),
        logprobs=logprobs,
        raw_logprobs=logprobs * 3 if has_raw else None,
        kept_support={2: b"x"},
    )
    found = unpacked(drawn, packed(drawn))
    assert found.ids.dtype == torch.int64
    assert torch.equal(found.ids, drawn.ids)
    assert found.logprobs.view(torch.int32).equal(logprobs.view(torch.int32))
    assert (found.raw_logprobs is not None) == has_raw
    if found.raw_logprobs is not None:
        assert found.raw_logprobs.view(torch.int32).equal((logprobs * 3).view(torch.int32))
    assert found.kept_support == drawn.kept_support


@pytest.mark.parametrize("vocabulary", [5, 256, 5000])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=3)]
)
def test_a_row_that_is_not_finite_draws_a_token_of_the_vocabulary(
    vocabulary: int, params: SamplingParams
) -> None:
    logits = torch.full((2, vocabulary), math.nan)
    logits[1] = 0.0
    uniform = torch.tensor([0.999, 0.0], dtype=torch.float64)
    drawn = draw(logits, sampling_rows([params] * 2), uniform)
    assert 0 <= int(drawn.ids[0]) < vocabulary
    assert drawn.logprobs.isnan().tolist() == [True, False]
