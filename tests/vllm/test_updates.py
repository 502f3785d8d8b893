"""Weights on their way into vLLM: all of them or none, and every token says which it came from."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from vllm_lab import VllmLab, collect, engine_of, under_way

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.vllm import VllmGenerator
from headrace.models.weights import weight_update
from headrace.types import OnUpdate, RolloutGroup, WeightUpdate

MANY = 45
"""Tokens of a rollout that an update finds unfinished."""


def with_policy(generator: VllmGenerator, on_update: OnUpdate) -> VllmGenerator:
    generator._on_update = on_update
    return generator


async def updated_midway(
    generator: VllmGenerator, lab: VllmLab, update: WeightUpdate
) -> tuple[RolloutGroup, WeightUpdate]:
    """Return a group whose rollouts had begun when ``update`` came."""
    request = lab.request(size=3, max_tokens=MANY)
    call = asyncio.ensure_future(collect(generator, [request]))
    await under_way(generator, call)
    await generator.update_weights(update)
    (group,) = (await call).values()
    return group, update


def test_nothing_is_sampled_before_the_first_weights(lab: VllmLab) -> None:
    with pytest.raises(GeneratorFailure, match="before the first update_weights"):
        lab.run(collect(lab.generator(), [lab.request()]))


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_rollouts_that_go_on_have_a_span_for_each_version(
    lab: VllmLab, shared: VllmGenerator, on_update: OnUpdate
) -> None:
    before = lab.update(seed=1)
    lab.run(with_policy(shared, on_update).update_weights(before))
    group, after = lab.run(updated_midway(shared, lab, lab.update(seed=2)))
    versions = (before.policy_version, after.policy_version)
    for rollout in group.rollouts:
        assert tuple(span.policy_version for span in rollout.version_spans) == versions
        assert rollout.version_spans[-1].end == MANY
        cut = rollout.version_spans[0].end
        old, new = (
            lab.logprobs(update.tensors, group.prompt.token_ids, rollout)
            for update in (before, after)
        )
        assert rollout.generator_logprobs[:cut] == pytest.approx(old[:cut], abs=2e-4)
        whole = list(rollout.generator_logprobs[cut:])
        if on_update == "recompute":
            assert whole == pytest.approx(new[cut:], abs=2e-4)
        else:
            assert whole != pytest.approx(new[cut:], abs=2e-4), "the old keys were kept"


def test_with_wait_rollouts_end_under_the_weights_they_began_with(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    before = lab.update(seed=1)
    lab.run(with_policy(shared, "wait").update_weights(before))
    group, after = lab.run(updated_midway(shared, lab, lab.update(seed=2)))
    assert {rollout.oldest_version for rollout in group.rollouts} == {before.policy_version}
    assert all(len(rollout.version_spans) == 1 for rollout in group.rollouts)
    (next_one,) = lab.run(collect(shared, [lab.request()])).values()
    assert next_one.oldest_version == after.policy_version


def test_with_restart_rollouts_begin_again_under_the_new_weights(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    lab.run(with_policy(shared, "restart").update_weights(lab.update(seed=1)))
    group, after = lab.run(updated_midway(shared, lab, lab.update(seed=2)))
    for rollout in group.rollouts:
        (span,) = rollout.version_spans
        assert (span.policy_version, span.end) == (after.policy_version, MANY)
        expected = lab.logprobs(after.tensors, group.prompt.token_ids, rollout)
        assert rollout.generator_logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("on_update", ["wait", "keep"])
def test_no_key_of_old_weights_serves_a_rollout_that_begins_under_new_ones(
    lab: VllmLab, shared: VllmGenerator, on_update: OnUpdate
) -> None:
    prompt = [1 + k % 9 for k in range(40)]  # more than a cache block
    with_policy(shared, on_update)
    for seed in (1, 2):
        update = lab.update(seed=seed)
        lab.run(shared.update_weights(update))
        (group,) = lab.run(collect(shared, [lab.request(prompt=prompt)])).values()
        for rollout in group.rollouts:
            expected = lab.logprobs(update.tensors, prompt, rollout)
            assert rollout.generator_logprobs == pytest.approx(expected, abs=2e-4)
        assert shared.metrics()["generator/cache/found_share"] > 0, "the group shared its prompt"


def broken_updates(lab: VllmLab) -> dict[str, WeightUpdate]:
    whole = lab.weights(seed=2)
    name = next(iter(whole))
    less = {key: tensor for key, tensor in whole.items() if key != name}
    changed = {
        "missing": less,
        "extra": {**whole, "model.extra.weight": torch.zeros(2, 2)},
        "mis-shaped": {**whole, name: whole[name][:, :-1]},
        "another dtype": {**whole, name: whole[name].half()},
    }
    updates = {kind: weight_update(99, tensors) for kind, tensors in changed.items()}
    good = weight_update(99, whole)
    return {**updates, "checksum": replace(good, checksum=good.checksum + 1)}


@pytest.mark.parametrize("kind", ["missing", "extra", "mis-shaped", "another dtype"])
def test_an_update_that_does_not_fit_is_refused_whole_and_the_old_weights_go_on(
    lab: VllmLab, shared: VllmGenerator, kind: str
) -> None:
    good = lab.update(seed=1)
    lab.run(with_policy(shared, "wait").update_weights(good))
    before = engine_of(shared)
    with pytest.raises(WeightSyncError, match="version 99"):
        lab.run(shared.update_weights(broken_updates(lab)[kind]))
    assert engine_of(shared) is before
    (group,) = lab.run(collect(shared, [lab.request()])).values()
    assert group.oldest_version == good.policy_version
    expected = lab.logprobs(good.tensors, group.prompt.token_ids, group.rollouts[0])
    assert group.rollouts[0].generator_logprobs == pytest.approx(expected, abs=2e-4)


def test_what_the_engine_holds_was_read_back_and_equals_what_was_published(
    lab: VllmLab, shared: VllmGenerator
) -> None:
    update = lab.update(seed=1)
    lab.run(with_policy(shared, "wait").update_weights(update))
    report = shared._supervisor.report
    assert report["checksum"] == update.checksum
    assert report["num_unread"] == 0
    assert report["num_compared"] + report["num_probed"] == len(update.tensors)
