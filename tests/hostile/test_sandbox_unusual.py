"""Programs that end in their own way, and failures of ours that must not leave anybody waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator

import pytest
from sandbox_lab import LANGUAGES, TIERS, here, job, make_pool, report, run, strongest

from headrace.verifiers.sandbox.cell import Cell
from headrace.verifiers.sandbox.execution import Ending, Execution, Tier
from headrace.verifiers.sandbox.pool import SandboxPool
from headrace.verifiers.sandbox.streams import Streams
from headrace.verifiers.sandbox.work import compile_work

_HOLDS_ITSELF = """
import array, socket
pair = socket.socketpair()
held = array.array("i", [1, 2, 4, *(end.fileno() for end in pair)])
for end in pair:
    end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, held)])
print("sent")
"""
_RAISES_ITS_STACK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_STACK, (1 << 28, resource.RLIM_INFINITY))
print("raised")
"""
_CHANGES_MODES = """
import os
os.close(os.open("own", os.O_CREAT | os.O_WRONLY, 0o600))
before = os.stat("own").st_mode
os.chmod("own", 0o644)
os.fchmod(os.open("own", os.O_RDONLY), 0o644)
print(os.stat("own").st_mode == before)
"""
"""Its own file shows it as well as one of the host's, which stays as it is should this fail."""
_HAS_UNLIMITED_STACK = "import resource\nprint(resource.getrlimit(resource.RLIMIT_STACK)[1] == -1)"


@pytest.fixture(scope="module", params=TIERS, ids=lambda tier: tier.value)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    tier: Tier = request.param
    if not here(tier):
        pytest.skip(f"{tier} does not work here: {report(tier).detail}")
    pool = make_pool(tier)
    yield pool
    pool.close_blocking()


@pytest.mark.parametrize("ends", ["exit()", "quit()", "exit(0)", "import sys; sys.exit()"])
def test_a_program_may_end_by_the_words_that_python_has_for_it(
    pool: SandboxPool, ends: str
) -> None:
    done = run(pool, f"print(1)\n{ends}\nprint(2)")
    assert (done.exit_status, done.stdout) == (0, b"1\n"), done.stderr


def test_a_program_knows_its_file(pool: SandboxPool) -> None:
    assert run(pool, "print(__file__)").stdout == b"solution.py\n"


def test_a_program_may_ask_for_a_larger_stack(pool: SandboxPool) -> None:
    if run(pool, _HAS_UNLIMITED_STACK).stdout != b"True\n":
        import resource  # noqa: PLC0415 - Linux alone has it

        assert resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY
        pytest.skip("the stack of this machine's processes is limited")
    assert run(pool, _RAISES_ITS_STACK).stdout == b"raised\n"


def test_outputs_held_by_a_socket_that_holds_itself_end_with_the_program(
    pool: SandboxPool,
) -> None:
    before = pool.statistics()["verifier/sandbox/num_retries"]
    for _ in range(3):
        done = run(pool, _HOLDS_ITSELF)
        assert (done.ending, done.stdout) == (Ending.EXITED, b"sent\n"), done.detail
    assert pool.statistics()["verifier/sandbox/num_retries"] == before


def test_the_kernel_is_asked_to_let_go_of_such_sockets() -> None:
    """Else they stay until any socket of the machine is closed, and that may be long."""
    with Streams(b"", b"", 100) as streams:
        pair = socket.socketpair()
        for end in pair:
            socket.send_fds(end, [b"x"], [*streams._inside, *(one.fileno() for one in pair)])
        inside, streams._inside = streams._inside, []
        for descriptor in inside:
            os.close(descriptor)
        for end in pair:
            end.close()
        assert streams.drain(4.0)


def test_source_that_is_no_unicode_is_the_compilers_to_refuse() -> None:
    work = compile_work(job("int main(){} // \ud800", language="cpp"), LANGUAGES["cpp"])
    assert b"\xed\xa0\x80" in work.payload


def test_a_failure_nobody_foresaw_is_told_and_the_next_job_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(strongest())

    def fail(*_: object) -> Execution:
        raise OSError(24, "Too many open files")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Cell, "run", fail)
            found = asyncio.run(asyncio.wait_for(pool.run(job("print(1)")), 120))
        assert found.ending is Ending.INFRA
        assert "Too many open files" in found.detail
        assert run(pool, "print(2)").stdout == b"2\n"
    finally:
        pool.close_blocking()


@pytest.mark.parametrize(
    "source",
    ["raise MemoryError", "def f(): raise MemoryError('of mine')\nf()"],
)
def test_a_memory_error_that_a_program_raises_is_no_lack_of_memory(
    pool: SandboxPool, source: str
) -> None:
    done = run(pool, source)
    assert (done.ending, done.exit_status) == (Ending.EXITED, 1)
    assert b"MemoryError" in done.stderr


@pytest.mark.parametrize(
    "source",
    [
        "x = bytearray(1 << 40)",
        "try:\n    x = bytearray(1 << 40)\nexcept MemoryError:\n    raise",
        "def f(): return [0] * (1 << 40)\nf()",
    ],
)
def test_memory_that_there_is_not_is_told(pool: SandboxPool, source: str) -> None:
    assert run(pool, source).ending is Ending.OOM


def test_a_program_that_warns_itself_of_its_time_has_not_used_it(pool: SandboxPool) -> None:
    done = run(pool, "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)")
    assert (done.ending, done.signal) == (Ending.SIGNALED, signal.SIGXCPU)


def test_no_mode_of_the_hosts_files_is_changed(pool: SandboxPool) -> None:
    """Of devices under bubblewrap, for root; of all that is the user's in the lock, for others."""
    done = run(pool, _CHANGES_MODES)
    assert done.stdout == b"True\n", (done.stdout, done.stderr)
