from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.objectives.rewards import overlong_penalty


@given(st.integers(0, 150), st.integers(1, 100), st.floats(0.1, 5.0))
def test_the_overlong_penalty_is_the_literal_equation_13(
    length: int, buffer_tokens: int, penalty: float
) -> None:
    longest = 100
    if length <= longest - buffer_tokens:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - buffer_tokens) - length) / buffer_tokens
    else:
        expected = -1.0
    found = overlong_penalty(
        length, max_tokens=longest, buffer_tokens=buffer_tokens, penalty=penalty
    )
    assert found == pytest.approx(penalty * expected)


def test_it_sinks_in_a_line_from_the_start_of_the_buffer_to_the_limit() -> None:
    found = [overlong_penalty(n, max_tokens=10, buffer_tokens=4) for n in (0, 6, 7, 8, 9, 10, 11)]
    assert found == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]
