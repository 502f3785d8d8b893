"""Masks, least lengths, forced prefixes, and what is recorded beside the tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from headrace.generators.torch_engine.masks import TokenMasks
from headrace.generators.torch_engine.rollout_state import sampling_rows
from headrace.generators.torch_engine.sampling import draw, uniforms
from headrace.kept_support import decode
from headrace.models.decoder import Decoder
from headrace.types import Rollout, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

EOS = 7
VOCABULARY = 50
PROMPT = (3, 1, 4)


def saying(lab: Lab, token: int | None) -> Decoder:
    """A decoder that says ``token`` whatever came before; None: each token alike."""
    decoder = lab.decoder()
    for parameter in decoder.parameters():
        parameter.zero_()
    if token is not None:
        decoder.model.embed_tokens.weight[:, 0] = 1.0
        decoder.model.norm.weight.fill_(1.0)
        decoder.lm_head.weight[token, 0] = 30.0
    return decoder


def rollouts_of(lab: Lab, decoder: Decoder, **sampling: Any) -> tuple[Rollout, ...]:  # noqa: ANN401 - any parameter
    size = sampling.pop("size", 6)
    return lab.run(decoder, [lab.request("a", PROMPT, size=size, **sampling)])["a"].rollouts


def chosen_logprobs(logits: Tensor, rollout: Rollout) -> list[float]:
    """Of the rollout's tokens under ``logits`` [T, V]."""
    ids = torch.tensor(rollout.completion_ids).unsqueeze(1)
    found: list[float] = torch.log_softmax(logits, -1).gather(1, ids).squeeze(1).tolist()
    return found


def test_no_stop_id_is_sampled_before_the_least_length(lab: Lab) -> None:
    for rollout in rollouts_of(lab, saying(lab, EOS), min_tokens=3, stop_token_ids=(EOS, 8)):
        assert not {EOS, 8} & {*rollout.completion_ids[:3]}
        assert (rollout.completion_ids[3:], rollout.finish_reason) == ((EOS,), "stop")
        # The 48 others share what the two stop ids leave.
        expected = [-math.log(48)] * 3 + [0.0]
        assert rollout.generator_logprobs == pytest.approx(expected, abs=1e-5)


def test_a_least_length_as_long_as_the_longest_leaves_no_other(lab: Lab) -> None:
    kw: dict[str, Any] = {"min_tokens": 8, "max_tokens": 8, "stop_token_ids": (EOS,)}
    for rollout in rollouts_of(lab, saying(lab, EOS), **kw):
        assert (len(rollout.completion_ids), rollout.finish_reason) == (8, "length")
        assert EOS not in rollout.completion_ids


def literal_end(text: str, string: str, min_tokens: int) -> int | None:
    """Tokens of one character each: the first that completes ``string`` and may end the rollout."""
    for count in range(min_tokens + 1, len(text) + 1):
        if text[:count].endswith(string):
            return count
    return None


@pytest.mark.parametrize("min_tokens", [0, 5, 12])
def test_a_stop_string_completed_before_the_least_length_ends_nothing_then_or_later(
    lab: Lab, min_tokens: int
) -> None:
    kw: dict[str, Any] = {"allowed_token_ids": (1, 2), "max_tokens": 30, "size": 20}
    kw |= {"stop_strings": ("ABA", "zz"), "min_tokens": min_tokens}
    early = 0
    for rollout in rollouts_of(lab, saying(lab, None), **kw):
        early += "ABA" in rollout.text[:min_tokens]
        end = literal_end(rollout.text, "ABA", min_tokens)
        assert len(rollout.completion_ids) == (end or 30)
        assert rollout.finish_reason == ("stop" if end else "length")
    assert early or min_tokens == 0, "otherwise nothing was tested"


