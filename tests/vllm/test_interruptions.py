"""Rollouts that stand still, are taken back, and go on, here or in the torch engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from vllm_lab import VllmLab, collect, under_way

from headrace.compute import ComputeThread
from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators import TorchGenerator
from headrace.generators.vllm import VllmGenerator
from headrace.types import RolloutGroup, WeightUpdate

MANY = 45


async def taken_back(generator: VllmGenerator, lab: VllmLab) -> RolloutGroup:
    call = asyncio.ensure_future(collect(generator, [lab.request(max_tokens=MANY)]))
    await under_way(generator, call)
    await generator.abort(["a"])
    return (await call)["a"]


def fresh(lab: VllmLab, generator: VllmGenerator) -> WeightUpdate:
    update = lab.update(seed=4)
    lab.run(generator.update_weights(update))
    return update


def check_continued(
    lab: VllmLab, update: WeightUpdate, cut: RolloutGroup, whole: RolloutGroup
) -> None:
    for before, after in zip(cut.rollouts, whole.rollouts, strict=True):
        begun = len(before.completion_ids)
        assert after.completion_ids[:begun] == before.completion_ids
        assert after.generator_logprobs[:begun] == before.generator_logprobs
        assert len(after.completion_ids) == MANY
        assert after.finish_reason == "length"
        expected = lab.logprobs(update.tensors, cut.prompt.token_ids, after)
        assert after.generator_logprobs == pytest.approx(expected, abs=2e-4)


def test_a_group_that_is_taken_back_keeps_its_tokens_and_goes_on_later(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    update = fresh(lab, shared)
    cut = lab.run(taken_back(shared, lab))
    for rollout in cut.rollouts:
        assert rollout.finish_reason == "abort"
        assert 3 <= len(rollout.completion_ids) < MANY
        assert {span.policy_version for span in rollout.version_spans} == {update.policy_version}
    request = lab.request(max_tokens=MANY, begun=cut.rollouts)
    whole = lab.run(collect(shared, [request]))["a"]
    check_continued(lab, update, cut, whole)


def test_the_torch_engine_goes_on_with_what_vllm_began(lab: VllmLab, shared: VllmGenerator) -> None:
    update = fresh(lab, shared)
    cut = lab.run(taken_back(shared, lab))
    request = lab.request(max_tokens=MANY, begun=cut.rollouts)

    async def go_on() -> RolloutGroup:
        compute = ComputeThread("torch", 1)
        other = TorchGenerator(lab.decoder.config, decode=lambda _: "", compute=compute)
        try:
            await other.update_weights(update)
            (group,) = [group async for group in other.generate([request])]
            return group
        finally:
            await other.close()
            compute.close()

    check_continued(lab, update, cut, lab.run(go_on()))


def test_begun_rollouts_that_ended_come_back_as_they_are(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    fresh(lab, shared)
    ended = lab.run(collect(shared, [lab.request()]))["a"].rollouts
    some = lab.run(collect(shared, [lab.request(begun=ended[:2])]))["a"].rollouts
    assert some[:2] == ended[:2]
    assert lab.run(collect(shared, [lab.request(begun=ended)]))["a"].rollouts == ended


def test_an_unknown_group_is_named_and_nothing_is_aborted(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    fresh(lab, shared)

    async def main() -> RolloutGroup:
        call = asyncio.ensure_future(collect(shared, [lab.request()]))
        await under_way(shared, call)
        with pytest.raises(GeneratorFailure, match="groups b, c: no open call"):
            await shared.abort(["a", "c", "b"])
        return (await call)["a"]

    assert {rollout.finish_reason for rollout in lab.run(main()).rollouts} == {"length"}


def test_nothing_is_sampled_while_paused_and_requests_wait(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    fresh(lab, shared)

    async def main() -> dict[str, RolloutGroup]:
        first = asyncio.ensure_future(collect(shared, [lab.request(max_tokens=MANY)]))
        await under_way(shared, first)
        await shared.pause()
        await shared.pause()
        second = asyncio.ensure_future(collect(shared, [lab.request("b")]))
        await asyncio.sleep(0.05)
        before = [len(flight.completion_ids) for flight in shared._in_air]
        await asyncio.sleep(0.2)
        assert [len(flight.completion_ids) for flight in shared._in_air] == before
        assert not second.done()
        shared._on_update = "wait"
        with pytest.raises(WeightSyncError, match="paused with unfinished rollouts"):
            await shared.update_weights(lab.update(seed=5))
        await shared.resume()
        await shared.resume()
        return await first | await second

    groups = lab.run(main())
    assert {len(r.completion_ids) for r in groups["a"].rollouts} == {MANY}
    assert {len(r.completion_ids) for r in groups["b"].rollouts} == {20}


def test_a_paused_group_can_be_taken_back(lab: VllmLab, shared: VllmGenerator) -> None:
    fresh(lab, shared)

    async def main() -> RolloutGroup:
        call = asyncio.ensure_future(collect(shared, [lab.request(max_tokens=MANY)]))
        await under_way(shared, call)
        await shared.pause()
        try:
            await shared.abort(["a"])
            return (await call)["a"]
        finally:
            await shared.resume()

    assert {rollout.finish_reason for rollout in lab.run(main()).rollouts} == {"abort"}


def test_what_nobody_waits_for_any_more_is_taken_back(lab: VllmLab, shared: VllmGenerator) -> None:
    fresh(lab, shared)

    async def main() -> None:
        call = asyncio.ensure_future(collect(shared, [lab.request(max_tokens=MANY)]))
        await under_way(shared, call)
        call.cancel()
        await asyncio.wait({call})
        assert not shared._in_air
        with pytest.raises(GeneratorFailure, match="groups a"):
            await shared.abort(["a"])

    lab.run(main())


def test_a_request_that_is_too_long_is_refused_before_anything_is_sampled(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    fresh(lab, shared)
    request = lab.request(max_tokens=60)
    with pytest.raises(GeneratorFailure, match="lower max_tokens"):
        lab.run(collect(shared, [lab.request("b"), request]))
    short = replace(request, sampling=replace(request.sampling, max_tokens=5))
    lab.run(collect(shared, [short]))
