"""The server over a real socket: who is let in, what is refused, who went away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from verifier_site import FakeExecutor, job, serving, until

from headrace.verifiers.remote.desk import JobDesk
from headrace.verifiers.remote.server import Gate
from headrace.verifiers.remote.wire import (
    ALIVE_PATH,
    HEALTH_PATH,
    METRICS_PATH,
    RUN_PATH,
    Health,
    RunAnswer,
    RunRequest,
)
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Limits, Tier

TOKEN = "0123456789abcdef"


@dataclass
class Visit:
    """A server and someone who asks it."""

    executor: FakeExecutor
    desk: JobDesk
    http: httpx2.AsyncClient
    url: str

    async def post(self, asked: Job, seconds: float = 5.0, tier: Tier = Tier.LOCK) -> Any:  # noqa: ANN401 - httpx2's
        request = RunRequest(minimum_tier=tier, deadline_seconds=seconds, job=asked)
        return await self.http.post(RUN_PATH, content=request.model_dump_json())

    async def run(self, asked: Job) -> Execution:
        answer = await self.post(asked)
        assert answer.status_code == 200, answer.text
        return RunAnswer.model_validate_json(answer.content).execution

    async def health(self) -> Health:
        return Health.model_validate_json((await self.http.get(HEALTH_PATH)).content)


def visit(
    work: Callable[[Visit], Awaitable[None]],
    *,
    gate: Gate | None = None,
    token: str | None = None,
    **limits: Any,  # noqa: ANN401 - of DeskLimits
) -> None:
    async def main() -> None:
        executor = FakeExecutor()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with (
            serving(executor, gate=gate, **limits) as (url, desk),
            httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False) as http,
        ):
            await asyncio.wait_for(work(Visit(executor, desk, http, url)), 120.0)
        assert executor.num_running == 0

    asyncio.run(main())


def test_a_job_is_run_and_answered() -> None:
    async def work(at: Visit) -> None:
        done = await at.run(job("echo\nexit 3", stdin=b"\x00\xff"))
        assert (done.stdout, done.exit_status, done.tier) == (b"\x00\xff", 3, Tier.CELL)
        assert (await at.run(job("infra no cell"))).ending is Ending.INFRA

    visit(work)


@pytest.mark.parametrize("token", [None, "x", "0123456789abcdeX", "0123456789abcdef0", "ö" * 16])
@pytest.mark.parametrize("path", [RUN_PATH, HEALTH_PATH, METRICS_PATH])
def test_without_the_token_nothing_is_read_or_told(path: str, token: str | None) -> None:
    async def work(at: Visit) -> None:
        sent = {} if token is None else {"Authorization": b"Bearer " + token.encode("latin-1")}
        method = "POST" if path == RUN_PATH else "GET"
        answer = await at.http.request(method, path, headers=sent, content=b"no JSON")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["kind"] == "unauthorized"
        assert TOKEN not in answer.text
        assert at.executor.begun == []

    visit(work, gate=Gate(token=TOKEN))


def test_with_the_token_one_is_let_in_and_anyone_may_see_that_it_lives() -> None:
    async def work(at: Visit) -> None:
        assert (await at.run(job())).ending is Ending.EXITED
        assert (await at.health()).num_done == 1
        alive = await at.http.get(ALIVE_PATH, headers={"Authorization": ""})
        assert (alive.status_code, alive.text) == (200, "ok\n")

    visit(work, gate=Gate(token=TOKEN), token=TOKEN)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/"])
def test_no_page_tells_of_the_interface(path: str) -> None:
    async def work(at: Visit) -> None:
        assert (await at.http.get(path)).status_code == 404

    visit(work)


def test_a_request_has_a_length_and_a_bound() -> None:
    async def pieces() -> Any:  # noqa: ANN401 - an async iterator
        yield b"{}"

    async def work(at: Visit) -> None:
        assert (await at.http.post(RUN_PATH, content=pieces())).status_code == 411
        answer = await at.http.post(RUN_PATH, content=b"x" * 2001)
        assert answer.status_code == 413
        assert "at most 2000" in answer.json()["message"]
        assert (await at.post(job("print 1"))).status_code == 200

    visit(work, gate=Gate(token=None, max_body_bytes=2000))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[1]", "object"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"{}", "job: Field required"),
        (json.dumps({"job": {"job_id": 3}}).encode(), "job.job_id"),
    ],
)
def test_what_is_no_request_is_refused_with_the_place(body: bytes, words: str) -> None:
    async def work(at: Visit) -> None:
        answer = await at.http.post(RUN_PATH, content=body)
        assert answer.status_code == 422
        assert words in answer.json()["message"]

    visit(work)


def test_a_job_beyond_the_ceiling_is_refused() -> None:
    async def work(at: Visit) -> None:
        answer = await at.post(job(limits=Limits(memory_mib=10**9)))
        assert answer.status_code == 422
        assert "limits.memory_mib" in answer.json()["message"]

    visit(work)


def test_a_server_does_not_run_what_it_cannot_isolate_as_demanded() -> None:
    async def work(at: Visit) -> None:
        at.desk.tier = Tier.LOCK
        answer = await at.post(job(), tier=Tier.CELL)
        assert answer.status_code == 412
        assert "cell is demanded and lock is offered" in answer.json()["message"]
        assert at.executor.begun == []

    visit(work)


def test_a_full_queue_says_when_to_come_again() -> None:
    async def work(at: Visit) -> None:
        asked = [asyncio.create_task(at.post(job("wait", str(n)))) for n in range(3)]
        await until(lambda: len(at.desk._tasks) == 3)
        answer = await at.post(job("wait", "more"))
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["retry_after_seconds"] > 0.0
        at.executor.let_go.set()
        assert {(await one).status_code for one in asked} == {200}

    visit(work, num_slots=1, max_queued=2)


def test_requests_that_are_read_or_wait_hold_bounded_memory() -> None:
    async def work(at: Visit) -> None:
        first = asyncio.create_task(at.post(job("wait", "a", stdin=b"x" * 3000)))
        await until(lambda: at.executor.num_running == 1)
        assert (await at.post(job("print 1", "b", stdin=b"x" * 3000))).status_code == 429
        assert (await at.post(job("print 1", "c"))).status_code == 200
        at.executor.let_go.set()
        assert (await first).status_code == 200

    visit(work, max_held_bytes=6000)


def test_who_goes_away_takes_the_job_along() -> None:
    async def work(at: Visit) -> None:
        asked = asyncio.create_task(at.post(job("wait")))
        await until(lambda: at.executor.num_running == 1)
        asked.cancel()
        await until(lambda: at.executor.cancelled == ["a"])
        assert (await at.run(job("print 1", "b"))).stdout == b"1\n"

    visit(work, num_slots=1)


def test_a_second_asker_keeps_the_job_that_the_first_one_left() -> None:
    async def work(at: Visit) -> None:
        first = asyncio.create_task(at.post(job("wait")))
        await until(lambda: at.executor.num_running == 1)
        second = asyncio.create_task(at.run(job("wait")))
        await until(lambda: at.desk.counts.num_repeated == 1)
        first.cancel()
        await asyncio.sleep(0.05)
        at.executor.let_go.set()
        assert (await second).ending is Ending.EXITED
        assert at.executor.begun == ["a"]

    visit(work)


def test_an_asker_hears_that_it_will_be_too_late() -> None:
    async def work(at: Visit) -> None:
        answer = await at.post(job("wait"), seconds=0.05)
        assert answer.status_code == 504
        assert "0.05 s" in answer.json()["message"]
        await until(lambda: at.executor.cancelled == ["a"])

    visit(work)


def test_a_request_that_does_not_arrive_is_given_up() -> None:
    async def work(at: Visit) -> None:
        host, port = at.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/run HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        assert at.desk._held_bytes == 0

    visit(work, gate=Gate(token=None, body_seconds=0.05))


def test_health_and_metrics_count_what_happened() -> None:
    async def work(at: Visit) -> None:
        assert (await at.health()).latency_p50_seconds is None
        for source in ("print 1", "print 1", "infra no"):
            await at.run(job(source))
        health = await at.health()
        assert (health.num_done, health.num_repeated, health.num_infra) == (2, 1, 1)
        assert (health.tier, health.num_slots, health.num_running) == (Tier.CELL, 2, 0)
        assert health.latency_p50_seconds is not None
        text = (await at.http.get(METRICS_PATH)).text
        assert "headrace_verifiers_num_done 2\n" in text
        assert 'tier="cell"} 1\n' in text

    visit(work)
