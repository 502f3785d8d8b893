"""New weights: what they do to unfinished rollouts, and how they can fail."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sglang_server import EOS, Model, logits_of, uniform, until

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.sglang.weights import PublishedWeights
from headrace.types import Rollout, VersionSpan, derive_seed

if TYPE_CHECKING:
    from sglang_server import Answer, Json
    from tests.unit.generators.sglang.conftest import Lab, Site

ENDLESS: dict[str, Any] = {"stop_token_ids": (), "banned_token_ids": (EOS,)}
"""Sampling that only the limit ends."""
PROMPT = (3, 1, 4)


async def begun(site: Site, lab: Lab, num_tokens: int, *names: str) -> asyncio.Task[Any]:
    """Open groups and let each of their rollouts sample ``num_tokens``."""
    for server in site.servers:
        server.credit = 0
    task = site.begin(*(lab.request(name, ids=PROMPT, seed=5, **ENDLESS) for name in names))
    await until(lambda: sum(len(server.front) for server in site.servers) == len(names))
    await site.settled()
    for server in site.servers:
        await server.stepped(num_tokens)
    return task


def go_on(site: Site) -> None:
    for server in site.servers:
        server.credit = None


def held_back(site: Site) -> asyncio.Event:
    """Let the server go on, when it is told to, only after the event."""
    admit, go = asyncio.Event(), site.server._continue

    async def late(body: Json) -> Answer:
        await admit.wait()
        return await go(body)

    site.server._continue = late  # type: ignore[method-assign]
    return admit


def spans(*ends: tuple[int, int]) -> tuple[VersionSpan, ...]:
    """Spans from (version, end)."""
    starts = [0, *(end for _, end in ends)]
    return tuple(
        VersionSpan(policy_version=version, start=start, end=end)
        for start, (version, end) in zip(starts, ends, strict=False)
    )


def expected(weights: list[tuple[int, list[int]]], seed: int) -> tuple[int, ...]:
    """Tokens by a literal loop: each is drawn under (weights, those of every key before it)."""
    tokens = list(PROMPT)
    for under, cached in weights:
        logits = logits_of(under, list(zip(tokens, cached, strict=True)))
        logits[EOS] -= 1e9
        mass, total = 0.0, sum(2.718281828459045 ** float(x) for x in logits)
        order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
        for token in order:
            mass += 2.718281828459045 ** float(logits[token]) / total
            if mass > uniform(seed, len(tokens)):
                break
        tokens.append(token)
    return tuple(tokens[len(PROMPT) :])


async def weights_by_version(lab: Lab, *versions: int) -> dict[int, int]:
    """What servers hold when they have loaded these."""
    found = {}
    async with lab.site() as site:
        for version in versions:
            await site.load(version)
            found[version] = site.server.weights
    return found


def test_wait_lets_rollouts_end_and_holds_back_what_comes_after(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            first = await begun(site, lab, 4, "a")
            update = site.begin_update(2)
            await site.settled()
            second = site.begin(lab.request("b", **ENDLESS))
            await site.settled()
            assert len(site.server.bodies("/generate")) == 1
            assert len(site.server.bodies("/update_weights_from_disk")) == 1
            go_on(site)
            await update
            assert (await first)["a"].rollouts[0].version_spans == spans((1, 12))
            assert (await second)["b"].rollouts[0].version_spans == spans((2, 12))
            assert site.server.bodies("/pause_generation") == []

    lab.run(work)


def test_keep_goes_on_with_the_cache_it_has(lab: Lab) -> None:
    async def work() -> None:
        weights = await weights_by_version(lab, 1, 2)
        async with lab.site(on_update="keep") as site:
            await site.load(1)
            task = await begun(site, lab, 4, "a")
            await site.load(2)
            assert not site.server.is_paused
            go_on(site)
            (rollout,) = (await task)["a"].rollouts
            old, new = weights[1], weights[2]
            # The token sampled last was computed into the cache under the new weights.
            cached = [old] * 6 + [new] * 20
            path = [(old, [old] * (3 + k)) for k in range(4)]
            path += [(new, cached[: 3 + k]) for k in range(4, 12)]
            assert rollout.completion_ids == expected(path, derive_seed(5, 0))
            assert rollout.version_spans == spans((1, 4), (2, 12))
            assert [b["mode"] for b in site.server.bodies("/pause_generation")][-1] == "in_place"

    lab.run(work)


def test_recompute_goes_on_with_a_cache_of_the_new_weights(lab: Lab) -> None:
    async def work() -> None:
        weights = await weights_by_version(lab, 1, 2)
        async with lab.site(on_update="recompute", model=Model(overlap=True)) as site:
            await site.load(1)
            task = await begun(site, lab, 4, "a")
            await site.load(2)
            go_on(site)
            (rollout,) = (await task)["a"].rollouts
            old, new = weights[1], weights[2]
            path = [(old, [old] * (3 + k)) for k in range(4)]
            path += [(new, [new] * (3 + k)) for k in range(4, 12)]
            assert rollout.completion_ids == expected(path, derive_seed(5, 0))
            assert rollout.version_spans == spans((1, 4), (2, 12))

    lab.run(work)


def test_restart_begins_at_the_prompt_again(lab: Lab) -> None:
    async def work() -> None:
        weights = await weights_by_version(lab, 2)
        async with lab.site(on_update="restart") as site:
            await site.load(1)
            task = await begun(site, lab, 4, "a")
            update = site.begin_update(2)
            await site.seen("/abort_request")
            go_on(site)
            await update
            (rollout,) = (await task)["a"].rollouts
            path = [(weights[2], [weights[2]] * (3 + k)) for k in range(12)]
            assert rollout.completion_ids == expected(path, derive_seed(5, 0))
            assert rollout.version_spans == spans((2, 12))

    lab.run(work)


def test_restart_also_forgets_what_came_in_begun(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(on_update="restart", max_concurrent_rollouts=1) as site:
            await site.load(1)
            whole = await site.one(lab.request("a", ids=PROMPT, seed=5, **ENDLESS))
            part = cut(whole, 4)
            site.server.credit = 0
            task = site.begin(
                lab.request("first", **ENDLESS),
                lab.request("a", ids=PROMPT, seed=5, begun=(part,), **ENDLESS),
            )
            await site.seen("/generate", 2)
            update = site.begin_update(2)
            await site.seen("/abort_request")
            go_on(site)
            await update
            (rollout,) = (await task)["a"].rollouts
            assert rollout.version_spans == spans((2, 12))

    lab.run(work)


def test_restart_keeps_the_leading_tokens_that_the_policy_did_not_choose(lab: Lab) -> None:
    given = Rollout(
        rollout_index=0,
        completion_ids=(7, 8, 9, 10),
        loss_mask=(False, False, True, False),
        generator_logprobs=(0.0, 0.0, -1.0, 0.0),
        version_spans=spans((1, 4)),
        finish_reason="abort",
        text="GHIJ",
    )

    async def work() -> None:
        async with lab.site(on_update="restart") as site:
            await site.load(1)
            site.server.credit = 0
            task = site.begin(lab.request("a", ids=PROMPT, begun=(given,), **ENDLESS))
            await site.seen("/generate")
            update = site.begin_update(2)
            await site.seen("/abort_request")
            go_on(site)
            await update
            (rollout,) = (await task)["a"].rollouts
            assert rollout.completion_ids[:2] == (7, 8)
            assert rollout.loss_mask == (False, False) + (True,) * 10
            assert rollout.version_spans == spans((2, 12))
            assert site.server.bodies("/generate")[-1]["input_ids"] == [*PROMPT, 7, 8]

    lab.run(work)


def test_given_tokens_that_came_in_keep_their_version(lab: Lab) -> None:
    given = Rollout(
        rollout_index=0,
        completion_ids=(7, 8),
        loss_mask=(False, False),
        generator_logprobs=(0.0, 0.0),
        version_spans=spans((1, 2)),
        finish_reason="abort",
        text="GH",
    )

    async def work() -> None:
        async with lab.site() as site:
            await site.load(3)
            prefix = {"forced_prefix": (7, 8)}
            rollout = await site.one(lab.request("a", begun=(given,), **ENDLESS, **prefix))
            assert rollout.version_spans == spans((1, 2), (3, 12))

    lab.run(work)


def cut(rollout: Rollout, length: int) -> Rollout:
    """The rollout as it was after ``length`` tokens."""
    return dataclasses.replace(
        rollout,
        completion_ids=rollout.completion_ids[:length],
        loss_mask=rollout.loss_mask[:length],
        generator_logprobs=rollout.generator_logprobs[:length],
        version_spans=(VersionSpan(policy_version=1, start=0, end=length),),
        finish_reason="abort",
        text=rollout.text[:length],
    )


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_what_is_asked_for_during_an_update_starts_under_the_new_weights(
    lab: Lab, on_update: str
) -> None:
    async def work() -> None:
        async with lab.site(2, on_update=on_update) as site:
            await site.load(1)
            await site.collect(lab.request("warm", ids=PROMPT, **ENDLESS))
            task = await begun(site, lab, 2, "a", "b")
            late: list[asyncio.Task[Any]] = []

            def during(_: asyncio.StreamWriter, reply: Json) -> Json:
                late.append(site.begin(lab.request("late", ids=PROMPT, seed=8, **ENDLESS)))
                return reply

            site.server.faults["/update_weights_from_disk"] = [during]
            await site.load(2)
            go_on(site)
            assert len(await task) == 2
            found = (await late[0])["late"].rollouts[0]
            assert found.version_spans == spans((2, 12))
        async with lab.site() as fresh:
            await fresh.load(2)
            same = await fresh.one(lab.request("late", ids=PROMPT, seed=8, **ENDLESS))
            assert same.completion_ids == found.completion_ids

    lab.run(work)


def test_a_kept_cache_is_not_asked_to_be_flushed_and_a_recomputed_one_is(lab: Lab) -> None:
    async def work() -> None:
        for on_update, flushes in (("keep", 0), ("recompute", 2), ("wait", 0), ("restart", 0)):
            async with lab.site(on_update=on_update) as site:
                await site.load(1)
                await site.load(2)
                bodies = site.server.bodies("/update_weights_from_disk")
                assert [body["flush_cache"] for body in bodies] == [False, False]
                assert len(site.server.bodies("/flush_cache")) == flushes

    lab.run(work)


# --- weights on disk --------------------------------------------------------------------------


def test_servers_read_a_whole_checkpoint_that_is_gone_afterwards(lab: Lab) -> None:
    (lab.directory / "tokenizer.json").write_text("{}")
    held: list[set[str]] = []

    async def work() -> None:
        async with lab.site() as site:

            def look(_: asyncio.StreamWriter, reply: Json) -> Json:
                path = Path(site.server.bodies("/update_weights_from_disk")[-1]["model_path"])
                assert path.is_relative_to(site.weights_directory)
                held.append({file.name for file in path.iterdir()})
                return reply

            site.server.faults["/update_weights_from_disk"] = [look]
            await site.load(1)
            (home,) = site.weights_directory.iterdir()
            assert list(home.iterdir()) == []

    lab.run(work)
    assert held == [{"config.json", "model.safetensors", "tokenizer.json"}]


def test_weights_that_were_not_written_as_published_reach_no_server(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            wrong = dataclasses.replace(lab.update(1, 1), checksum=12345)
            with pytest.raises(WeightSyncError, match=r"checksum .* instead of 3039"):
                await site.generator.update_weights(wrong)
            assert site.server.bodies("/update_weights_from_disk") == []

    lab.run(work)


def test_a_directory_that_cannot_be_used_is_named(lab: Lab) -> None:
    blocked = lab.directory / "file"
    blocked.write_text("in the way")

    async def work() -> None:
        async with lab.site(weights_directory=blocked / "below") as site:
            with pytest.raises(
                WeightSyncError, match=r"generator\.sglang\.weights_directory = .*below"
            ):
                await site.load(1)

    lab.run(work)


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_that_is_in_use(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any process: the kernel lets go of a lock however the one that holds it ends."""
    home = lab.directory / "weights"
    killed = PublishedWeights(home, {}, lab.directory)
    left = killed.write(lab.update(1, 1), "left").parent
    assert killed._lock is not None
    living = PublishedWeights(home, {}, lab.directory)
    used = living.write(lab.update(1, 1), "used").parent
    assert {left, used} <= set(home.iterdir())
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    far = PublishedWeights(home, {}, lab.directory)
    elsewhere = far.write(lab.update(1, 1), "far").parent
    monkeypatch.undo()
    for weights in (killed, far):
        assert weights._lock is not None
        os.close(weights._lock)
        weights._lock = None
    third = PublishedWeights(home, {}, lab.directory)
    own = third.write(lab.update(2, 2), "own").parent
    assert set(home.iterdir()) == {used, elsewhere, own}
    for weights in (living, far, third):
        weights.close()
    assert list(home.iterdir()) == []


