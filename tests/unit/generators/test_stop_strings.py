"""When a stop string ends a rollout, against a slow literal version."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headrace.generators.stop_strings import completes_stop_string

PIECES = ("a", "b", "ab", "ba", "aab", "", "", "")
"""By token id; the last ones are special and have no text."""


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def literal(ids: Sequence[int], strings: Sequence[str]) -> bool:
    """Whether an occurrence ends within the text of the last token, by looking at every place."""
    text, before = decode(ids), decode(ids[:-1])
    ends = range(len(before) + 1, len(text) + 1)
    return any(text[:end].endswith(string) for end in ends for string in strings)


@pytest.mark.parametrize("seed", range(20))
def test_a_string_counts_where_it_ends_in_the_newest_token(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret
    found = set()
    for _ in range(200):
        ids = [rng.randrange(len(PIECES)) for _ in range(rng.randrange(1, 40))]
        strings = ["".join(rng.choices("ab", k=rng.randrange(1, 7))) for _ in range(2)]
        expected = literal(ids, strings)
        found.add(expected)
        assert completes_stop_string(ids, strings, decode) == expected
    assert found == {True, False}


def test_a_string_around_many_tokens_without_text_is_found() -> None:
    assert completes_stop_string([0, *[5] * 500, 1], ["ab"], decode)


def test_a_string_that_was_there_before_ends_nothing() -> None:
    assert not completes_stop_string([0, 1, 0], ["ab"], decode)
    assert not completes_stop_string([2, 5], ["ab"], decode)


def test_part_of_a_character_that_becomes_another_is_what_the_token_brought() -> None:
    """Half a character decodes to one that stands in for it, until the other half comes."""
    texts = {(): "", (1,): "x\N{REPLACEMENT CHARACTER}", (1, 2): "x\N{SNOWMAN}"}
    assert completes_stop_string([1, 2], ["\N{SNOWMAN}"], lambda ids: texts[tuple(ids)])
    assert not completes_stop_string([1, 2], ["x"], lambda ids: texts[tuple(ids)])


def test_no_string_ends_nothing() -> None:
    assert not completes_stop_string([0, 1], [], decode)
