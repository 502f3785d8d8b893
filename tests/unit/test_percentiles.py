from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.percentiles import Window, percentiles


@given(st.lists(st.floats(0, 100), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    (found,) = percentiles(values, (percent,))
    wanted = Fraction(percent * len(values), 100)
    assert sum(value <= found for value in values) >= wanted
    assert sum(value < found for value in values) < wanted


def test_several_are_told_in_the_order_they_are_asked_for() -> None:
    assert percentiles(range(100, 0, -1), (99, 50, 100, 1)) == (99, 50, 100, 1)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentiles([], (50,))


def test_a_window_tells_of_its_last_values() -> None:
    window = Window(kept=100)
    assert (window.percentiles(50), window.mean(), len(window)) == (None, None, 0)
    for number in range(1, 301):
        window.add(float(number))
    assert window.percentiles(50, 99, 100) == (250.0, 299.0, 300.0)
    assert window.mean() == 250.5
    assert len(window) == 100
