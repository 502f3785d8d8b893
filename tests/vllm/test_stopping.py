"""Where a completion ends, and what it may hold."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_lab import VllmLab, collect, decode

from headrace.errors import GeneratorFailure
from headrace.generators.vllm import VllmGenerator
from headrace.types import Rollout


def rollouts(lab: VllmLab, generator: VllmGenerator, **sampling: Any) -> tuple[Rollout, ...]:  # noqa: ANN401 - passed on
    lab.run(generator.update_weights(lab.update(seed=3)))
    (group,) = lab.run(collect(generator, [lab.request(size=12, **sampling)])).values()
    return group.rollouts


def test_a_stop_id_ends_a_rollout_and_is_its_last_token(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    stopped = [r for r in rollouts(lab, shared, stop_token_ids=(3, 5)) if r.finish_reason == "stop"]
    assert stopped
    for rollout in stopped:
        *before, last = rollout.completion_ids
        assert last in {3, 5}
        assert not {3, 5} & {*before}


def test_a_stop_string_ends_a_rollout_with_the_token_that_completed_it(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    strings = tuple(a + b for a in "abcdef" for b in "abc")
    stopped = [r for r in rollouts(lab, shared, stop_strings=strings) if r.finish_reason == "stop"]
    assert stopped
    for rollout in stopped:
        assert rollout.text == decode(rollout.completion_ids)
        assert any(string in rollout.text for string in strings)
        assert not any(string in decode(rollout.completion_ids[:-1]) for string in strings)


def test_a_minimum_length_keeps_stop_ids_away(lab: VllmLab, shared: VllmGenerator) -> None:
    early = tuple(range(8))
    for rollout in rollouts(lab, shared, stop_token_ids=early, min_tokens=6):
        assert not {*early} & {*rollout.completion_ids[:6]}


def test_masks_leave_only_what_they_allow(lab: VllmLab, shared: VllmGenerator) -> None:
    for rollout in rollouts(lab, shared, allowed_token_ids=(2, 3, 4), banned_token_ids=(3,)):
        assert {*rollout.completion_ids} <= {2, 4}
    for rollout in rollouts(lab, shared, banned_token_ids=(1, 2)):
        assert not {*rollout.completion_ids} & {1, 2}


def test_a_forced_prefix_begins_every_completion_and_is_not_trained_on(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    for rollout in rollouts(lab, shared, forced_prefix=(4, 2)):
        assert rollout.completion_ids[:2] == (4, 2)
        assert rollout.loss_mask == (False, False, *[True] * 18)
        assert rollout.generator_logprobs[:2] == (0.0, 0.0)


def test_greedy_rollouts_are_equal_and_certain(lab: VllmLab, shared: VllmGenerator) -> None:
    found = rollouts(lab, shared, temperature=0.0)
    assert len({rollout.completion_ids for rollout in found}) == 1
    assert {*found[0].generator_logprobs} == {0.0}


def test_one_seed_gives_one_group(lab: VllmLab, shared: VllmGenerator) -> None:
    first, second = rollouts(lab, shared), rollouts(lab, shared)
    assert [r.completion_ids for r in first] == [r.completion_ids for r in second]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"raw_logprobs": True}, "raw_logprobs"),
        ({"kept_support": True}, "kept_support"),
        ({"min_p": 0.1, "top_p": 0.9}, "min_p together with top_p"),
    ],
    ids=["raw log-probs", "kept support", "filters in another order"],
)
def test_what_vllm_cannot_do_is_refused_by_name(
    lab: VllmLab, shared: VllmGenerator, sampling: dict[str, Any], words: str
) -> None:
    with pytest.raises(GeneratorFailure, match=words):
        rollouts(lab, shared, **sampling)
