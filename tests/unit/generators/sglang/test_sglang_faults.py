"""Servers that fail: no prompt is lost, nothing that does not fit is trained on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sglang_server import EOS, Model

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.sglang.client import Server, ServerRefused, http_client

if TYPE_CHECKING:
    from sglang_server import Fault, Json
    from tests.unit.generators.sglang.conftest import Lab, Site


ENDLESS: dict[str, Any] = {"stop_token_ids": (), "banned_token_ids": (EOS,)}
"""Sampling that only the limit ends."""


def changed(**values: object) -> Fault:
    """Other values in ``meta_info``; keys in capitals belong beside it."""

    def change(_: asyncio.StreamWriter, reply: Json) -> Json:
        for key, value in values.items():
            target = reply if key.isupper() else reply["meta_info"]
            target[key.lower()] = value(target[key.lower()]) if callable(value) else value
        return reply

    return change


def changed_server(**values: object) -> Fault:
    """Other values in what a server says of itself."""
    return lambda _, reply: reply | values


def garbage(content: bytes) -> Fault:
    return lambda *_: content


def status(code: int, said: str = "no") -> Fault:
    return lambda *_: {"_status": code, "error": {"message": said}}


def not_finite(_: asyncio.StreamWriter, reply: Json) -> Json:
    """As SGLang ends a request whose sampled id lies outside the vocabulary."""
    reply["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
    reply["meta_info"]["output_token_logprobs"][-1][0] = None
    return reply


def silent(*_: object) -> None:
    """Never answers."""


def cut_off(writer: asyncio.StreamWriter, _: Json) -> bytes:
    """Breaks off in the middle of its answer."""
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"text": "')
    writer.transport.write_eof()
    writer.close()
    return b""


async def refuses(site: Site, lab: Lab, said: str, **sampling: Any) -> None:  # noqa: ANN401
    with pytest.raises(GeneratorFailure) as caught:
        await site.collect(lab.request("a", **sampling))
    assert said in str(caught.value)
    assert site.server.url in str(caught.value)


# --- answers that do not fit ------------------------------------------------------------------

UNFIT: dict[str, tuple[Fault, str]] = {
    "no JSON": (garbage(b"<html>"), "the answer is no JSON: <html>"),
    "no object": (garbage(b"[]"), "the answer is no object"),
    "no meta_info": (garbage(b'{"output_ids": []}'), "meta_info is None"),
    "too few log-probs": (
        changed(output_token_logprobs=lambda entries: entries[1:]),
        "12 tokens and 11 log-probs",
    ),
    "another token's log-prob": (
        changed(output_token_logprobs=lambda entries: entries[::-1]),
        "and its log-prob entry is",
    ),
    "a log-prob that is none": (
        changed(output_token_logprobs=lambda entries: [[None, *e[1:]] for e in entries]),
        "the log-prob of token 0 is None",
    ),
    "a token that is none": (
        changed(OUTPUT_IDS=lambda ids: [*ids[:-1], "x"]),
        "a token id is 'x'",
    ),
    "a version that was never published": (
        changed(weight_versions=[{"version": "default", "start": 0, "end": 12}]),
        "weight version 'default', which this run never published",
    ),
    "versions for some tokens alone": (
        changed(weight_versions=lambda spans: [{**spans[0], "end": 9}]),
        "version spans cover 9 of 12 tokens",
    ),
    "versions with a hole": (
        changed(weight_versions=lambda spans: [{**spans[0], "start": 2}]),
        "version spans go on at 2, where 0 tokens are covered",
    ),
    "no versions": (changed(weight_versions=None), "weight_versions is None"),
    "a prompt that was cut": (changed(prompt_tokens=2), "it read 2 of the 3 input tokens"),
    "another request's answer": (changed(id="other"), "it answers request other instead of"),
    "a stop that nobody asked for": (
        changed(finish_reason=lambda _: {"type": "stop", "matched": 49}),
        "it stopped at 49, which is no stop id or string of this run",
    ),
    "an end before the limit": (
        changed(
            OUTPUT_IDS=lambda ids: ids[:5],
            output_token_logprobs=lambda entries: entries[:5],
        ),
        "it cut the completion at 5 of 12 tokens",
    ),
    "an unknown end": (
        changed(finish_reason=lambda _: {"type": "tired"}),
        "{'type': 'tired'} is none of stop, length and abort",
    ),
    "more tokens than asked for": (
        changed(OUTPUT_IDS=lambda ids: [*ids, 5]),
        "13 tokens, where max_new_tokens was 12",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_answer_that_does_not_fit_is_refused_whole(lab: Lab, name: str) -> None:
    fault, said = UNFIT[name]

    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.server.faults["/generate"] = [fault]
            await refuses(site, lab, said, stop_token_ids=(1,), banned_token_ids=(1, 2))

    lab.run(work)


def test_kept_tokens_that_are_missing_are_refused(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.server.faults["/generate"] = [
                changed(output_token_sampling_mask=lambda masks: masks[1:])
            ]
            await refuses(site, lab, "sampling masks and", top_k=5)

    lab.run(work)


def test_logits_that_are_not_finite_end_the_rollout_before_them(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            sampling = {"stop_token_ids": (1,), "banned_token_ids": (1, 2)}
            whole = await site.one(lab.request(**sampling))
            site.server.faults["/generate"] = [not_finite]
            rollout = await site.one(lab.request(**sampling))
            assert rollout.finish_reason == "error"
            assert rollout.completion_ids == whole.completion_ids[:-1]

    lab.run(work)


# --- servers that do not answer ---------------------------------------------------------------


def test_a_server_that_is_not_there_at_the_start_is_named(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.servers[1].die()
            with pytest.raises(WeightSyncError) as caught:
                await site.load(1)
            assert site.servers[1].url in str(caught.value)
            assert "ConnectError" in str(caught.value)
            assert "generator.sglang.urls" in str(caught.value)
            assert site.server.bodies("/update_weights_from_disk") == []

    lab.run(work)


def test_a_wrong_key_is_named_with_the_option_that_holds_it(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(model=Model(api_key="secret"), api_key="other") as site:
            with pytest.raises(WeightSyncError, match=r"generator\.sglang\.api_key_variable"):
                await site.load(1)

    lab.run(work)


def test_what_a_dying_server_leaves_is_sampled_by_another_one(lab: Lab) -> None:
    requests = [lab.request(f"g{k}", ids=(k + 5,), size=3, seed=k) for k in range(4)]

    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            whole = await site.collect(*requests)
        async with lab.site(2) as site:
            await site.load(1)
            for server in site.servers:
                server.credit = 0
            open_call = site.begin(*requests)
            await asyncio.gather(*(site.seen("/generate", 6, k) for k in range(2)))
            await site.servers[0].stepped(3)
            await site.servers[0].die()
            site.servers[1].credit = None
            found = await open_call
            assert {n: g.rollouts for n, g in found.items()} == {
                n: g.rollouts for n, g in whole.items()
            }
            assert site.generator.metrics()["generator/servers/num_lost"] == 1

    lab.run(work)


def test_when_no_server_is_left_the_failure_names_each_with_its_cause(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            for server in site.servers:
                server.credit = 0
            open_call = site.begin(*(lab.request(f"g{k}") for k in range(4)))
            await asyncio.gather(*(site.seen("/generate", 2, k) for k in range(2)))
            urls = [server.url for server in site.servers]
            for server in site.servers:
                await server.die()
            with pytest.raises(GeneratorFailure) as caught:
                await open_call
            assert "no SGLang server is left" in str(caught.value)
            assert all(url in str(caught.value) for url in urls)
            assert "ConnectError" in str(caught.value)

    lab.run(work)


def test_a_server_that_was_launched_again_waits_for_the_next_weights(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            for server in site.servers:
                server.credit = 0
            open_call = site.begin(lab.request("a"), lab.request("b"))
            await asyncio.gather(*(site.seen("/generate", 1, k) for k in range(2)))
            await site.servers[0].die()
            await site.servers[0].start()
            site.servers[1].credit = site.servers[0].credit = None
            assert len(await open_call) == 2
            await site.collect(*(lab.request(f"g{k}") for k in range(4)))
            assert len(site.servers[0].bodies("/generate")) == 1
            await site.load(2)
            await site.collect(*(lab.request(f"g{k}") for k in range(4)))
            assert len(site.servers[0].bodies("/generate")) == 3

    lab.run(work)


@pytest.mark.parametrize("fault", [cut_off, status(503), status(500)], ids=["cut", "503", "500"])
def test_a_call_that_broke_is_made_again_a_few_times(lab: Lab, fault: Fault) -> None:
    async def work() -> None:
        async with lab.site(max_retries=2) as site:
            await site.load(1)
            whole = await site.one(lab.request())
            site.server.faults["/generate"] = [fault, fault]
            assert await site.one(lab.request()) == whole
            assert site.generator.metrics()["generator/servers/num_retries"] == 2
            site.server.faults["/generate"] = [fault] * 3
            await refuses(site, lab, "/generate: ")
            assert len(site.server.bodies("/generate")) == 7

    lab.run(work)


def test_a_request_that_is_refused_is_not_made_again(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.server.faults["/generate"] = [status(400, "top_k is odd")]
            await refuses(site, lab, "HTTP 400: top_k is odd")
            assert len(site.server.bodies("/generate")) == 1

    lab.run(work)


def test_a_rollout_that_takes_too_long_fails_and_is_never_drawn_again(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2, rollout_deadline_seconds=0.2) as site:
            await site.load(1)
            for server in site.servers:
                server.credit = 0
            said = "rollout_deadline_seconds = 0.2 from a server that works"
            await refuses(site, lab, said)
            assert sum(len(server.bodies("/generate")) for server in site.servers) == 1

    lab.run(work)


def test_a_server_that_hangs_is_left_for_another_one(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            site.is_hasty(control_deadline_seconds=4.0)
            site.servers[0].credit = 0
            site.servers[0].faults["/health_generate"] = [silent]
            found = await site.collect(lab.request("a", size=3))
            assert len(found["a"].rollouts) == 3
            assert len(site.servers[1].bodies("/generate")) == 3
            assert len(site.servers[0].bodies("/health_generate")) == 1

    lab.run(work)


def test_a_server_that_is_slow_and_well_is_waited_for(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            site.is_hasty(control_deadline_seconds=4.0)
            site.servers[0].credit = 0
            task = site.begin(lab.request())
            await site.seen("/health_generate")
            site.servers[0].credit = None
            assert (await task)["a"].rollouts
            assert site.servers[1].bodies("/generate") == []

    lab.run(work)


def test_a_server_that_is_asked_at_a_standstill_is_not_lost(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.is_hasty(control_deadline_seconds=4.0)
            site.server.credit = 0
            site.server.faults["/health_generate"] = [silent]
            task = site.begin(lab.request())
            await site.seen("/health_generate")
            await site.generator.pause()
            await asyncio.sleep(4.5)
            site.server.credit = None
            await site.generator.resume()
            assert (await task)["a"].rollouts
            assert len(site.server.bodies("/generate")) == 1

    lab.run(work)


def test_what_a_server_ends_unasked_goes_on_from_its_tokens(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            whole = await site.one(lab.request(**ENDLESS))
            site.server.credit = 0
            open_call = site.begin(lab.request(**ENDLESS))
            await site.seen("/generate", 2)
            await site.settled()
            await site.server.stepped(4)
            for running in site.server.running:
                running.is_to_abort = True
            site.server.credit = None
            (rollout,) = (await open_call)["a"].rollouts
            assert rollout == whole
            assert len(site.server.bodies("/generate")[2]["input_ids"]) == 3 + 5

    lab.run(work)


def test_a_server_that_goes_on_ending_rollouts_unasked_fails_them(lab: Lab) -> None:
    nothing = changed(
        OUTPUT_IDS=[],
        output_token_logprobs=[],
        weight_versions=[],
        finish_reason=lambda _: {"type": "abort", "message": "shutting down"},
    )

    async def work() -> None:
        async with lab.site(max_retries=2) as site:
            await site.load(1)
            site.server.faults["/generate"] = [nothing] * 9
            await refuses(site, lab, "it ended a rollout early, unasked")
            assert len(site.server.bodies("/generate")) == 3

    lab.run(work)


@pytest.mark.parametrize(
    ("model", "on_update", "said"),
    [
        (Model(overlap=True), "keep", "needs --disable-overlap-schedule"),
        (Model(speculative="EAGLE"), "wait", "it runs a draft model"),
        (Model(disaggregation="decode"), "wait", "it does only prefill or only decoding"),
        (Model(preferred={"top_k": 5}), "wait", "--preferred-sampling-params would change"),
        (
            Model(architectures=("GptOssForCausalLM",)),
            "wait",
            "it serves GptOssForCausalLM and the run's model is LlamaForCausalLM",
        ),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused_at_the_start(
    lab: Lab, model: Model, on_update: str, said: str
) -> None:
    async def work() -> None:
        async with lab.site(model=model, on_update=on_update) as site:
            with pytest.raises(WeightSyncError) as caught:
                await site.load(1)
            assert said in str(caught.value)
            assert site.server.url in str(caught.value)
            assert site.server.version == "default"

    lab.run(work)


@pytest.mark.parametrize("on_update", ["wait", "recompute", "restart"])
def test_an_overlapping_schedule_is_fine_where_no_running_request_is_kept(
    lab: Lab, on_update: str
) -> None:
    async def work() -> None:
        async with lab.site(model=Model(overlap=True), on_update=on_update) as site:
            await site.load(1)
            await site.one(lab.request())

    lab.run(work)


def test_rollouts_that_keep_failing_end_the_run_and_are_counted(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(3)
            await site.collect(*(lab.request(f"fine{k}", **ENDLESS) for k in range(4)))
            site.server.faults["/generate"] = [not_finite] * 7
            groups = await site.collect(*(lab.request(f"bad{k}", **ENDLESS) for k in range(7)))
            assert {g.rollouts[0].finish_reason for g in groups.values()} == {"error"}
            assert site.generator.metrics()["generator/engine/num_failed"] == 7
            site.server.faults["/generate"] = [not_finite]
            with pytest.raises(GeneratorFailure, match="policy version 3 were not finite, for 8"):
                await site.one(lab.request("one more", **ENDLESS))

    lab.run(work)


@pytest.mark.parametrize(
    "fault", [garbage(b"<html>"), status(404), changed_server(speculative_algorithm="EAGLE")]
)
def test_whatever_a_lost_server_says_later_the_others_go_on_without_it(
    lab: Lab, fault: Fault
) -> None:
    async def work() -> None:
        async with lab.site(2) as site:
            await site.load(1)
            await site.servers[1].die()
            await site.load(2)
            await site.servers[1].start()
            site.servers[1].faults["/server_info"] = [fault]
            await site.load(3)
            assert (await site.one(lab.request())).version_spans[0].policy_version == 3
            assert site.generator.metrics()["generator/servers/num_used"] == 1
            await site.load(4)
            assert site.generator.metrics()["generator/servers/num_used"] == 2

    lab.run(work)


def test_an_abort_that_is_given_up_hides_no_cancellation(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site() as site:
            await site.load(1)
            site.server.credit = 0
            site.begin(lab.request("a", **ENDLESS))
            await site.seen("/generate")
            (group,) = site.generator._open
            (rollout,) = group.rollouts
            assert rollout.call is not None
            assert rollout.task is not None
            task = rollout.task
            rollout.call.is_given_up = True
            # Both in one turn of the loop: the call has ended and nobody was told yet.
            rollout.call.http.add_done_callback(lambda _: task.cancel())
            rollout.call.http.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            assert len(site.server.bodies("/generate")) == 1

    lab.run(work)


def test_a_key_that_cannot_be_sent_is_not_shown(lab: Lab) -> None:
    async def work() -> None:
        async with lab.site(api_key="very-secret\n") as site:
            with pytest.raises(WeightSyncError) as caught:
                await site.load(1)
            assert "very-secret" not in str(caught.value)
            assert site.server.url in str(caught.value)

    lab.run(work)


def test_an_address_that_is_none_is_a_failure_that_names_it() -> None:
    async def main() -> None:
        async with http_client(None, 1.0) as http:
            with pytest.raises(ServerRefused, match="http://one:x/server_info is no address"):
                await Server("http://one:x", http).get("/server_info", 1.0)

    asyncio.run(main())
