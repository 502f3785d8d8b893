"""What a rollout holds: its tokens, log-probs, end and text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.models.decoder import Decoder
from headrace.types import Rollout, VersionSpan

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

EOS = 7


def flat(lab: Lab) -> Decoder:
    """A decoder whose every distribution is exactly uniform."""
    decoder = lab.decoder()
    for parameter in decoder.parameters():
        parameter.zero_()
    return decoder


def biased(lab: Lab, token: int) -> Decoder:
    """A decoder that says ``token`` whatever came before."""
    decoder = flat(lab)
    decoder.model.embed_tokens.weight[:, 0] = 1.0
    decoder.model.norm.weight.fill_(1.0)
    decoder.lm_head.weight[token, 0] = 30.0
    return decoder


def tokens(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.completion_ids for rollout in rollouts]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"model_type": "mistral", "sliding_window": 4},
        {"model_type": "qwen3", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 4, "intermediate_size": 24},
    ],
    ids=["llama", "mistral-sliding", "qwen3-tied", "qwen3-by-operators"],
)
def test_log_probs_are_those_of_a_full_forward_pass(
    lab: Lab, temperature: float, shape: dict[str, Any]
) -> None:
    decoder = lab.decoder(**shape)
    prompts = {"a": (1, 2, 3, 4, 5, 6, 7, 8), "b": (9,)}
    kw = {"size": 3, "max_tokens": 16, "temperature": temperature}
    groups = lab.run(decoder, [lab.request(name, ids, **kw) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        for rollout in groups[name].rollouts:
            assert lab.gap(decoder, ids, rollout, temperature) < 1e-5


def test_filtered_log_probs_are_renormalised_over_what_was_kept(lab: Lab) -> None:
    decoder = lab.decoder()
    group = lab.run(decoder, [lab.request("a", size=4, max_tokens=12, top_k=3)])["a"]
    for rollout in group.rollouts:
        logits = lab.logits(decoder, (3, 1, 4), rollout.completion_ids)
        kept = torch.full_like(logits, -math.inf).scatter(
            1, (t := logits.topk(3)).indices, t.values
        )
        ids = torch.tensor(rollout.completion_ids).unsqueeze(1)
        expected = kept.log_softmax(-1).gather(1, ids).squeeze(1)
        assert torch.allclose(torch.tensor(rollout.generator_logprobs), expected, atol=1e-5)


def test_top_k_of_one_is_greedy(lab: Lab) -> None:
    decoder = lab.decoder()
    requests = [lab.request("a", top_k=1), lab.request("b", temperature=0.0)]
    groups = lab.run(decoder, requests)
    assert tokens(groups["a"].rollouts) == tokens(groups["b"].rollouts)


def test_a_group_of_eight_is_eight_different_rollouts_and_seeds_matter(lab: Lab) -> None:
    requests = [lab.request("a", size=8, seed=1), lab.request("b", size=8, seed=2)]
    groups = lab.run(flat(lab), requests)
    assert len({*tokens(groups["a"].rollouts), *tokens(groups["b"].rollouts)}) == 16
    assert [r.rollout_index for r in groups["a"].rollouts] == list(range(8))
    again = lab.run(flat(lab), [lab.request("a", size=8, seed=1)])
    assert tokens(again["a"].rollouts) == tokens(groups["a"].rollouts)


lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12)), min_size=1)


@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(jobs=lengths.filter(lambda jobs: len(jobs) < 7), slots=st.integers(1, 9), data=st.data())
def test_slots_and_company_do_not_change_what_is_sampled(
    lab: Lab, jobs: list[tuple[int, int, int]], slots: int, data: st.DataObject
) -> None:
    decoder = lab.decoder()
    requests = [
        lab.request(
            str(i), range(1, 1 + n), size=size, seed=i, max_tokens=most, stop_token_ids=(5, 6)
        )
        for i, (n, size, most) in enumerate(jobs)
    ]
    alone = lab.run(decoder, requests, max_concurrent_rollouts=1)
    shuffled = data.draw(st.permutations(requests))
    together = lab.run(decoder, shuffled, max_concurrent_rollouts=slots, max_prefill_tokens=12)
    for name, group in alone.items():
        assert tokens(together[name].rollouts) == tokens(group.rollouts)
        for rollout in together[name].rollouts:
            assert lab.gap(decoder, group.prompt.token_ids, rollout) < 1e-5


def test_a_stop_id_is_kept_as_the_last_token_and_found_nowhere_else(lab: Lab) -> None:
    stop_token_ids = (EOS, 8, 9)
    request = lab.request("a", size=32, max_tokens=30, stop_token_ids=stop_token_ids)
    rollouts = lab.run(flat(lab), [request])["a"].rollouts
    assert Counter(r.finish_reason for r in rollouts).keys() == {"stop", "length"}
    for rollout in rollouts:
        assert not {*rollout.completion_ids[:-1]} & {*stop_token_ids}
        ended = rollout.completion_ids[-1] in stop_token_ids
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert ended or len(rollout.completion_ids) == 30
        assert rollout.loss_mask == (True,) * len(rollout.completion_ids)


def test_a_lone_end_of_sequence_is_a_whole_rollout(lab: Lab) -> None:
    request = lab.request("a", size=3, stop_token_ids=(EOS,))
    for rollout in lab.run(biased(lab, EOS), [request])["a"].rollouts:
        assert rollout.completion_ids == (EOS,)
        assert rollout.finish_reason == "stop"
        assert rollout.loss_mask == (True,)
        assert rollout.version_spans == (VersionSpan(policy_version=1, start=0, end=1),)


def test_a_stop_id_at_the_token_limit_counts_as_a_stop(lab: Lab) -> None:
    request = lab.request("a", max_tokens=1, stop_token_ids=(EOS,))
    assert lab.run(biased(lab, EOS), [request])["a"].rollouts[0].finish_reason == "stop"


def test_stop_ids_of_one_request_do_not_end_another(lab: Lab) -> None:
    requests = [lab.request("a", stop_token_ids=(EOS,)), lab.request("b", stop_token_ids=(1, 2))]
    groups = lab.run(biased(lab, EOS), [*requests, lab.request("c")])
    found = {name: group.rollouts[0] for name, group in groups.items()}
    assert {name: len(r.completion_ids) for name, r in found.items()} == {"a": 1, "b": 8, "c": 8}


def test_an_id_that_also_fills_padding_is_an_ordinary_token_in_mid_text(lab: Lab) -> None:
    for rollout in lab.run(biased(lab, 0), [lab.request("a", size=2)])["a"].rollouts:
        assert rollout.completion_ids == (0,) * 8
        assert rollout.finish_reason == "length"


@pytest.mark.parametrize("strings", [("ABC",), ("xyz", "BC"), ("C",)])
def test_a_stop_string_across_tokens_ends_with_the_token_that_completed_it(
    lab: Lab, strings: tuple[str, ...]
) -> None:
    def spell(ids: Sequence[int]) -> str:
        return "".join(("", "..A", "", "B", "C!")[token] for token in ids)

    decoder = flat(lab)
    decoder.lm_head.weight[5:, 0] = -200.0
    decoder.model.embed_tokens.weight[:, 0] = 1.0
    decoder.model.norm.weight.fill_(1.0)
    request = lab.request("a", size=40, max_tokens=40, stop_strings=strings)
    rollouts = lab.run(decoder, [request], decode=spell)["a"].rollouts
    assert any(r.finish_reason == "stop" for r in rollouts)
    for rollout in rollouts:
        before = spell(rollout.completion_ids[:-1])
        assert rollout.text == spell(rollout.completion_ids)
        assert not any(string in before for string in strings)
        stopped = any(string in rollout.text for string in strings)
        assert rollout.finish_reason == ("stop" if stopped else "length")


def test_a_stop_string_is_found_past_many_tokens_without_text(lab: Lab) -> None:
    def spell(ids: Sequence[int]) -> str:
        return "A" * bool(ids) + "B" * (len(ids) >= 30)

    request = lab.request("a", max_tokens=40, stop_strings=("AB",))
    rollout = lab.run(flat(lab), [request], decode=spell)["a"].rollouts[0]
    assert (len(rollout.completion_ids), rollout.finish_reason) == (30, "stop")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_generator_samples_near_the_full_one(lab: Lab, dtype: torch.dtype) -> None:
    decoder = lab.decoder().to(dtype)
    decoder.model.fill_rope(decoder.config)
    group = lab.run(decoder, [lab.request("a", size=4)], dtype=dtype)["a"]
    full = decoder.float()
    full.model.fill_rope(full.config)
    assert all(lab.gap(full, (3, 1, 4), rollout) < 0.3 for rollout in group.rollouts)
