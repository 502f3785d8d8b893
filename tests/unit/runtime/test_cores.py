"""How cores are divided between a learner and generators in processes of their own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from headrace.config import RunConfig, parse_config
from headrace.runtime.cores import core_notes, learner_threads, threads_of_each
from headrace.runtime.generators import compute_threads


def config(staleness: int, count: int, threads: int | None = None) -> RunConfig:
    return parse_config(
        {
            "num_steps": 1,
            "max_staleness": staleness,
            "num_threads": 8,
            "model": {"path": "nano"},
            "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
            "verifier": {"components": {"answer": {"kind": "exact"}}},
            "placement": {
                "generators": "disaggregated",
                "num_generators": count,
                "threads_per_generator": threads,
            },
        }
    )


@pytest.mark.parametrize(
    ("staleness", "count", "threads", "expected"),
    [
        (0, 2, None, (8, 4)),
        (0, 3, None, (8, 2)),
        (0, 20, None, (8, 1)),
        (2, 2, None, (4, 2)),
        (2, 2, 7, (4, 7)),
    ],
)
def test_who_takes_turns_has_all_cores_and_who_does_not_divides_them(
    staleness: int, count: int, threads: int | None, expected: tuple[int, int]
) -> None:
    found = config(staleness, count, threads)
    assert (learner_threads(found, 8), threads_of_each(found, 8)) == expected

    async def here() -> int:
        async with AsyncExitStack() as stack:
            generator, learner = compute_threads(stack, found)
            assert generator is learner, "nothing computes here for a generator"
            return learner.num_threads

    assert asyncio.run(here()) == expected[0]


def test_more_threads_than_cores_are_worth_a_note() -> None:
    (note,) = core_notes(config(0, 3, 4), 8)
    assert "3 with 4 threads each are 12 threads at the same time" in note
    (note,) = core_notes(config(1, 4, 2), 8)
    assert "2 threads each and 4 of the learner are 12 threads" in note
    assert not list(core_notes(config(0, 2, 4), 8))
    assert not list(core_notes(config(1, 2), 8))
