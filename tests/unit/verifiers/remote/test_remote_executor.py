"""The client: every job has an answer in bounded time, and none that does not hold."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from verifier_site import (
    FakeExecutor,
    Raw,
    http,
    job,
    raw_server,
    read_message,
    read_request,
    serving,
    until,
)

from headrace import __version__
from headrace.config import RemoteConfig
from headrace.errors import ConfigError
from headrace.verifiers import build
from headrace.verifiers.remote import endpoint
from headrace.verifiers.remote.executor import RemoteExecutor, remote_token
from headrace.verifiers.remote.server import Gate
from headrace.verifiers.remote.wire import HEALTH_PATH, Health, RunAnswer, RunRequest
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Limits, Tier

NOBODY = "http://127.0.0.1:9"
"""The discard port: nothing answers there."""
HANG_SECONDS = 120.0
BRIEF = Limits(wall_seconds=0.2, output_bytes=1000)


@pytest.fixture(autouse=True)
def _short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_REST_SECONDS", 0.02)
    monkeypatch.setattr(endpoint, "LONGEST_REST_SECONDS", 0.1)
    monkeypatch.setattr(endpoint, "_GRACE_SECONDS", 0.1)


@contextlib.asynccontextmanager
async def remote(*urls: str, token: str | None = None, **options: Any) -> Any:  # noqa: ANN401 - of RemoteConfig
    patience = {"patience_seconds": 60.0, "queue_seconds": 30.0, "health_seconds": 30.0}
    config = RemoteConfig(endpoints=urls, **{**patience, **options})
    executor = RemoteExecutor(config, token)
    try:
        yield executor
    finally:
        await executor.close()
        await executor.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), HANG_SECONDS)
        await asyncio.sleep(0.02)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks were left: {left}"

    asyncio.run(main())


async def run_all(executor: RemoteExecutor, jobs: Sequence[Job]) -> list[Execution]:
    return await asyncio.gather(*(executor.run(one) for one in jobs))


def jobs(count: int, source: str = "print 1") -> list[Job]:
    return [job(source, str(n)) for n in range(count)]


def test_jobs_are_spread_over_all_endpoints() -> None:
    async def work() -> None:
        fakes = [FakeExecutor() for _ in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(serving(one)))[0] for one in fakes]
            executor = await stack.enter_async_context(remote(*urls))
            answers = await run_all(executor, jobs(60, "sleep 0.002\nprint 1"))
        assert [one.job_id for one in answers] == [str(n) for n in range(60)]
        assert all(one.stdout == b"1\n" for one in answers)
        assert min(len(one.begun) for one in fakes) >= 10
        assert sum(len(one.begun) for one in fakes) == 60

    run(work)


def test_an_endpoint_that_is_slow_gets_few_jobs() -> None:
    async def work() -> None:
        fast, slow = FakeExecutor(), FakeExecutor(seconds=0.3)
        async with (
            serving(fast) as (first, _),
            serving(slow) as (second, _),
            remote(first, second, max_open_jobs=8) as executor,
        ):
            await executor.examine()
            answers = await run_all(executor, jobs(60))
        assert {one.ending for one in answers} == {Ending.EXITED}
        assert len(fast.begun) > 2 * len(slow.begun)

    run(work)


def test_one_that_is_down_costs_no_job() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        async with serving(fake) as (url, _), remote(NOBODY, url) as executor:
            answers = await run_all(executor, jobs(20))
        assert {one.ending for one in answers} == {Ending.EXITED}
        assert len(fake.begun) == 20

    run(work)


def test_where_all_are_down_a_job_is_infra_in_bounded_time_with_the_causes() -> None:
    async def work() -> None:
        began = time.monotonic()
        async with remote(NOBODY, patience_seconds=4.8) as executor:
            answers = await run_all(executor, [job("print 1", str(n), limits=BRIEF) for n in "ab"])
        assert time.monotonic() - began < HANG_SECONDS
        for one in answers:
            assert one.ending is Ending.INFRA
            assert "no answer within 5 s" in one.detail
            assert "127.0.0.1:9: ConnectError" in one.detail

    run(work)


def test_one_that_comes_back_is_used_again() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        async with serving(fake) as (url, _), remote(url) as executor:
            assert (await executor.run(job("print 1", "a"))).is_clean
            port = int(url.rpartition(":")[2])
        # The executor above is closed; a new one meets the address while nobody is there.
        async with remote(url) as executor:
            early = asyncio.create_task(executor.run(job("print 1", "b")))
            await until(lambda: "ConnectError" in executor._endpoints[0].trouble)
            async with serving(fake, port=port):
                assert (await early).is_clean
                assert (await executor.run(job("print 1", "c"))).is_clean
        assert fake.begun == ["a", "b", "c"]

    run(work)


HEALTH = Health(
    wire_version=1, headrace="9.9.9", python="3", tier=Tier.CELL, num_slots=1, max_queued=1,
    num_queued=0, num_running=0, num_done=0, num_infra=0, num_repeated=0, num_refused=0,
    num_cancelled=0, uptime_seconds=1.0, latency_p50_seconds=None, latency_p99_seconds=None,
)  # fmt: skip


def well_but(answer: Callable[[Job], bytes | None]) -> Raw:
    """Return a server that is well, and answers jobs with raw bytes; None: never."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            path, body = await read_request(reader)
            if path == HEALTH_PATH:
                writer.write(http(HEALTH.model_dump_json().encode()))
                continue
            said = answer(RunRequest.model_validate_json(body).job)
            if said is None:
                await asyncio.Event().wait()
            writer.write(said or b"")
            await writer.drain()
            if b"Content-Length" not in (said or b""):
                writer.close()
                return

    return talk


