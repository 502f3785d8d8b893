"""Sampling: what comes back, under which log-probs and versions, and from which server."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest
from sglang_server import EOS, VOCAB, Model, decode, logits_of

from headrace import kept_support
from headrace.errors import GeneratorFailure
from headrace.generators.sglang.draft import Draft
from headrace.generators.sglang.reply import Sampled
from headrace.types import Rollout, VersionSpan, derive_seed

if TYPE_CHECKING:
    from tests.unit.generators.sglang.conftest import Lab


ENDLESS: dict[str, Any] = {"stop_token_ids": (), "banned_token_ids": (EOS,)}
"""Sampling that only the limit ends."""


def logprob(weights: int, ids: list[int], token: int, temperature: float = 1.0) -> float:
    """Of ``token`` after ``ids``, all of whose keys and values are of ``weights``."""
    logits = logits_of(weights, [(i, weights) for i in ids]) / temperature
    return float(logits[token]) - math.log(sum(math.exp(x) for x in logits))


def test_a_rollout_has_the_tokens_log_probs_and_version_of_its_server(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(7)
            rollout = await site.one(lab.request(temperature=0.7, seed=5))
            ids, weights = [3, 1, 4], site.server.weights
            for token, found in zip(
                rollout.completion_ids, rollout.generator_logprobs, strict=True
            ):
                assert found == pytest.approx(logprob(weights, ids, token, 0.7), abs=1e-9)
                ids.append(token)
            length = len(rollout.completion_ids)
            assert rollout.version_spans == (VersionSpan(policy_version=7, start=0, end=length),)
            assert rollout.loss_mask == (True,) * length
            assert rollout.text == decode(rollout.completion_ids)
            assert rollout.raw_logprobs is None
            assert rollout.kept_support is None

    lab.run(work)


def test_it_refuses_to_generate_before_its_first_weights(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            with pytest.raises(GeneratorFailure, match="before the first update_weights"):
                await site.one(lab.request())
            assert site.server.seen == []

    lab.run(work)


def test_nothing_asked_is_nothing_yielded(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            assert await site.collect() == {}

    lab.run(work)


def test_every_rollout_has_a_seed_of_its_own_from_the_tree(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            group = (await site.collect(lab.request(size=4, seed=9, **ENDLESS)))["a"]
            sent = [b["sampling_params"]["sampling_seed"] for b in site.server.bodies("/generate")]
            assert sent == [derive_seed(9, k) for k in range(4)]
            assert [rollout.rollout_index for rollout in group.rollouts] == [0, 1, 2, 3]
            assert len({rollout.completion_ids for rollout in group.rollouts}) == 4

    lab.run(work)


def test_a_greedy_token_has_log_prob_0_and_its_raw_one_beside_it(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            sampling = {"raw_logprobs": True, "min_p": 0.2, "top_p": 0.5}
            rollout = await site.one(lab.request(temperature=0.0, **sampling))
            assert set(rollout.generator_logprobs) == {0.0}
            first = logprob(site.server.weights, [3, 1, 4], rollout.completion_ids[0])
            assert rollout.raw_logprobs is not None
            assert rollout.raw_logprobs[0] == pytest.approx(first, abs=1e-9)

    lab.run(work)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_k": 20, "min_p": 0.3}])
def test_log_probs_are_among_the_tokens_that_filters_kept(
    lab: Lab, filters: dict[str, float]
) -> None:
    async def work() -> None:
        async with lab.site(model=Model(deterministic="min_p" not in filters)) as site:
            await site.load(1)
            sampling = {"kept_support": True, "raw_logprobs": True}
            rollout = await site.one(lab.request(**filters, **sampling))
            weights, ids = site.server.weights, [3, 1, 4]
            assert rollout.kept_support is not None
            assert rollout.raw_logprobs is not None
            columns = (
                rollout.completion_ids,
                rollout.kept_support,
                rollout.generator_logprobs,
                rollout.raw_logprobs,
            )
            for token, packed, found, raw in zip(*columns, strict=True):
                every = {t: logprob(weights, ids, t) for t in range(VOCAB)}
                best = sorted(every, key=every.__getitem__)[-int(filters["top_k"]) :]
                least = max(every.values()) + math.log(filters.get("min_p", 1e-9))
                kept = sorted(t for t in best if every[t] >= least)
                assert kept_support.decode(packed).tolist() == kept
                total = math.log(sum(math.exp(every[t]) for t in kept))
                assert found == pytest.approx(every[token] - total, abs=1e-9)
                assert raw == pytest.approx(every[token], abs=1e-9)
                ids.append(token)

    lab.run(work)


def test_a_greedy_token_is_all_that_its_filter_kept(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            rollout = await site.one(lab.request(temperature=0.7, top_k=1, kept_support=True))
            assert rollout.kept_support == tuple(
                kept_support.encode([token]) for token in rollout.completion_ids
            )
            assert set(rollout.generator_logprobs) == {0.0}

    lab.run(work)


def test_banned_tokens_are_never_drawn_and_the_others_share_what_is_left(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            banned = tuple(range(5, VOCAB))
            rollout = await site.one(lab.request(banned_token_ids=banned, max_tokens=20))
            assert set(rollout.completion_ids) <= set(range(5))
            weights = site.server.weights
            free = [logprob(weights, [3, 1, 4], t) for t in range(5)]
            total = math.log(sum(map(math.exp, free)))
            first = logprob(weights, [3, 1, 4], rollout.completion_ids[0])
            assert rollout.generator_logprobs[0] == pytest.approx(first - total, abs=1e-6)

    lab.run(work)


def test_no_stop_id_comes_before_the_least_length(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            stops = tuple(range(20))
            requests = [
                lab.request(f"g{k}", seed=k, stop_token_ids=stops, min_tokens=5) for k in range(8)
            ]
            groups = await site.collect(*requests)
            rollouts = [group.rollouts[0] for group in groups.values()]
            assert all(not {*r.completion_ids[:5]} & {*stops} for r in rollouts)
            assert {r.finish_reason for r in rollouts} == {"stop"}

    lab.run(work)


def test_a_forced_prefix_is_there_and_is_not_the_policys(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(3)
            sampling = {"forced_prefix": (7, EOS, 9), "max_tokens": 8, "min_tokens": 4}
            rollout = await site.one(lab.request(**sampling, raw_logprobs=False))
            assert rollout.completion_ids[:3] == (7, EOS, 9)
            assert rollout.loss_mask[:4] == (False, False, False, True)
            assert rollout.generator_logprobs[:3] == (0.0, 0.0, 0.0)
            span = VersionSpan(policy_version=3, start=0, end=len(rollout.completion_ids))
            assert rollout.version_spans == (span,)
            body = site.server.bodies("/generate")[0]
            assert body["input_ids"] == [3, 1, 4, 7, EOS, 9]
            assert body["sampling_params"]["max_new_tokens"] == 5
            assert body["sampling_params"]["min_new_tokens"] == 1

    lab.run(work)


def test_it_ends_at_a_stop_id_at_a_stop_string_and_at_the_limit(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            free = await site.one(lab.request(**ENDLESS, max_tokens=10, seed=4))
            assert (free.finish_reason, len(free.completion_ids)) == ("length", 10)
            by_id = await site.one(lab.request(stop_token_ids=free.completion_ids[3:4], seed=4))
            assert by_id.completion_ids == free.completion_ids[:4]
            string = decode(free.completion_ids)[4:6]
            by_string = await site.one(lab.request(stop_strings=(string,), seed=4))
            assert by_string.completion_ids == free.completion_ids[:6]
            assert (by_id.finish_reason, by_string.finish_reason) == ("stop", "stop")
            assert by_string.text.endswith(string)

    lab.run(work)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"top_p": 0.9}, "sampling.top_p = 0.9: SGLang reports log-probs among the kept"),
        ({"top_p": 0.9, "top_k": 5}, "sampling.top_p = 0.9"),
        ({"min_p": 0.1}, "sampling.min_p = 0.1 without top_k"),
        ({"allowed_token_ids": (5, 6)}, "sampling.allowed_token_ids is set"),
        ({"min_tokens": 2, "stop_strings": ("A",)}, "sampling.min_tokens = 2 with stop_strings"),
        ({"stop_strings": ("A",) * 33}, "sampling.stop_strings with 33 strings"),
        ({"raw_logprobs": True, "temperature": 0.5}, "sampling.raw_logprobs = true"),
        ({"raw_logprobs": True, "banned_token_ids": (5,)}, "sampling.raw_logprobs = true"),
        ({"top_k": 41}, "top_k = 41 exceeds its --sampling-mask-max-tokens = 40"),
        ({"top_k": 20, "min_p": 0.1}, "scheduler dies of it with --enable-deterministic"),
        ({"max_tokens": 125}, "3 prompt tokens + sampling.max_tokens = 125 exceed the 124"),
        ({"max_tokens": 300}, "exceed the model's 256 positions"),
    ],
)
def test_what_cannot_be_sampled_as_asked_is_refused_before_anything_is_sent(
    lab: Lab, sampling: dict[str, object], said: str
) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            with pytest.raises(GeneratorFailure) as caught:
                await site.collect(lab.request("fine"), lab.request("a", **sampling))
            assert said in str(caught.value)
            assert "group a" in str(caught.value)
            assert site.server.bodies("/generate") == []

    lab.run(work)


def test_text_is_refused_where_the_server_has_no_tokenizer(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(model=Model(tokenizer=False)) as site:
            await site.load(1)
            await site.one(lab.request())
            for sampling in ({"stop_strings": ("A",)}, {"min_tokens": 2}):
                with pytest.raises(GeneratorFailure, match="--skip-tokenizer-init"):
                    await site.one(lab.request(**sampling))

    lab.run(work)


def test_a_group_stays_on_one_server_and_groups_go_to_the_least_busy_one(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(3) as site:
            await site.load(1)
            await site.collect(*(lab.request(f"g{k}", ids=(k + 5,), size=4) for k in range(6)))
            prompts = [{b["input_ids"][0] for b in s.bodies("/generate")} for s in site.servers]
            assert sorted(map(len, prompts)) == [2, 2, 2]
            assert len(set.union(*prompts)) == 6

    lab.run(work)


def test_no_more_rollouts_than_allowed_are_open_at_once(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(max_concurrent_rollouts=3) as site:
            await site.load(1)
            site.server.credit = 0
            open_call = site.begin(lab.request(size=8))
            await site.seen("/generate", 3)
            await site.settled()
            assert len(site.server.front) == 3
            site.server.credit = None
            assert len((await open_call)["a"].rollouts) == 8

    lab.run(work)


def test_groups_are_yielded_as_they_end_and_what_nobody_waits_for_is_taken_back(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            slow = lab.request("slow", **ENDLESS, max_tokens=100)
            groups = site.generator.generate([slow, lab.request("quick", max_tokens=1)])
            site.server.credit = 0
            first = asyncio.ensure_future(anext(groups))
            await site.seen("/generate", 2)
            await site.settled()
            await site.server.stepped(1)
            assert (await first).group_id == "quick"
            assert len(site.server.front) == 1
            await groups.aclose()
            await site.settled()
            assert site.server.front == {}
            assert site.server.running == []

    lab.run(work)


def test_cached_prefixes_are_kept_apart_by_version(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            await site.collect(*(lab.request(f"g{k}", size=2) for k in range(2)))
            await site.load(2)
            after = await site.one(lab.request("again"))
        async with lab.site() as fresh:
            await fresh.load(2)
            assert (await fresh.one(lab.request("again"))).completion_ids == after.completion_ids

    lab.run(work)


def test_metrics_say_what_was_done_and_begin_anew(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            await site.collect(lab.request(size=4))
            found = site.generator.metrics()
            assert found["generator/servers/num_used"] == 2
            assert found["generator/servers/num_calls"] == 4
            assert found["generator/servers/num_retries"] == 0
            assert 0 < found["generator/cache/found_share"] < 1
            assert found["generator/rollout/p99_seconds"] > 0
            assert site.generator.metrics()["generator/servers/num_calls"] == 0

    lab.run(work)


def test_the_key_is_sent_with_every_request(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(model=Model(api_key="secret"), api_key="secret") as site:
            await site.load(1)
            await site.one(lab.request())

    lab.run(work)


def test_a_closed_generator_says_so(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.server.credit = 0
            open_call = site.begin(lab.request())
            await site.seen("/generate")
            await site.generator.close()
            await site.generator.close()
            for failing in (open_call, site.begin(lab.request())):
                with pytest.raises(GeneratorFailure, match="the generator was closed"):
                    await failing

    lab.run(work)


def test_begun_rollouts_without_what_the_request_records_are_refused(lab: Lab) -> None:
    begun = Rollout(
        rollout_index=0,
        completion_ids=(5,),
        loss_mask=(True,),
        generator_logprobs=(-1.0,),
        version_spans=(VersionSpan(policy_version=1, start=0, end=1),),
        finish_reason="abort",
        text="E",
    )

    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            for sampling in ({"raw_logprobs": True}, {"kept_support": True, "top_k": 5}):
                with pytest.raises(GeneratorFailure, match="begun rollout 0 has no "):
                    await site.one(lab.request(begun=(begun,), **sampling))

    lab.run(work)


def test_a_stop_string_ends_a_rollout_only_where_a_sampled_token_completes_it(lab: Lab) -> None:
    prefix = (7, 8, 9)

    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            forced = {**ENDLESS, "forced_prefix": prefix}
            free = await site.one(lab.request(**forced))
            inside = await site.one(lab.request(**forced, stop_strings=(decode(prefix[1:]),)))
            assert inside == free
            across = decode(free.completion_ids[2:4])
            cut = await site.one(lab.request(**forced, stop_strings=(across,)))
            assert (cut.finish_reason, cut.completion_ids) == ("stop", free.completion_ids[:4])

    lab.run(work)


def test_a_stop_string_ends_a_rollout_across_a_token_without_text(lab: Lab) -> None:
    """A server sees a special token as text, and so no string around it."""
    request = lab.request(**ENDLESS, stop_strings=("AB",))
    draft = Draft(request, 0, decode)
    draft.begin(1)
    draft.add(
        Sampled(
            token_ids=(5, 1, 0, 2, 6),
            logprobs=(-1.0,) * 5,
            policy_versions=(1,) * 5,
            finish_reason="length",
        )
    )
    assert (draft.finish_reason, draft.token_ids) == ("stop", [5, 1, 0, 2])
