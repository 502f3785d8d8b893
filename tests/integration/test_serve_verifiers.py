"""`headrace serve-verifiers` as a process with the real sandbox, and a run's executor over it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.config import RemoteConfig
from headrace.verifiers.remote.executor import RemoteExecutor
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Limits

TOKEN = "0123456789abcdef"
LIMITS = Limits(cpu_seconds=2.0, wall_seconds=20.0)


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start one and yield it with the line that it says where it serves in."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve-verifiers", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"VERIFIER_TOKEN": TOKEN},
    )
    assert process.stderr is not None
    try:
        yield process, process.stderr.readline()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def executions(url: str, *jobs: Job) -> list[Execution]:
    async def work() -> list[Execution]:
        executor = RemoteExecutor(RemoteConfig(endpoints=(url,)), TOKEN)
        try:
            return await asyncio.gather(*(executor.run(job) for job in jobs))
        finally:
            await executor.close()

    return asyncio.run(work())


@pytest.mark.slow
def test_programs_run_in_the_sandbox_of_another_process_and_it_ends_when_told() -> None:
    with server("--token-env", "VERIFIER_TOKEN") as (process, said):
        if "cannot be isolated here" in said:
            pytest.skip(said)
        url = said.split()[1].rstrip(",")
        greeting, endless, broken = executions(
            url,
            Job(job_id="1", source="print(input() * 2)", stdin=b"ab", limits=LIMITS),
            Job(job_id="2", source="while True: pass", limits=Limits(cpu_seconds=0.2)),
            Job(job_id="3", source="raise SystemExit(3)", limits=LIMITS),
        )
        process.send_signal(signal.SIGTERM)
        status = process.wait(30.0)
    assert (greeting.stdout, greeting.is_clean) == (b"abab\n", True)
    assert endless.ending is Ending.TIMEOUT_CPU
    assert (broken.ending, broken.exit_status) == (Ending.EXITED, 3)
    assert status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "give the clients' token as --token-file"),
        (["--token-env", "ABSENT"], "--token-env ABSENT: a token has at least 16"),
        (["--set", "verifier.sandbox.tier=cell"], "--set: there is no recipe"),
        (["--key", "/absent.pem"], "give both"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_the_user(arguments: list[str], words: str) -> None:
    with server(*arguments) as (process, said):
        assert process.wait(60.0) == 2
    assert words in said