def right(asked: Job, **changes: Any) -> bytes:  # noqa: ANN401 - of Execution
    done = Execution(job_id=asked.job_id, tier=Tier.CELL, ending=Ending.EXITED, exit_status=0)
    return RunAnswer(execution=replace(done, **changes)).model_dump_json().encode()


def test_the_server_of_these_tests_can_answer_rightly() -> None:
    async def work() -> None:
        server = raw_server(well_but(lambda asked: http(right(asked))))
        async with server as url, remote(url) as executor:
            assert (await executor.run(job())).is_clean

    run(work)


GARBAGE: dict[str, tuple[Callable[[Job], bytes | None], str]] = {
    "no HTTP": (lambda _: b"what?\r\n\r\n", "RemoteProtocolError"),
    "closes at once": (lambda _: b"", "RemoteProtocolError"),
    "cut off": (lambda asked: http(right(asked))[:-5] + b"", "no answer|RemoteProtocolError"),
    "an empty answer": (lambda _: http(b""), "its answer is none"),
    "a page": (lambda _: http(b"<html>It works!</html>"), "its answer is none.*It works"),
    "no UTF-8": (lambda _: http(b'{"\xff'), "its answer is none"),
    "a failure of its own": (lambda _: http(b"oops", "500 No"), "HTTP 500: 'oops'"),
    "elsewhere": (
        lambda _: http(b"", "307 Go", "Location: http://127.0.0.1:9/\r\n"),
        "HTTP 307",
    ),
    "another job": (lambda asked: http(right(asked, job_id="other")), "answers job 'other'"),
    "a lower tier": (lambda asked: http(right(asked, tier=Tier.LOCK)), "in tier lock, below"),
    "no isolation": (lambda asked: http(right(asked, tier=Tier.NONE)), "in tier none"),
    "too much output": (lambda asked: http(right(asked, stdout=b"x" * 1001)), "1001 bytes"),
    "endless": (lambda _: http(b"x" * 10**6), "longer than"),
    "an unknown field": (
        lambda asked: http(right(asked).replace(b'"tier"', b'"reward":1,"tier"')),
        "its answer is none",
    ),
    "no status": (lambda asked: http(right(asked, exit_status=None)), "without a status"),
    "a number that is none": (
        lambda asked: http(right(asked).replace(b'"cpu_seconds":0.0', b'"cpu_seconds":NaN')),
        "its answer is none",
    ),
    "compressed": (
        lambda _: http(b"\x1f\x8b\x08\x00", headers="Content-Encoding: gzip\r\n"),
        "its answer is none",
    ),
    "another version": (
        lambda asked: http(right(asked).replace(b'"wire_version":1', b'"wire_version":2')),
        "its answer is none",
    ),
    "INFRA": (
        lambda asked: http(right(asked, ending=Ending.INFRA, exit_status=None, detail="no cell")),
        "no cell",
    ),
    "silence": (lambda _: None, "no answer within 0.4 s"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_an_answer_that_does_not_hold_is_infra_and_never_a_result(kind: str) -> None:
    answer, words = GARBAGE[kind]

    async def work() -> None:
        options = {"minimum_tier": "cell", "max_tries": 2, "queue_seconds": 0.1}
        async with (
            raw_server(well_but(answer)) as url,
            remote(url, **options) as executor,
        ):
            done = await executor.run(job(limits=BRIEF))
        assert done.ending is Ending.INFRA
        assert done.exit_status is None
        assert not done.stdout
        assert re.search(words, done.detail), done.detail

    run(work)


@pytest.mark.parametrize("kind", GARBAGE)
def test_an_endpoint_that_answers_garbage_costs_no_job_where_another_is_well(kind: str) -> None:
    answer, _ = GARBAGE[kind]

    async def work() -> None:
        fake = FakeExecutor()
        options = {"minimum_tier": "cell"}
        if kind in {"silence", "cut off"}:  # which cost a deadline
            options["queue_seconds"] = 2.0
        async with (
            raw_server(well_but(answer)) as bad,
            serving(fake) as (good, _),
            remote(bad, good, **options) as executor,
        ):
            asked = [replace(one, limits=BRIEF) for one in jobs(12)]
            answers = await run_all(executor, asked)
        assert {one.ending for one in answers} == {Ending.EXITED}
        assert Counter(fake.begun) == Counter(one.job_id for one in asked)

    run(work)


def test_one_that_fails_fast_does_not_draw_all_jobs() -> None:
    answer, _ = GARBAGE["INFRA"]

    async def work() -> None:
        asked: list[str] = []

        def count(one: Job) -> bytes | None:
            asked.append(one.job_id)
            return answer(one)

        fake = FakeExecutor()
        async with (
            raw_server(well_but(count)) as bad,
            serving(fake) as (good, _),
            remote(bad, good, max_open_jobs=4) as executor,
        ):
            answers = await run_all(executor, jobs(100, "sleep 0.001"))
        assert {one.ending for one in answers} == {Ending.EXITED}
        assert len(asked) < 60

    run(work)


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (b"ok", "its health is none"),
        (HEALTH.model_copy(update={"wire_version": 2}), f"9.9.9 there .* {__version__} here"),
        (HEALTH.model_copy(update={"tier": Tier.LOCK}), "isolates by lock, below .* bubblewrap"),
        (HEALTH.model_copy(update={"tier": Tier.NONE}), "isolates by none"),
    ],
)
def test_an_endpoint_that_is_unfit_gets_no_job_and_says_why(
    health: Health | bytes, words: str
) -> None:
    paths: list[str] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            path, _ = await read_request(reader)
            paths.append(path)
            body = health if isinstance(health, bytes) else health.model_dump_json().encode()
            writer.write(http(body))

    async def work() -> None:
        async with raw_server(talk) as url:
            options = {"minimum_tier": "bubblewrap", "patience_seconds": 0.3}
            async with remote(url, **options) as executor:
                (report,) = await executor.examine()
                done = await executor.run(job(limits=BRIEF))
        assert report.is_unfit
        assert re.search(words, report.trouble), report.trouble
        assert done.ending is Ending.INFRA
        assert report.trouble in done.detail
        assert set(paths) == {HEALTH_PATH}

    run(work)