def test_a_process_that_is_killed_lets_go_of_its_weights(lab: Lab) -> None:
    home = lab.directory / "weights"
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        PublishedWeights(home, {}, lab.directory).write(lab.update(1, 1), "v1")
        os.write(tell, b"x")
        threading.Event().wait(30)
        os._exit(1)
    os.read(ready, 1)
    (left,) = home.iterdir()
    fresh = PublishedWeights(home, {}, lab.directory)
    fresh.write(lab.update(1, 1), "v1")
    assert left.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for end in (ready, tell):
        os.close(end)
    fresh.close()
    fresh.write(lab.update(1, 1), "v1")
    assert not left.exists()
    fresh.close()


def test_a_close_that_is_cancelled_leaves_no_weights(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            await site.generator.pause()
            admit = held_back(site)
            closing = asyncio.create_task(site.generator.close())
            await site.seen("/continue_generation", 2)
            closing.cancel()
            await site.settled()
            admit.set()
            await asyncio.wait({closing})
            assert closing.cancelled()
            assert list(site.weights_directory.iterdir()) == []
            assert not site.server.is_paused

    lab.run(work)


def test_a_disk_that_hangs_ends_the_update_with_its_name(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(PublishedWeights, "write", lambda *_: released.wait(30))

    async def work() -> None:
        async with lab.site(update_deadline_seconds=0.1) as site:
            with pytest.raises(WeightSyncError, match=r"weights_directory = .*not written") as seen:
                await site.load(1)
            assert "update_deadline_seconds = 0.1" in str(seen.value)

    try:
        lab.run(work)
    finally:
        released.set()


# --- updates that fail ------------------------------------------------------------------------


def other_version(_: asyncio.StreamWriter, reply: Json) -> Json:
    return {**reply, "weight_version": "default"}


async def fails(site: Site, version: int, said: str) -> None:
    with pytest.raises(WeightSyncError) as caught:
        await site.load(version)
    assert said in str(caught.value)
    assert site.server.url in str(caught.value)


@pytest.mark.parametrize("on_update", ["wait", "keep", "recompute", "restart"])
def test_a_server_that_refuses_the_weights_leaves_none_to_sample_from(
    lab: Lab, on_update: str
) -> None:
    def refuse(*_: object) -> Json:
        return {"_status": 400, "success": False, "message": "Failed to update weights"}

    async def work() -> None:
        async with lab.site(2, on_update=on_update) as site:
            await site.load(1)
            site.server.faults["/update_weights_from_disk"] = [refuse]
            await fails(site, 2, "HTTP 400: Failed to update weights")
            with pytest.raises(GeneratorFailure, match="or after one that failed"):
                await site.one(lab.request())
            await site.load(3)
            rollout = await site.one(lab.request(**ENDLESS))
            assert rollout.version_spans == spans((3, 12))

    lab.run(work)


def test_a_server_that_says_it_loaded_and_did_not_is_found_out(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.server.faults["/model_info"] = [other_version]
            await fails(site, 2, "and holds 'default'")
            with pytest.raises(GeneratorFailure):
                await site.one(lab.request())

    lab.run(work)


def test_a_failed_update_ends_what_was_unfinished(lab: Lab) -> None:
    def refuse(*_: object) -> Json:
        return {"success": False, "message": "half of it"}

    async def work() -> None:
        async with lab.site(on_update="keep") as site:
            await site.load(1)
            task = await begun(site, lab, 4, "a")
            site.server.faults["/update_weights_from_disk"] = [refuse]
            await fails(site, 2, "half of it")
            with pytest.raises(GeneratorFailure, match="the weights under it are unknown"):
                await task
            assert not site.server.is_paused

    lab.run(work)


@pytest.mark.parametrize("on_update", ["wait", "keep", "recompute", "restart"])
def test_a_server_that_dies_of_an_update_leaves_its_rollouts_to_the_others(
    lab: Lab, on_update: str
) -> None:
    async def work() -> None:
        async with lab.site(2, on_update=on_update, max_retries=1) as site:
            await site.load(1)
            task = await begun(site, lab, 4, "a", "b")
            deaths: list[asyncio.Task[None]] = []

            def die(*_: object) -> None:
                deaths.append(asyncio.create_task(site.server.die()))

            site.server.faults["/update_weights_from_disk"] = [die]
            update = site.begin_update(2)
            await site.settled()
            go_on(site)
            await update
            await asyncio.gather(*deaths)
            found = await task
            assert sorted(found) == ["a", "b"]
            assert all(len(g.rollouts[0].completion_ids) == 12 for g in found.values())
            assert site.generator.metrics()["generator/servers/num_used"] == 1
            await site.server.start()
            await site.load(3)
            assert site.generator.metrics()["generator/servers/num_used"] == 2

    lab.run(work)


def test_an_update_that_no_server_survives_names_them(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2, max_retries=0) as site:
            await site.load(1)
            for server in site.servers:
                await server.die()
            await fails(site, 2, site.servers[1].url)

    lab.run(work)


def test_a_server_that_somebody_left_paused_is_set_going(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            site.server.pause("in_place")
            await site.load(1)
            assert (await site.one(lab.request())).completion_ids

    lab.run(work)


def test_an_update_that_is_given_up_leaves_the_servers_going(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(on_update="keep") as site:
            await site.load(1)
            site.server.faults["/update_weights_from_disk"] = [lambda *_: None]
            update = site.begin_update(2)
            await site.seen("/update_weights_from_disk", 2)
            update.cancel()
            await asyncio.wait({update})
            assert not site.server.is_paused
            await site.load(3)
            assert (await site.one(lab.request(**ENDLESS))).version_spans == spans((3, 12))

    lab.run(work)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_that_is_given_up_before_its_turn_leaves_the_gate_open(
    lab: Lab, on_update: str
) -> None:
    async def work() -> None:
        async with lab.site(on_update=on_update) as site:
            await site.load(1)
            site.server.faults["/pause_generation"] = [lambda *_: None]
            pause = asyncio.create_task(site.generator.pause())
            await site.seen("/pause_generation", 2)
            update = site.begin_update(2)
            await until(lambda: "update" in site.generator._calls.gate._holders)
            update.cancel()
            await asyncio.wait({update})
            pause.cancel()
            await asyncio.wait({pause})
            await site.generator.resume()
            assert (await site.one(lab.request(**ENDLESS))).version_spans == spans((1, 12))

    lab.run(work)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_that_is_given_up_twice_leaves_the_servers_going(
    lab: Lab, on_update: str
) -> None:
    async def work() -> None:
        async with lab.site(on_update=on_update) as site:
            await site.load(1)
            site.server.faults["/update_weights_from_disk"] = [lambda *_: None]
            told = len(site.server.bodies("/continue_generation"))
            admit = held_back(site)
            update = site.begin_update(2)
            await site.seen("/update_weights_from_disk", 2)
            update.cancel()
            await site.seen("/continue_generation", told + 1)
            update.cancel()
            await site.settled()
            admit.set()
            await asyncio.wait({update})
            assert update.cancelled()
            assert not site.server.is_paused

    lab.run(work)


@pytest.mark.parametrize("on_update", ["wait", "keep"])
def test_an_update_under_way_when_the_generator_closes_says_so(lab: Lab, on_update: str) -> None:
    async def work() -> None:
        async with lab.site(on_update=on_update) as site:
            await site.load(1)
            task = await begun(site, lab, 2, "a")
            site.server.faults["/update_weights_from_disk"] = [lambda *_: None]
            update = site.begin_update(2)
            await site.settled()
            await site.generator.close()
            for failing in (update, site.begin_update(3)):
                with pytest.raises(WeightSyncError, match=r"version .: the generator was closed"):
                    await failing
            with pytest.raises(GeneratorFailure):
                await task
            assert not site.server.is_paused

    lab.run(work)
