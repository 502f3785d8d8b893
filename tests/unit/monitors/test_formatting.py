import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.monitors.formatting import clipped, duration, encodable, number, percent, printable


@given(st.text())
def test_no_control_character_survives_but_newline_and_tab(text: str) -> None:
    shown = printable(text)
    assert all(c in "\n\t" or unicodedata.category(c) not in {"Cc", "Cf", "Cs"} for c in shown)


@given(st.text(st.characters(blacklist_categories=("Cc", "Cf", "Cs"))))
def test_plain_text_is_shown_as_it_is(text: str) -> None:
    assert printable(text) == text


@given(st.text())
def test_any_text_can_be_encoded_afterwards(text: str) -> None:
    encodable(text).encode("utf-8")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.82, "0.82 s"),
        (8.24, "8.2 s"),
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (62, "1 min 02 s"),
        (3600 * 3 + 425, "3 h 07 min"),
    ],
)
def test_a_duration_is_readable_at_every_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.2134, "0.213"),
        (3e-4, "0.0003"),
        (12.4, "12.40"),
        (1234.5, "1,234"),
        (18_200, "18.2k"),
        (-2_500_000, "-2.5M"),
        (4e9, "4.0G"),
    ],
)
def test_a_number_has_about_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_clipped_text_says_how_much_is_missing() -> None:
    assert clipped("abc", 3) == "abc"
    assert clipped("abcdef", 3) == "abc\n[3 more characters]"
    assert percent(0.875) == "87.5 %"
