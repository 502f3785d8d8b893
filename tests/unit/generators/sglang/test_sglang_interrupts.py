"""Pausing, taking back and going on."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from sglang_server import EOS, Model, decode, until

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.types import Rollout, VersionSpan

if TYPE_CHECKING:
    from sglang_server import Answer, Json
    from tests.unit.generators.sglang.conftest import Lab, Site

ENDLESS: dict[str, Any] = {"stop_token_ids": (), "banned_token_ids": (EOS,)}
"""Sampling that only the limit ends."""


async def begin(site: Site, lab: Lab, num_tokens: int, **options: Any) -> asyncio.Task[Any]:  # noqa: ANN401
    """Open group ``a`` and let each of its rollouts sample ``num_tokens``."""
    site.server.credit = 0
    task = site.begin(lab.request("a", **{**ENDLESS, **options}))
    await until(lambda: len(site.server.front) == options.get("size", 1))
    await site.settled()
    await site.server.stepped(num_tokens)
    return task


async def aborted(site: Site, task: asyncio.Task[Any]) -> tuple[Rollout, ...]:
    """Take group ``a`` back from a server that works."""
    abort = asyncio.create_task(site.generator.abort(["a"]))
    await until(lambda: all(running.is_to_abort for running in site.server.running))
    site.server.credit = None
    await abort
    return (await task)["a"].rollouts


def test_no_token_is_sampled_during_a_pause_and_requests_wait(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            whole = await site.one(lab.request("a", **ENDLESS))
            task = await begin(site, lab, 3)
            await site.generator.pause()
            await site.generator.pause()
            site.server.credit = None
            late = site.begin(lab.request("late"))
            steps = [server.num_steps for server in site.servers]
            await site.settled()
            assert [server.num_steps for server in site.servers] == steps
            assert not task.done()
            await site.generator.resume()
            await site.generator.resume()
            assert (await task)["a"].rollouts == (whole,)
            assert len(await late) == 1

    lab.run(work)


def test_a_pause_waits_for_the_scheduler_and_not_for_the_front_alone(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            await site.generator.pause()
            assert [path for path, _ in site.server.seen[-2:]] == [
                "/pause_generation",
                "/server_info",
            ]

    lab.run(work)


def test_time_at_a_standstill_is_not_part_of_a_deadline(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(rollout_deadline_seconds=4.0) as site:
            await site.load(1)
            task = await begin(site, lab, 4)
            await site.generator.pause()
            await asyncio.sleep(4.5)
            await site.generator.abort(["a"])
            assert len((await task)["a"].rollouts[0].completion_ids) == 4

    lab.run(work)


def test_an_abort_yields_what_is_there_and_going_on_gives_the_same_tokens(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            whole = (await site.collect(lab.request("a", size=3, **ENDLESS)))["a"].rollouts
            site.server.seen.clear()
            parts = await aborted(site, await begin(site, lab, 4, size=3))
            assert [rollout.finish_reason for rollout in parts] == ["abort"] * 3
            for part, rollout in zip(parts, whole, strict=True):
                length = len(part.completion_ids)
                assert length >= 4
                assert part.completion_ids == rollout.completion_ids[:length]
                assert part.generator_logprobs == rollout.generator_logprobs[:length]
            site.server.seen.clear()
            again = await site.collect(lab.request("a", size=3, begun=parts, **ENDLESS))
            assert again["a"].rollouts == whole
            sent = site.server.bodies("/generate")
            assert [len(body["input_ids"]) for body in sent] == [
                3 + len(part.completion_ids) for part in parts
            ]

    lab.run(work)


def test_rollouts_that_another_generator_has_begun_go_on_and_ended_ones_stay(lab: Lab) -> None:
    ids = (7, 8, 9)
    part = Rollout(
        rollout_index=1,
        completion_ids=ids,
        loss_mask=(False, True, True),
        generator_logprobs=(0.0, -1.5, -2.5),
        version_spans=(VersionSpan(policy_version=0, start=0, end=3),),
        finish_reason="abort",
        text=decode(ids),
    )
    ended = dataclasses.replace(part, rollout_index=0, finish_reason="stop")

    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            request = lab.request("a", size=3, begun=(part, ended), max_tokens=5, **ENDLESS)
            first, second, third = (await site.collect(request))["a"].rollouts
            assert first == ended
            assert second.completion_ids[:3] == ids
            assert second.loss_mask == (False, True, True, True, True)
            assert second.generator_logprobs[:3] == (0.0, -1.5, -2.5)
            assert second.version_spans == (
                VersionSpan(policy_version=0, start=0, end=3),
                VersionSpan(policy_version=1, start=3, end=5),
            )
            assert len(third.completion_ids) == 5
            assert len(site.server.bodies("/generate")) == 2
            only = dataclasses.replace(request, group_size=1, begun=(ended,))
            assert (await site.collect(only))["a"].rollouts == (ended,)
            assert len(site.server.bodies("/generate")) == 2

    lab.run(work)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [({"max_tokens": 3, "stop_token_ids": ()}, "length"), ({"stop_token_ids": (9,)}, "stop")],
)
def test_a_rollout_taken_back_at_its_very_end_has_ended(
    lab: Lab, sampling: dict[str, object], reason: str
) -> None:
    """SGLang says ``abort`` of a request that reached its end in the step of the abort."""
    part = Rollout(
        rollout_index=0,
        completion_ids=(7, 8, 9),
        loss_mask=(True,) * 3,
        generator_logprobs=(-1.0,) * 3,
        version_spans=(VersionSpan(policy_version=0, start=0, end=3),),
        finish_reason="abort",
        text="GHI",
    )

    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            rollout = await site.one(lab.request("a", begun=(part,), **sampling))
            assert rollout.completion_ids == part.completion_ids
            assert rollout.finish_reason == reason
            assert site.server.bodies("/generate") == []

    lab.run(work)


def test_a_stop_id_before_the_least_length_is_no_end_of_what_came_in(lab: Lab) -> None:
    part = Rollout(
        rollout_index=0,
        completion_ids=(7, 8, 9),
        loss_mask=(True,) * 3,
        generator_logprobs=(-1.0,) * 3,
        version_spans=(VersionSpan(policy_version=0, start=0, end=3),),
        finish_reason="abort",
        text="GHI",
    )

    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            stops = {"stop_token_ids": (9,), "min_tokens": 5, "banned_token_ids": (EOS,)}
            rollout = await site.one(lab.request("a", begun=(part,), **stops))
            assert len(rollout.completion_ids) > 5

    lab.run(work)


@pytest.mark.parametrize("by_length", [True, False])
def test_an_abort_in_the_step_of_an_end_is_that_end(lab: Lab, by_length: bool) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            free = await site.one(lab.request("a", **ENDLESS))
            end = {"max_tokens": 4} if by_length else {"stop_token_ids": free.completion_ids[3:4]}
            whole = await site.one(lab.request("a", **{**ENDLESS, **end}))
            assert len(whole.completion_ids) == 4
            (rollout,) = await aborted(site, await begin(site, lab, 3, **end))
            assert rollout == whole
            assert len(site.server.bodies("/generate")) == 3

    lab.run(work)


def test_a_stop_string_that_an_interruption_cut_in_two_is_found(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            free = await site.one(lab.request("a", **ENDLESS))
            string = decode(free.completion_ids[3:5])
            stops = {"stop_strings": (string,), **ENDLESS}
            whole = await site.one(lab.request("a", **stops))
            assert len(whole.completion_ids) == 5
            site.server.seen.clear()
            task = await begin(site, lab, 3, **stops)
            for running in site.server.running:
                running.is_to_abort = True
            site.server.credit = None
            assert (await task)["a"].rollouts == (whole,)
            assert len(site.server.bodies("/generate")) == 2

    lab.run(work)


def test_an_unknown_group_is_named_and_nothing_is_aborted(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            task = await begin(site, lab, 2)
            with pytest.raises(GeneratorFailure, match="groups never are in no open call"):
                await site.generator.abort(["a", "never"])
            assert site.server.bodies("/abort_request") == []
            site.server.credit = None
            assert (await task)["a"].rollouts[0].finish_reason == "length"

    lab.run(work)


def test_what_no_server_was_asked_for_yet_is_taken_back_too(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(max_concurrent_rollouts=1) as site:
            await site.load(1)
            task = await begin(site, lab, 2, size=1)
            waiting = site.begin(lab.request("b", size=2))
            await site.settled()
            await site.generator.abort(["b"])
            rollouts = (await waiting)["b"].rollouts
            assert [r.completion_ids for r in rollouts] == [(), ()]
            assert {r.finish_reason for r in rollouts} == {"abort"}
            site.server.credit = None
            assert len((await task)["a"].rollouts[0].completion_ids) == 12

    lab.run(work)


def test_a_paused_group_is_taken_back_at_once_and_the_others_stay_paused(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            whole = await site.one(lab.request("a", **ENDLESS))
            task = await begin(site, lab, 6)
            other = site.begin(lab.request("b", **ENDLESS))
            await site.settled()
            await site.generator.pause()
            late = site.begin(lab.request("c"))
            await site.settled()
            await site.generator.abort(["a", "c"])
            (part,) = (await task)["a"].rollouts
            assert (await late)["c"].rollouts[0].completion_ids == ()
            # Of six tokens the scheduler had handed over four.
            assert part.completion_ids == whole.completion_ids[:4]
            assert part.finish_reason == "abort"
            assert site.server.is_paused
            assert not other.done()
            site.server.credit = None
            await site.generator.resume()
            assert len(await other) == 1
            assert await site.one(lab.request("a", begun=(part,), **ENDLESS)) == whole

    lab.run(work)


def test_a_paused_rollout_without_its_kept_tokens_begins_again(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            task = await begin(site, lab, 6, top_k=5)
            await site.generator.pause()
            await site.generator.abort(["a"])
            (part,) = (await task)["a"].rollouts
            assert part.completion_ids == ()

    lab.run(work)


def test_an_abort_that_overtakes_its_request_is_told_again(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.server.credit = 0
            admit = asyncio.Event()
            generate = site.server._generate

            async def late(body: Json) -> Answer:
                await admit.wait()
                return await generate(body)

            site.server._generate = late  # type: ignore[method-assign]
            task = site.begin(lab.request("a", **ENDLESS))
            await site.seen("/generate")
            abort = asyncio.create_task(site.generator.abort(["a"]))
            await site.seen("/abort_request")
            admit.set()
            await until(lambda: bool(site.server.front))
            await site.seen("/abort_request", 2)
            site.server.credit = None
            await abort
            assert (await task)["a"].rollouts[0].finish_reason == "abort"

    lab.run(work)


def test_a_server_that_answers_no_abort_costs_what_it_had_sampled_alone(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            part = await aborted(site, await begin(site, lab, 4))
            task = await begin(site, lab, 2, begun=part)
            site.is_hasty(control_deadline_seconds=1.0)
            await site.generator.abort(["a"])  # no step is made, so no answer comes
            assert (await task)["a"].rollouts == part

    lab.run(work)


def test_aborting_one_request_leaves_those_whose_id_begins_alike(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            await site.collect(*(lab.request(f"g{k}", size=4) for k in range(8)))
            rids = [body["rid"] for body in site.server.bodies("/generate")]
            assert len({len(rid) for rid in rids}) == 1
            assert len(set(rids)) == 32

    lab.run(work)


def test_wait_refuses_an_update_while_what_it_waits_for_is_paused(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            task = await begin(site, lab, 2)
            waiting = site.begin_update(2)
            await site.settled()
            await site.generator.pause()
            for failing in (waiting, site.begin_update(3)):
                with pytest.raises(WeightSyncError, match="1 rollouts are unfinished and paused"):
                    await failing
            site.server.credit = None
            await site.generator.resume()
            rollout = (await task)["a"].rollouts[0]
            assert rollout.version_spans == (VersionSpan(policy_version=1, start=0, end=12),)
            await site.load(3)

    lab.run(work)


@pytest.mark.parametrize(
    ("on_update", "versions"), [("keep", [1, 2]), ("recompute", [1, 2]), ("restart", [2])]
)
def test_an_update_during_a_pause_leaves_all_paused(
    lab: Lab, on_update: str, versions: list[int]
) -> None:
    async def work() -> None:
        async with lab.site(on_update=on_update, model=Model(overlap=on_update != "keep")) as site:
            await site.load(1)
            task = await begin(site, lab, 4)
            await site.generator.pause()
            site.server.credit = None
            await site.load(2)
            await site.settled()
            assert site.server.is_paused
            assert not task.done()
            await site.generator.resume()
            (rollout,) = (await task)["a"].rollouts
            assert [span.policy_version for span in rollout.version_spans] == versions
            assert len(rollout.completion_ids) == 12

    lab.run(work)


def test_closing_a_paused_generator_sets_its_servers_going(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            await site.generator.pause()
            await site.generator.close()
            assert not site.server.is_paused

    lab.run(work)
