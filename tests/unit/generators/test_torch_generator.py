"""The role: weights, versions, failures, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators import TorchGenerator, torch_generator
from headrace.types import Rollout, VersionSpan, WeightUpdate

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

HANG_SECONDS = 240


def check(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` and see that it ends."""

    async def main() -> None:
        await asyncio.wait_for(work(), HANG_SECONDS)

    asyncio.run(main())


async def fails(generator: TorchGenerator, lab: Lab, requests: Sequence[Any]) -> BaseException:
    with pytest.raises(GeneratorFailure) as caught:
        await lab.collect(generator, requests)
    return caught.value


def test_it_refuses_to_generate_before_its_first_weights(lab: Lab) -> None:
    async def work() -> None:
        generator = lab.generator(lab.config())
        assert "before the first" in str(await fails(generator, lab, [lab.request("a")]))
        await generator.close()

    check(work)


def test_nothing_asked_is_nothing_yielded(lab: Lab) -> None:
    assert lab.run(lab.decoder(), []) == {}


def test_every_token_carries_the_version_of_its_weights(lab: Lab) -> None:
    async def work() -> None:
        generator = lab.generator(lab.config())
        for version in (4, 5, 9):
            await generator.update_weights(lab.update(lab.decoder(version), version))
            group = (await lab.collect(generator, [lab.request("a", size=2)]))["a"]
            for rollout in group.rollouts:
                span = VersionSpan(policy_version=version, start=0, end=len(rollout.completion_ids))
                assert rollout.version_spans == (span,)
        await generator.close()

    check(work)


def test_an_update_waits_for_what_runs_and_no_token_mixes_versions(lab: Lab) -> None:
    decoders = {version: lab.decoder(version) for version in range(1, 5)}

    async def work() -> None:
        generator = lab.generator(lab.config(), max_concurrent_rollouts=3)
        await generator.update_weights(lab.update(decoders[1], 1))
        tasks: list[asyncio.Future[Any]] = []
        for version in (2, 3, 4):
            for part in range(3):
                requests = [lab.request(f"{version}/{part}", size=4, max_tokens=40, seed=part)]
                tasks.append(asyncio.ensure_future(lab.collect(generator, requests)))
                await asyncio.sleep(0.002)
            update = lab.update(decoders[version], version)
            tasks.append(asyncio.ensure_future(generator.update_weights(update)))
        done = await asyncio.gather(*tasks)
        seen = set()
        for found in filter(None, done):
            for group in found.values():
                for rollout in group.rollouts:
                    (span,) = rollout.version_spans
                    seen.add(span.policy_version)
                    decoder = decoders[span.policy_version]
                    assert lab.gap(decoder, group.prompt.token_ids, rollout) < 1e-5
        assert seen == {1, 2, 3}
        await generator.close()

    check(work)


def test_what_is_asked_after_an_update_is_sampled_from_it_as_by_a_cold_engine(lab: Lab) -> None:
    first, second = lab.decoder(1), lab.decoder(2)
    requests = [lab.request("a", range(1, 30), size=4)]
    expected = [lab.run(decoder, requests) for decoder in (first, second)]

    async def work() -> None:
        generator = lab.generator(lab.config())
        await generator.update_weights(lab.update(first, 1))
        early = asyncio.ensure_future(lab.collect(generator, requests))
        await asyncio.sleep(0)
        update = asyncio.ensure_future(generator.update_weights(lab.update(second, 1)))
        await asyncio.sleep(0)
        late = await lab.collect(generator, requests)
        assert update.done()
        assert [await early, late] == expected
        await generator.close()

    check(work)


def test_a_tied_head_follows_the_embedding(lab: Lab) -> None:
    decoder = lab.decoder(tie_word_embeddings=True)

    async def work() -> None:
        generator = lab.generator(decoder.config)
        await generator.update_weights(lab.update(decoder))
        decoder.model.embed_tokens.weight.mul_(-1.5)
        await generator.update_weights(lab.update(decoder, 2))
        group = (await lab.collect(generator, [lab.request("a", size=3)]))["a"]
        assert all(lab.gap(decoder, (3, 1, 4), rollout) < 1e-5 for rollout in group.rollouts)
        await generator.close()

    check(work)


def test_the_learner_may_change_its_tensors_once_the_update_has_returned(lab: Lab) -> None:
    decoder, requests = lab.decoder(), [lab.request("a", size=3)]
    expected = lab.run(decoder, requests)

    async def work() -> None:
        generator = lab.generator(decoder.config)
        await generator.update_weights(lab.update(decoder))
        for parameter in decoder.parameters():
            parameter.zero_()
        assert await lab.collect(generator, requests) == expected
        await generator.close()

    check(work)


