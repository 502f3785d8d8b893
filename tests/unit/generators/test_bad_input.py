"""What can be wrong with requests, weights and logits: refused whole, named, and survived."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators import TorchGenerator
from headrace.generators.failure_watch import (
    MAX_FAILED_SHARE,
    MIN_FAILED,
    RECENT,
    FailureWatch,
)
from headrace.generators.torch_engine.kv_cache import block_bytes
from headrace.models.decoder import Decoder
from headrace.types import GenerationRequest, OnUpdate, RolloutGroup, WeightUpdate

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

HANG_SECONDS = 240
BAD = 9
"""A token whose embedding is not finite."""


def check(
    lab: Lab,
    decoder: Decoder,
    work: Callable[[TorchGenerator], Awaitable[None]],
    **options: object,
) -> None:
    """Run ``work`` with a generator that holds version 1 of ``decoder``."""

    async def main() -> None:
        generator = lab.generator(decoder.config, **options)
        await generator.update_weights(lab.update(decoder))
        try:
            await asyncio.wait_for(work(generator), HANG_SECONDS)
        finally:
            await generator.close()

    asyncio.run(main())


# --- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": range(1, 20), "max_tokens": 14}, "19 prompt .* 32 tokens that the cache holds"),
        ({"ids": range(1, 50)}, "49 prompt tokens .* 32 tokens that the cache holds"),
        ({"ids": (3, 50)}, "token ids 3 to 50 do not fit the vocabulary of 50"),
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"temperature": 1e-38}, "temperature = 1e-38 must be 0 or a number from 0.001 on"),
        ({"temperature": -1.0}, "temperature = -1.0 must be 0 or"),
        ({"temperature": math.nan}, "temperature = nan must be 0 or"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_is_served(
    lab: Lab, changes: dict[str, Any], words: str
) -> None:
    decoder = lab.decoder()

    async def work(generator: TorchGenerator) -> None:
        with pytest.raises(GeneratorFailure, match=f"group bad.*{words}"):
            await lab.collect(generator, [lab.request("good"), lab.request("bad", **changes)])
        assert generator._engine.num_steps == 0
        assert "next" in await lab.collect(generator, [lab.request("next")])

    two_blocks = 2 * block_bytes(decoder.config, 16, torch.float32)
    check(lab, decoder, work, max_cache_bytes=two_blocks)


def test_a_prompt_of_no_tokens_is_no_prompt(lab: Lab) -> None:
    with pytest.raises(ValueError, match="prompt a renders to no token"):
        lab.request("a", ())


def test_a_stop_string_that_never_comes_leaves_the_end_to_the_token_limit(lab: Lab) -> None:
    request = lab.request("a", size=3, max_tokens=20, stop_strings=("never said",))
    for rollout in lab.run(lab.decoder(), [request])["a"].rollouts:
        assert (len(rollout.completion_ids), rollout.finish_reason) == (20, "length")


# --- weights ------------------------------------------------------------------------------------

NORM = "model.norm.weight"


def without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NORM]


def with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.bias"] = tensors[NORM]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = torch.ones(1)


def of_another_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM].bfloat16()


@pytest.mark.parametrize("on_update", ["wait", "keep", "recompute", "restart"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without, f"{NORM} was not published"),
        (with_another, "model.norm.bias was published, and this model has no such weight"),
        (of_another_shape, rf"{NORM} is float32 \[1\], the generator holds float32 \[16\]"),
        (of_another_dtype, rf"{NORM} is bfloat16 \[16\], the generator holds float32"),
    ],
)
def test_weights_that_do_not_fit_are_refused_whole_and_the_old_ones_sample_on(
    lab: Lab, spoil: Callable[[dict[str, torch.Tensor]], None], words: str, on_update: OnUpdate
) -> None:
    decoder = lab.decoder()
    requests = [lab.request("a", size=2, max_tokens=50), lab.request("b", seed=1)]
    expected = lab.run(decoder, requests)
    tensors = dict(lab.update(lab.decoder(1), 2).tensors)
    spoil(tensors)
    update = WeightUpdate(policy_version=2, tensors=tensors, checksum=0)

    async def work(generator: TorchGenerator) -> None:
        call = asyncio.ensure_future(lab.collect(generator, requests[:1]))
        await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match=f"version 2 was not loaded: .*{words}"):
            await generator.update_weights(update)
        found = {**await call, **await lab.collect(generator, requests[1:])}
        lab.assert_alike(found, expected)

    check(lab, decoder, work, on_update=on_update)


MIXED = 0
"""What a model says whose parts are of different versions."""


def telling(lab: Lab, version: int) -> Decoder:
    """A decoder that says its version, but only with its own embedding, last norm and head."""
    decoder = lab.decoder(max_position_embeddings=1024)
    for parameter in decoder.parameters():
        parameter.zero_()
    decoder.model.embed_tokens.weight[:, version] = 1.0
    decoder.model.norm.weight.fill_(-1.0)
    decoder.model.norm.weight[version] = 1.0
    decoder.lm_head.weight[MIXED] = 30.0
    decoder.lm_head.weight[MIXED, version] = 0.0
    decoder.lm_head.weight[version, version] = 30.0
    return decoder


@pytest.mark.parametrize("part", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_telling_model_of_mixed_parts_does_not_pass_for_either_version(
    lab: Lab, part: str
) -> None:
    decoder = telling(lab, 2)
    dict(decoder.named_parameters())[part].copy_(dict(telling(lab, 3).named_parameters())[part])
    ids = lab.run(decoder, [lab.request("a", max_tokens=4)])["a"].rollouts[0].completion_ids
    assert not {2, 3} & set(ids[1:])


@pytest.mark.parametrize("on_update", ["wait", "keep", "recompute", "restart"])
def test_no_token_ever_comes_from_half_replaced_weights(lab: Lab, on_update: OnUpdate) -> None:
    async def work(generator: TorchGenerator) -> None:
        calls = []
        for version in range(2, 9):
            requests = [
                lab.request(f"{version}/{size}", size=size, max_tokens=40) for size in (1, 3)
            ]
            calls.append(asyncio.ensure_future(lab.collect(generator, requests)))
            await asyncio.sleep(0.005)
            if version % 3 == 0:
                await asyncio.gather(generator.pause(), generator.resume())
            await generator.update_weights(lab.update(telling(lab, version), version))
        groups = [group for found in await asyncio.gather(*calls) for group in found.values()]
        seen = set()
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert len(rollout.version_spans) == 1 or on_update in {"keep", "recompute"}
            for span in rollout.version_spans:
                said = set(rollout.completion_ids[span.start : span.end])
                assert said == {span.policy_version}
                seen |= said
        assert seen

    check(lab, telling(lab, 1), work, on_update=on_update, max_concurrent_rollouts=6)


# --- logits that are not finite -----------------------------------------------------------------


def poisoned(lab: Lab) -> Decoder:
    """A decoder that cannot go on after `BAD`, and else does what the clean one does."""
    decoder = lab.decoder()
    decoder.model.embed_tokens.weight[BAD] = math.nan
    return decoder


def many(lab: Lab) -> list[GenerationRequest]:
    return [
        lab.request(str(i), range(10 + i, 14 + 2 * i), size=4, seed=i, max_tokens=12)
        for i in range(8)
    ]


def assert_only_the_poisoned_ended_early(
    found: dict[str, RolloutGroup], clean: dict[str, RolloutGroup]
) -> int:
    num_failed = 0
    for name, group in clean.items():
        for one, other in zip(found[name].rollouts, group.rollouts, strict=True):
            ids = other.completion_ids
            fails = BAD in ids[:-1]
            length = ids.index(BAD) + 1 if fails else len(ids)
            assert one.completion_ids == ids[:length]
            assert one.finish_reason == ("error" if fails else other.finish_reason)
            assert all(map(math.isfinite, one.generator_logprobs))
            num_failed += fails
    return num_failed


@pytest.mark.parametrize("num_blocks", [30, 1000], ids=["blocks used again", "blocks to spare"])
@pytest.mark.parametrize(
    "controls", [{}, {"top_p": 0.99, "raw_logprobs": True, "kept_support": True}]
)
def test_a_rollout_whose_logits_are_not_finite_is_taken_out_and_no_other_notices(
    lab: Lab, num_blocks: int, controls: dict[str, Any]
) -> None:
    requests = [
        replace(request, sampling=replace(request.sampling, **controls)) for request in many(lab)
    ]
    clean = lab.run_out(lab.engine(lab.decoder()), requests)
    engine = lab.engine(poisoned(lab), num_blocks=num_blocks)
    engine._failures = Tolerant()
    for _ in range(2):  # a second time over blocks and names that the first one left
        found = lab.run_out(engine, requests)
        num_failed = assert_only_the_poisoned_ended_early(found, clean)
        assert 0 < num_failed < 16
        assert engine.num_held_blocks == 0
    assert engine.statistics.num_failed == 2 * num_failed
    assert len(engine.statistics.rollout_tokens) == 2 * (32 - num_failed)


class Tolerant(FailureWatch):
    def note(self, **_: int) -> None:
        pass


def test_a_prompt_that_cannot_be_read_costs_its_own_group_alone(lab: Lab) -> None:
    good = (20, 21, 22, 23)
    bad = lab.request("bad", (*good, BAD, 24, 25, 26, 27), size=3)
    others = [
        lab.request(f"{i}", (*good, 30 + i), size=2, seed=i, banned_token_ids=(BAD,))
        for i in range(3)
    ]
    expected = lab.run_out(lab.engine(lab.decoder()), others)
    engine = lab.engine(poisoned(lab), num_blocks=20)
    found = lab.run_out(engine, [bad, *others])
    ends = [(r.completion_ids, r.finish_reason) for r in found["bad"].rollouts]
    assert ends == [((), "error")] * 3
    assert engine.statistics.num_failed == 3
    for name, group in expected.items():
        ids = [rollout.completion_ids for rollout in found[name].rollouts]
        assert ids == [rollout.completion_ids for rollout in group.rollouts]
    # Neither is what it computed found by the next prompt that begins like it.
    again = lab.run_out(engine, [replace(bad, group_id="again")])
    assert {rollout.finish_reason for rollout in again["again"].rollouts} == {"error"}
    later = [replace(request, group_id=f"later {request.group_id}") for request in others]
    for name, group in lab.run_out(engine, later).items():
        ids = [rollout.completion_ids for rollout in group.rollouts]
        assert ids == [r.completion_ids for r in expected[name.removeprefix("later ")].rollouts]


def test_a_greedy_rollout_fails_like_any_other(lab: Lab) -> None:
    engine = lab.engine(poisoned(lab))
    group = lab.run_out(engine, [lab.request("a", (BAD,), temperature=0.0)])["a"]
    assert (group.rollouts[0].completion_ids, group.rollouts[0].finish_reason) == ((), "error")


def notes(watch: FailureWatch, *batches: tuple[int, int, int]) -> None:
    for num_failed, num_ended, num_running in batches:
        watch.note(num_failed=num_failed, num_ended=num_ended, num_running=num_running, version=7)


def test_a_rare_failure_stops_nothing_however_long_it_goes_on() -> None:
    one_in_eleven = [(1, 11, 32)] * 100
    assert MAX_FAILED_SHARE > 1 / 11
    notes(FailureWatch(), *one_in_eleven)


def test_a_few_failures_stop_nothing_whatever_their_share() -> None:
    notes(FailureWatch(), *[(1, 1, 1)] * (MIN_FAILED - 1), (0, 100, 100))


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([(1, 1, 1)] * MIN_FAILED, "8 of the last 8 rollouts"),
        ([(0, 200, 200), *[(1, 4, 32)] * 40], f"of the last {RECENT} rollouts"),
        ([(0, 300, 300), (9, 9, 9)], "all 9 running rollouts at once"),
    ],
    ids=["from the start", "a growing share", "all at once"],
)
def test_many_failures_stop_the_run_with_the_version_and_the_likely_cause(
    batches: Sequence[tuple[int, int, int]], words: str
) -> None:
    watch = FailureWatch()
    with pytest.raises(GeneratorFailure, match=words) as caught:
        notes(watch, *batches)
    assert "policy version 7" in str(caught.value)
    assert "NaN or infinities" in str(caught.value)
    notes(watch, (0, 50, 50), (1, 1, 1))  # what went before is forgotten


def test_failures_are_blamed_on_the_versions_that_they_happened_under() -> None:
    watch = FailureWatch()
    for version, num_failed in ((1, 5), (3, 2)):
        watch.note(num_failed=num_failed, num_ended=9, num_running=9, version=version)
    with pytest.raises(GeneratorFailure, match=r"policy versions 1 to 3 \(3 under 3\) were not"):
        watch.note(num_failed=1, num_ended=1, num_running=9, version=3)
    watch.note(num_failed=7, num_ended=300, num_running=300, version=4)
    with pytest.raises(GeneratorFailure, match=r"policy version 5 were .* all 8 running"):
        watch.note(num_failed=8, num_ended=8, num_running=8, version=5)


def test_a_run_of_failures_ends_the_call_and_the_generator_lives_on(lab: Lab) -> None:
    decoder = poisoned(lab)

    async def work(generator: TorchGenerator) -> None:
        with pytest.raises(GeneratorFailure, match="policy version 1 were not finite"):
            await lab.collect(generator, [lab.request("a", (BAD,), size=8), lab.request("b")])
        await generator.update_weights(lab.update(lab.decoder(), 2))
        rollouts = (await lab.collect(generator, many(lab)))["7"].rollouts
        assert {rollout.finish_reason for rollout in rollouts} == {"length"}

    check(lab, decoder, work)