def test_a_stop_string_within_a_forced_prefix_ends_nothing(lab: Lab) -> None:
    kw: dict[str, Any] = {"forced_prefix": (1, 2, 3), "stop_strings": ("AB", "BCD")}
    (rollout,) = rollouts_of(lab, saying(lab, 5), size=1, **kw)
    assert rollout.text == "ABCEEEEE"
    (rollout,) = rollouts_of(lab, saying(lab, 4), size=1, **kw)
    assert rollout.text == "ABCD"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_masked_log_probs_are_those_of_what_the_mask_leaves(lab: Lab, temperature: float) -> None:
    decoder = lab.decoder()
    masks: dict[str, dict[str, Any]] = {
        "allowed": {"allowed_token_ids": (2, 5, 6, 40, 49)},
        "banned": {"banned_token_ids": (0, 1, 2, 3)},
        "both": {"allowed_token_ids": (2, 5, 6), "banned_token_ids": (5,)},
        "none": {},
    }
    requests = [
        lab.request(name, PROMPT, size=3, seed=i, temperature=temperature, **mask)
        for i, (name, mask) in enumerate(masks.items())
    ]
    groups = lab.run(decoder, requests)
    for name, mask in masks.items():
        allowed = {*mask.get("allowed_token_ids", range(VOCABULARY))}
        allowed -= {*mask.get("banned_token_ids", ())}
        outside = [token for token in range(VOCABULARY) if token not in allowed]
        for rollout in groups[name].rollouts:
            assert {*rollout.completion_ids} <= allowed
            logits = lab.logits(decoder, PROMPT, rollout.completion_ids) / temperature
            logits[:, outside] = -math.inf
            expected = chosen_logprobs(logits, rollout)
            assert rollout.generator_logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("is_early", [True, False])
def test_each_rollout_keeps_its_mask_when_others_leave(lab: Lab, is_early: bool) -> None:
    requests = []
    for index in range(5):
        allowed, longest = tuple(range(10 * index, 10 * index + 10)), 3 + 3 * index
        kw: dict[str, Any] = {"allowed_token_ids": allowed, "max_tokens": longest}
        kw |= {"min_tokens": longest if is_early else 0, "stop_token_ids": (allowed[0],)}
        requests.append(lab.request(str(index), PROMPT, size=2, seed=index, **kw))
    for name, group in lab.run(saying(lab, None), requests).items():
        for rollout in group.rollouts:
            assert {token // 10 for token in rollout.completion_ids} == {int(name)}
            assert not is_early or 10 * int(name) not in rollout.completion_ids


def test_greedy_takes_the_best_of_what_the_mask_leaves(lab: Lab) -> None:
    decoder = lab.decoder()
    best = rollouts_of(lab, decoder, size=1, temperature=0.0)[0].completion_ids[0]
    (rollout,) = rollouts_of(lab, decoder, size=1, temperature=0.0, banned_token_ids=(best,))
    logits = lab.logits(decoder, PROMPT, rollout.completion_ids)
    logits[:, best] = -math.inf
    assert list(rollout.completion_ids) == logits.argmax(-1).tolist()


def test_a_mask_is_held_once_whoever_shares_it_and_no_longer_than_it_runs() -> None:
    masks = TokenMasks()
    ban = SamplingParams(banned_token_ids=(1,))
    alike = SamplingParams(banned_token_ids=(1,), temperature=0.5)
    late_stop = SamplingParams(stop_token_ids=(2,), min_tokens=4)
    early, late = masks.assign([ban, SamplingParams(), alike, late_stop, ban])
    assert (early.tolist(), late.tolist()) == ([1, 0, 1, 2, 1], [1, 0, 1, 0, 1])
    forbidden = masks.forbidden(early, 4, torch.device("cpu"))
    assert forbidden is not None
    assert forbidden.nonzero().tolist() == [[0, 1], [2, 1], [3, 2], [4, 1]]
    assert masks.forbidden(late[[1, 3]], 4, torch.device("cpu")) is None
    masks.assign([late_stop])
    assert len(masks) == 1
    masks.assign([SamplingParams()])
    assert len(masks) == 0


@pytest.mark.parametrize("on", [{}, {"raw_logprobs": True, "kept_support": True, "top_p": 0.9}])
def test_every_completion_begins_with_the_forced_prefix(lab: Lab, on: dict[str, Any]) -> None:
    decoder, prefix = lab.decoder(), (9, 8, 7, 6, 5)
    kw: dict[str, Any] = {"forced_prefix": prefix, "stop_token_ids": (8,), "max_tokens": 12} | on
    found = rollouts_of(lab, decoder, **kw)
    assert len({rollout.completion_ids for rollout in found}) == 6
    for rollout in found:
        length = len(rollout.completion_ids)
        assert rollout.completion_ids[:5] == prefix
        assert rollout.finish_reason == "stop" or length == 12
        assert rollout.loss_mask == (False,) * 5 + (True,) * (length - 5)
        assert rollout.generator_logprobs[:5] == (0.0,) * 5
        assert rollout.version_spans == (VersionSpan(policy_version=1, start=0, end=length),)
        assert rollout.text == lab.decode(rollout.completion_ids)
        if on:
            assert rollout.raw_logprobs is not None
            assert rollout.kept_support is not None
            assert rollout.raw_logprobs[:5] == (0.0,) * 5
            assert rollout.kept_support[:5] == (b"",) * 5
            assert all(rollout.kept_support[5:])
        else:
            expected = chosen_logprobs(lab.logits(decoder, PROMPT, rollout.completion_ids), rollout)
            assert rollout.generator_logprobs[5:] == pytest.approx(expected[5:], abs=1e-5)


def test_a_forced_prefix_counts_in_the_least_length(lab: Lab) -> None:
    kw: dict[str, Any] = {"forced_prefix": (1, 2), "stop_token_ids": (EOS,)}
    (rollout,) = rollouts_of(lab, saying(lab, EOS), size=1, min_tokens=2, **kw)
    assert rollout.completion_ids == (1, 2, EOS)
    (rollout,) = rollouts_of(lab, saying(lab, EOS), size=1, min_tokens=4, **kw)
    assert (len(rollout.completion_ids), rollout.completion_ids[-1]) == (5, EOS)


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 0.6},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3, "temperature": 1.4},
    "min_p": {"min_p": 0.2},
    "banned": {"banned_token_ids": tuple(range(25))},
    "greedy": {"temperature": 0.0},
    "greedy, banned, filtered": {"temperature": 0.0, "banned_token_ids": (1, 2, 3), "top_k": 4},
    "all": {"temperature": 0.7, "banned_token_ids": (1, 2), "top_p": 0.9, "min_p": 0.05},
}