def test_a_wrong_checksum_is_an_error_and_nothing_is_sampled_from_such_weights(lab: Lab) -> None:
    async def work() -> None:
        generator = lab.generator(lab.config())
        good = lab.update(lab.decoder(), 1)
        await generator.update_weights(good)
        bad = WeightUpdate(policy_version=2, tensors=good.tensors, checksum=good.checksum + 1)
        with pytest.raises(WeightSyncError, match="version 2 was not loaded: checksum"):
            await generator.update_weights(bad)
        with pytest.raises(GeneratorFailure, match="version 2 did not arrive whole"):
            await lab.collect(generator, [lab.request("a")])
        await generator.update_weights(lab.update(lab.decoder(), 3))
        groups = await lab.collect(generator, [lab.request("a")])
        assert groups["a"].oldest_version == 3
        await generator.close()

    check(work)


def test_a_failure_in_the_engine_reaches_every_waiter_and_the_thread_lives_on(lab: Lab) -> None:
    faulty = True

    def decode(ids: Sequence[int]) -> str:
        if faulty:
            raise KeyError(ids[-1] * 0)
        return lab.decode(ids)  # type: ignore[no-any-return]

    async def work() -> None:
        nonlocal faulty
        generator = lab.generator(lab.config(), decode=decode)
        await generator.update_weights(lab.update(lab.decoder()))
        calls = [fails(generator, lab, [lab.request(name, max_tokens=20)]) for name in "abc"]
        caught = await asyncio.gather(*calls)
        assert all("KeyError: 0" in str(failure) for failure in caught)
        assert all(isinstance(failure.__cause__, KeyError) for failure in caught)
        assert len({id(failure) for failure in caught}) == 3
        faulty = False
        assert "d" in await lab.collect(generator, [lab.request("d")])
        await generator.close()

    check(work)


def test_weights_that_are_not_finite_fail_the_call_and_good_ones_heal_it(lab: Lab) -> None:
    broken = lab.decoder()
    broken.model.norm.weight.fill_(float("nan"))

    async def work() -> None:
        generator = lab.generator(lab.config())
        await generator.update_weights(lab.update(broken, 7))
        failure = str(await fails(generator, lab, [lab.request("a", size=8)]))
        assert "policy version 7 were not finite" in failure
        assert "lower learner.optimizer.learning_rate" in failure
        await generator.update_weights(lab.update(lab.decoder(), 8))
        group = (await lab.collect(generator, [lab.request("b")]))["b"]
        assert group.rollouts[0].finish_reason == "length"
        await generator.close()

    check(work)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": range(1, 40), "max_tokens": 26}, "39 prompt tokens .* 26 exceed .* 64 positions"),
        ({"ids": (3, 50)}, "vocabulary of 50"),
        ({"ids": (-1, 3)}, "vocabulary of 50"),
        ({"size": 0}, "group_size = 0"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0 must be above 0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"allowed_token_ids": (3, 50)}, r"allowed_token_ids = \[50\]: .* end at 49"),
        ({"banned_token_ids": (51, 3)}, r"banned_token_ids = \[51\]"),
        ({"forced_prefix": (50, 3)}, r"forced_prefix = \[50\]"),
        ({"banned_token_ids": tuple(range(50))}, "leave no token"),
        (
            {"banned_token_ids": range(48), "stop_token_ids": (48, 49, 70), "min_tokens": 1},
            "stop ids before min_tokens leave no token",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_group_and_reason(
    lab: Lab, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(GeneratorFailure, match=f"group bad.*{words}"):
        lab.run(lab.decoder(), [lab.request("good"), lab.request("bad", **changes)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"forced_prefix": (9,)},
            r"begins with \(1,\) and not with sampling.forced_prefix = \(9,\)",
        ),
        ({"raw_logprobs": True}, "has no raw_logprobs"),
        ({"kept_support": True, "top_k": 3}, "has no kept_support"),
    ],
)
def test_a_begun_rollout_that_lacks_what_is_asked_for_is_refused(
    lab: Lab, changes: dict[str, Any], words: str
) -> None:
    begun = Rollout(
        rollout_index=1,
        completion_ids=(1, 2),
        loss_mask=(True, True),
        generator_logprobs=(-1.0, -1.0),
        version_spans=(VersionSpan(policy_version=0, start=0, end=2),),
        finish_reason="abort",
        text="AB",
    )
    request = replace(lab.request("bad", size=2, **changes), begun=(begun,))
    with pytest.raises(GeneratorFailure, match=f"group bad.*begun rollout 1 {words}"):
        lab.run(lab.decoder(), [request])


def test_a_rollout_may_use_every_position_of_the_model(lab: Lab) -> None:
    group = lab.run(lab.decoder(), [lab.request("a", range(1, 40), max_tokens=25)])["a"]
    assert len(group.rollouts[0].completion_ids) == 25