def test_a_wrong_token_is_told_apart_and_names_the_key() -> None:
    async def work() -> None:
        gate = Gate(token="x" * 16)
        async with serving(FakeExecutor(), gate=gate) as (url, _):
            async with remote(url, token="y" * 16) as executor:
                (report,) = await executor.examine()
                assert report.is_unfit
                assert "token_env" in report.trouble
            async with remote(url, token="x" * 16) as executor:
                assert (await executor.run(job())).is_clean
                assert not (await executor.examine())[0].trouble

    run(work)


def test_to_be_turned_away_by_a_full_queue_is_no_failure() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        limits = {"num_slots": 1, "max_queued": 1}
        async with serving(fake, **limits) as (url, desk), remote(url, max_tries=1) as executor:
            answers = await run_all(executor, jobs(20, "sleep 0.002"))
            assert desk.counts.num_refused > 0
        assert {one.ending for one in answers} == {Ending.EXITED}
        assert len(fake.begun) == 20

    run(work)


def test_many_jobs_wait_here_without_a_deadline_of_their_own() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        options = {"max_open_jobs": 1, "patience_seconds": 3.8}
        async with serving(fake) as (url, _), remote(url, **options) as executor:
            # All of them together take longer than one may, with what it waits for.
            asked = [replace(one, limits=BRIEF) for one in jobs(9, "sleep 0.5")]
            answers = await run_all(executor, asked)
        assert {one.ending for one in answers} == {Ending.EXITED}
        assert fake.most_running == 1

    run(work)