def test_raw_log_probs_are_those_of_the_logits_as_they_are(lab: Lab) -> None:
    decoder = lab.decoder()
    requests = [
        lab.request(name, PROMPT, size=2, seed=i, raw_logprobs=True, **changes)
        for i, (name, changes) in enumerate(CHANGES.items())
    ]
    groups = lab.run(decoder, [*requests, lab.request("without", PROMPT, temperature=0.5)])
    for name in CHANGES:
        for rollout in groups[name].rollouts:
            expected = chosen_logprobs(lab.logits(decoder, PROMPT, rollout.completion_ids), rollout)
            assert rollout.raw_logprobs == pytest.approx(expected, abs=1e-5)
            assert (rollout.raw_logprobs == rollout.generator_logprobs) is (name == "plain")
    assert groups["without"].rollouts[0].raw_logprobs is None


@pytest.mark.parametrize("name", [*CHANGES])
def test_the_log_prob_is_that_of_a_softmax_over_the_recorded_support(lab: Lab, name: str) -> None:
    decoder, changes = lab.decoder(), CHANGES[name]
    filtered = bool(changes.keys() & {"top_p", "top_k", "min_p"})
    temperature = changes.get("temperature", 1.0) or 1.0
    for rollout in rollouts_of(lab, decoder, kept_support=True, **changes):
        assert (rollout.kept_support is not None) is filtered
        logits = lab.logits(decoder, PROMPT, rollout.completion_ids)
        for place, packed in enumerate(rollout.kept_support or ()):
            support = decode(packed).tolist()
            kept = logits[place, support] / temperature
            at = support.index(rollout.completion_ids[place])
            literal = float(kept[at] - kept.logsumexp(0))
            assert rollout.generator_logprobs[place] == pytest.approx(literal, abs=1e-5)
            assert not {*support} & {*changes.get("banned_token_ids", ())}
            assert len(support) == 1 or changes.get("temperature") != 0


def test_the_recorded_support_is_exactly_what_could_be_drawn() -> None:
    params = SamplingParams(top_p=0.6, top_k=30, temperature=1.3, kept_support=True)
    logits = 2 * torch.randn(1, 300, generator=torch.Generator().manual_seed(3))
    count = 3000
    uniform = uniforms(torch.zeros(count, dtype=torch.int64), torch.arange(count), logits.device)
    drawn = draw(logits.repeat(count, 1), sampling_rows([params] * count), uniform)
    assert len({*drawn.kept_support.values()}) == 1
    assert decode(drawn.kept_support[0]).tolist() == sorted({*drawn.ids.tolist()})


def test_a_mask_needs_no_vocabulary_of_its_own(lab: Lab) -> None:
    """A stop id that the model lacks bans nothing before the least length."""
    kw: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (EOS, 60), "max_tokens": 4}
    for rollout in rollouts_of(lab, saying(lab, EOS), **kw):
        assert rollout.completion_ids[2:] == (EOS,)