def test_one_call_may_not_use_a_group_id_twice_and_two_calls_may(lab: Lab) -> None:
    with pytest.raises(GeneratorFailure, match=r"group a .*twice"):
        lab.run(lab.decoder(), [lab.request("a"), lab.request("a")])

    async def work() -> None:
        generator = lab.generator(lab.config())
        await generator.update_weights(lab.update(lab.decoder()))
        requests = [lab.request("a", (token,), max_tokens=9 - token) for token in range(1, 6)]
        found = await asyncio.gather(*(lab.collect(generator, [r]) for r in requests))
        assert [groups["a"].prompt for groups in found] == [r.prompt for r in requests]
        await generator.close()

    check(work)


def test_closing_ends_open_calls_and_updates_and_later_ones_are_refused(lab: Lab) -> None:
    async def work() -> None:
        generator = lab.generator(lab.config(), max_concurrent_rollouts=1)
        update = lab.update(lab.decoder())
        await generator.update_weights(update)
        long = [lab.request("a", size=400, max_tokens=60)]
        call = asyncio.ensure_future(fails(generator, lab, long))
        await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(generator.update_weights(update))
        await asyncio.sleep(0.01)
        await asyncio.gather(generator.close(), generator.close())
        assert "closed" in str(await call)
        with pytest.raises(WeightSyncError, match="closed"):
            await waiting
        assert "closed" in str(await fails(generator, lab, [lab.request("b")]))
        with pytest.raises(WeightSyncError, match="closed"):
            await generator.update_weights(update)
        await generator.close()

    check(work)


def test_what_nobody_waits_for_any_more_is_taken_back(lab: Lab) -> None:
    async def work() -> None:
        generator = lab.generator(lab.config(), max_concurrent_rollouts=2)
        await generator.update_weights(lab.update(lab.decoder()))
        long = [lab.request("a", size=2000, max_tokens=60)]
        call = asyncio.ensure_future(lab.collect(generator, long))
        await asyncio.sleep(0.02)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await lab.collect(generator, [lab.request("b")])
        assert not generator._engine._owners, "of the 2000 rollouts of the call given up"
        assert not generator._engine._engine.has_work
        await generator.close()

    check(work)


def test_a_cancelled_update_is_not_loaded(lab: Lab) -> None:
    async def work() -> None:
        generator = lab.generator(lab.config(), max_concurrent_rollouts=1)
        await generator.update_weights(lab.update(lab.decoder(), 1))
        call = asyncio.ensure_future(lab.collect(generator, [lab.request("a", size=8)]))
        await asyncio.sleep(0)
        update = asyncio.ensure_future(generator.update_weights(lab.update(lab.decoder(2), 2)))
        await asyncio.sleep(0)
        update.cancel()
        await asyncio.gather(call, update, return_exceptions=True)
        group = (await lab.collect(generator, [lab.request("b")]))["b"]
        assert group.oldest_version == 1
        await generator.close()

    check(work)


def test_an_event_loop_that_ends_early_does_not_hurt_the_next(lab: Lab) -> None:
    generator = lab.generator(lab.config())

    async def begin() -> None:
        await generator.update_weights(lab.update(lab.decoder()))
        stream = generator.generate([lab.request("a", size=50, max_tokens=60), lab.request("b")])
        await anext(stream)

    asyncio.run(begin())

    async def work() -> None:
        assert "c" in await lab.collect(generator, [lab.request("c")])
        await generator.close()

    check(work)


def test_an_engine_that_stands_still_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def decode(_ids: Sequence[int]) -> str:
        stuck.wait(HANG_SECONDS)
        return ""

    async def work() -> None:
        generator = lab.generator(lab.config(), decode=decode)
        await generator.update_weights(lab.update(lab.decoder()))
        monkeypatch.setattr(torch_generator, "STALL_SECONDS", 0.2)
        failure = await fails(generator, lab, [lab.request("a", max_tokens=1)])
        assert "no engine step" in str(failure)
        assert "groups a" in str(failure)
        stuck.set()
        monkeypatch.setattr(torch_generator, "STALL_SECONDS", HANG_SECONDS)
        await generator.close()

    check(work)


def test_seeds_of_torch_play_no_part(lab: Lab) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(lab.run(lab.decoder(), [lab.request("a", size=3)]))
    assert found[0] == found[1]


def test_metrics_are_of_the_time_since_the_last_call(lab: Lab) -> None:
    decoder = lab.decoder()

    async def main() -> list[dict[str, float]]:
        generator = lab.generator(decoder.config)
        await generator.update_weights(lab.update(decoder))
        await lab.collect(generator, [lab.request("a", size=2)])
        found = [dict(generator.metrics()), dict(generator.metrics())]
        await generator.close()
        return found

    first, second = asyncio.run(main())
    assert first["generator/engine/num_steps"] > 0
    assert first["generator/idle/weights_seconds"] > 0.0
    assert second["generator/engine/num_steps"] == 0
    assert "generator/rollout/p50_seconds" not in second