def test_a_cancelled_call_ends_the_job_where_it_runs() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        async with serving(fake) as (url, _), remote(url) as executor:
            call = asyncio.create_task(executor.run(job("wait")))
            await until(lambda: fake.num_running == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: fake.cancelled == ["a"])
            assert (await executor.run(job("print 1", "b"))).is_clean

    run(work)


def test_an_executor_that_is_closed_leaves_no_caller_waiting() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        async with serving(fake) as (url, _), remote(url) as executor:
            call = asyncio.create_task(executor.run(job("wait")))
            await until(lambda: fake.num_running == 1)
            await executor.close()
            assert (await call).ending is Ending.INFRA
            assert (await executor.run(job())).detail.startswith("the executor is closed")

    run(work)


def test_a_job_that_no_server_takes_is_infra_with_the_reason() -> None:
    async def work() -> None:
        async with serving(FakeExecutor()) as (url, _), remote(url, max_tries=2) as executor:
            done = await executor.run(job(limits=Limits(memory_mib=10**9, wall_seconds=1.0)))
            assert done.ending is Ending.INFRA
            assert "limits.memory_mib" in done.detail
            assert (await executor.run(job())).is_clean

    run(work)


def test_a_lost_answer_is_asked_for_again_and_the_job_runs_once() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        async with serving(fake) as (url, _):
            host, port = url.removeprefix("http://").split(":")
            lost: list[int] = []

            async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, back = await asyncio.open_connection(host, int(port))
                try:
                    while True:
                        head, body = await read_message(reader)
                        back.write(head.encode() + body)
                        head_back, answer = await read_message(there)
                        if "/v1/run" in head and not lost:
                            lost.append(len(answer))
                            return
                        writer.write(head_back.encode() + answer)
                finally:
                    back.close()

            async with raw_server(proxy) as through, remote(through) as executor:
                assert (await executor.run(job("print 1"))).is_clean
        assert lost
        assert fake.begun == ["a"]

    run(work)


def test_the_token_comes_from_the_environment_or_an_error_that_names_it() -> None:
    named = RemoteConfig(endpoints=(NOBODY,), token_env="T")
    assert remote_token(RemoteConfig(endpoints=(NOBODY,)), {}) is None
    assert remote_token(named, {"T": "secret"}) == "secret"
    for environ in ({}, {"T": ""}, {"T": "two words"}):
        with pytest.raises(ConfigError, match="token_env") as error:
            remote_token(named, environ)
        assert "two words" not in str(error.value)


def test_how_jobs_went_is_told_as_metrics() -> None:
    async def work() -> None:
        fake = FakeExecutor()
        # Two tries: a third failure in a row would have the server rest, and then it has no places.
        options = {"max_open_jobs": 2, "max_tries": 2}
        async with serving(fake, num_slots=3) as (url, _), remote(url, **options) as executor:
            before = executor.statistics()
            assert "verifier/remote/run_seconds/p50" not in before
            assert before["verifier/remote/num_endpoints_well"] == 0.0
            await run_all(executor, [*jobs(4, "sleep 0.05\nprint 1"), job("infra no cell", "x")])
            found = executor.statistics()
            later = executor.statistics()
        assert found["verifier/remote/num_exited"] == 4.0
        assert found["verifier/remote/num_infra"] == 1.0
        assert found["verifier/remote/slots/num_jobs"] == 5.0
        assert found["verifier/remote/slots/max_waiting"] == 3.0
        assert found["verifier/remote/slots/num_retries"] >= 1.0
        assert 0.0 < found["verifier/remote/slots/utilisation"] <= 1.0
        assert found["verifier/remote/servers/num_slots"] == 3.0
        assert found["verifier/remote/servers/load"] == pytest.approx(
            found["verifier/remote/slots/utilisation"] * 2 / 3
        )
        assert found["verifier/remote/run_seconds/p99"] >= 0.05
        assert later["verifier/remote/slots/num_jobs"] == 0.0
        assert later["verifier/remote/num_exited"] == 4.0
        assert build._measured(executor) == (executor,)

    run(work)
