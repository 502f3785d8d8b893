"""The records: what they refuse, and the seed tree."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.types import (
    GenerationRequest,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VersionSpan,
    derive_seed,
)

PROMPT = Prompt(prompt_id="p", source="s", text="1+1=", token_ids=(1, 2))


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(policy_version=version, start=start, end=end)


def rollout(index: int = 0, *, length: int = 4, **changes: Any) -> Rollout:  # noqa: ANN401 - any field
    fields: dict[str, Any] = {
        "rollout_index": index,
        "completion_ids": tuple(range(length)),
        "loss_mask": (True,) * length,
        "generator_logprobs": (-0.5,) * length,
        "version_spans": (span(3, 0, length),) if length else (),
        "finish_reason": "stop",
        "text": "2",
    }
    return Rollout(**fields | changes)


def verdict(reward: float | None, outcome: Outcome = Outcome.PASS) -> Verdict:
    return Verdict(outcome=outcome, reward=reward, verifier="exact")


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt p renders to no token"):
        dataclasses.replace(PROMPT, token_ids=())


@pytest.mark.parametrize("changes", [{"loss_mask": (True,)}, {"generator_logprobs": (0.0,) * 5}])
def test_a_rollout_whose_sequences_differ_in_length_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rollout 7: 4 ids"):
        rollout(7, **changes)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (span(1, 0, 3),),
        (span(1, 0, 5),),
        (span(1, 1, 4),),
        (span(1, 0, 2), span(2, 3, 4)),
        (span(1, 0, 3), span(2, 2, 4)),
        (span(1, 0, 2), span(2, 2, 2), span(3, 2, 4)),
        (span(2, 2, 4), span(1, 0, 2)),
    ],
)
def test_version_spans_that_do_not_tile_the_completion_are_refused(
    spans: tuple[VersionSpan, ...],
) -> None:
    with pytest.raises(ValueError, match="rollout 0: version spans"):
        rollout(version_spans=spans)


@given(cuts=st.sets(st.integers(1, 9)), versions=st.lists(st.integers(0, 99), min_size=11))
def test_any_tiling_is_accepted_and_its_oldest_version_found(
    cuts: set[int], versions: list[int]
) -> None:
    edges = [0, *sorted(cuts), 10]
    pairs = itertools.pairwise(edges)
    spans = tuple(span(versions[k], start, end) for k, (start, end) in enumerate(pairs))
    assert rollout(length=10, version_spans=spans).oldest_version == min(versions[: len(spans)])


def test_an_empty_completion_has_no_version() -> None:
    assert rollout(length=0).oldest_version is None


def test_an_infrastructure_failure_carries_no_reward() -> None:
    assert verdict(None, Outcome.INFRA).reward is None
    with pytest.raises(ValueError, match="INFRA carries no reward"):
        verdict(0.0, Outcome.INFRA)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e300])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="is not a finite number"):
        verdict(reward)


def test_a_group_keeps_an_unscored_rollout_apart_from_a_reward_of_zero() -> None:
    group = RolloutGroup(
        group_id="0/p",
        prompt=PROMPT,
        rollouts=(rollout(0), rollout(1)),
        sampling=SamplingParams(),
    )
    assert group.verdicts is None
    scored = group.scored([verdict(0.0, Outcome.WRONG), verdict(None, Outcome.INFRA)])
    assert scored.rewards == (0.0, None)
    assert group.verdicts is None
    assert scored.group_size == 2
    with pytest.raises(ValueError, match="group 0/p: 1 verdicts for 2 rollouts"):
        group.scored([verdict(1.0)])


def request(*begun: Rollout, size: int = 3) -> GenerationRequest:
    return GenerationRequest(
        group_id="0/p",
        prompt=PROMPT,
        group_size=size,
        sampling=SamplingParams(),
        seed=0,
        begun=begun,
    )


@pytest.mark.parametrize(
    ("indexes", "words"),
    [((3,), "rollout 3 is none of its 3"), ((-1,), "rollout -1 is"), ((1, 0, 1), "index twice")],
)
def test_begun_rollouts_that_are_none_of_the_group_are_refused(
    indexes: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=f"group 0/p: .*{words}"):
        request(*(rollout(index) for index in indexes))


def test_the_versions_of_a_group_are_those_of_its_tokens_and_ignore_empty_completions() -> None:
    rollouts = (rollout(0, length=0), rollout(1, version_spans=(span(5, 0, 2), span(6, 2, 4))))
    group = RolloutGroup(
        group_id="0/p", prompt=PROMPT, rollouts=rollouts, sampling=SamplingParams()
    )
    assert (group.oldest_version, group.newest_version) == (5, 6)
    empty = dataclasses.replace(group, rollouts=rollouts[:1])
    assert (empty.oldest_version, empty.newest_version) == (None, None)


@pytest.mark.parametrize(
    ("params", "truncates"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.3), False),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(top_k=3), True),
        (SamplingParams(min_p=0.1), True),
    ],
)
def test_filters_truncate_and_temperature_does_not(params: SamplingParams, truncates: bool) -> None:
    assert params.truncates is truncates


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"min_tokens": -1}, "min_tokens = -1 must be at least 0"),
        ({"min_tokens": 9}, "at most max_tokens = 8"),
        ({"allowed_token_ids": (4, -1)}, r"allowed_token_ids = \[-1\]: token ids start at 0"),
        ({"banned_token_ids": (-3,)}, r"banned_token_ids = \[-3\]"),
        ({"forced_prefix": (1, -2)}, r"forced_prefix = \[-2\]"),
        ({"forced_prefix": (1,) * 8}, "of 8 tokens with max_tokens = 8 leaves no token"),
        ({"allowed_token_ids": ()}, "leaves no token to sample"),
        ({"allowed_token_ids": (3,), "banned_token_ids": (3, 4)}, "leaves no token to sample"),
        (
            {"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 1},
            "leaves no token to sample before min_tokens = 1",
        ),
    ],
)
def test_sampling_that_leaves_nothing_to_sample_is_refused(
    changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        SamplingParams(**{"max_tokens": 8} | changes)


def test_a_stop_id_may_be_all_that_is_allowed_where_no_minimum_forbids_it() -> None:
    only_stop: dict[str, Any] = {"allowed_token_ids": (3,), "stop_token_ids": (3,)}
    assert SamplingParams(**only_stop).early_banned == frozenset()
    forced = SamplingParams(**only_stop, min_tokens=2, forced_prefix=(5, 6))
    assert forced.early_banned == frozenset()


@pytest.mark.parametrize(
    ("params", "masks"),
    [
        (SamplingParams(top_p=0.9, stop_token_ids=(1,), forced_prefix=(1,)), False),
        (SamplingParams(min_tokens=3), False),
        (SamplingParams(min_tokens=3, stop_token_ids=(1,)), True),
        (SamplingParams(allowed_token_ids=(1,)), True),
        (SamplingParams(banned_token_ids=(1,)), True),
    ],
)
def test_masks_are_what_forbids_a_token_whatever_its_probability(
    params: SamplingParams, masks: bool
) -> None:
    assert params.masks is masks
    assert params.truncates is (params.top_p < 1)


@pytest.mark.parametrize(
    "changes", [{"raw_logprobs": (0.0,) * 3}, {"kept_support": (b"",) * 5}, {"kept_support": ()}]
)
def test_optional_records_have_one_entry_for_each_token(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rollout 7: 4 ids and [035] "):
        rollout(7, **changes)
    assert rollout(7, raw_logprobs=(0.0,) * 4, kept_support=(b"",) * 4).raw_logprobs is not None


def test_records_cannot_be_changed_or_grown() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROMPT.text = "other"  # type: ignore[misc] - the point of the test
    assert not hasattr(PROMPT, "__dict__")


def test_a_seed_is_the_same_on_every_machine_and_in_every_release() -> None:
    # Recorded runs are repeated from their seeds, so these values are part of the format.
    assert derive_seed(0) == 4761921975702974394
    assert derive_seed(0, "generator", "p-1", 3) == 1811882742333349966


PATHS = st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"])) | st.integers())


@given(root=st.integers(0, 2**63 - 1), path=PATHS)
def test_a_seed_is_a_non_negative_64_bit_number_and_repeats(
    root: int, path: list[str | int]
) -> None:
    seed = derive_seed(root, *path)
    assert 0 <= seed < 2**63
    assert derive_seed(root, *path) == seed


def test_seeds_differ_by_root_by_place_and_by_depth() -> None:
    paths: list[tuple[str | int, ...]] = [
        (),
        ("a",),
        ("b",),
        ("a", "b"),
        ("ab",),
        ("b", "a"),
        ("a", 1),
        ("a1",),
        ("a", 11),
        ("a", 1, 1),
        ("a", ""),
    ]
    seeds = {derive_seed(root, *path) for root in range(50) for path in paths}
    assert len(seeds) == 50 * len(paths)


def test_the_rollouts_of_a_group_have_distinct_seeds() -> None:
    for group_seed in range(200):
        assert len({derive_seed(group_seed, index) for index in range(8)}) == 8


def test_two_groups_share_no_seed() -> None:
    seeds = [
        derive_seed(derive_seed(0, "generator", f"p{p}"), k) for p in range(64) for k in range(8)
    ]
    assert len(set(seeds)) == 64 * 8
