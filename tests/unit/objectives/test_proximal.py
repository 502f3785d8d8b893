from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.objectives.proximal import loglinear_proximal

logprob = st.floats(-9.0, 0.0)


@settings(deadline=None)
@given(tokens=st.lists(st.tuples(logprob, logprob, st.integers(0, 9)), min_size=1), now=st.just(9))
def test_it_is_the_literal_line_between_generator_and_learner_by_the_version_of_each_token(
    tokens: list[tuple[float, float, int]], now: int
) -> None:
    q, mu, versions = (torch.tensor(column) for column in zip(*tokens, strict=True))
    found = loglinear_proximal(q, mu, versions=versions.long(), policy_version=now)
    expected = []
    for current, sampled, version in tokens:
        share = 0.0 if version == now else (now - 1 - version) / (now - version)
        expected.append(sampled + min(max(share, 0.0), 1.0) * (current - sampled))
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_of_tokens_at_most_one_update_old_it_is_the_generators_whatever_the_learner_says() -> None:
    mu = torch.tensor([-1.0, -2.0, -1.0])
    q = torch.tensor([math.nan, math.inf, -3.0])
    found = loglinear_proximal(q, mu, versions=torch.tensor([4, 3, 2]), policy_version=4)
    assert found.tolist() == [-1.0, -2.0, -2.0]
