from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest
from sandbox_lab import has, job, make_pool, run, strongest

from headrace.verifiers.sandbox.canonical import decode, encode
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Limits, PythonCall, Tier
from headrace.verifiers.sandbox.pool import SandboxPool
from headrace.verifiers.sandbox.recent import Recent
from headrace.verifiers.sandbox.watch import descendants


def test_a_program_reads_its_input_and_its_output_comes_back(pool: SandboxPool) -> None:
    done = run(pool, job("print(int(input()) + 1)", stdin=b"41\n"))
    assert done.is_clean
    assert (done.stdout, done.stderr, done.returned) == (b"42\n", b"", None)
    assert done.tier is pool.tier
    assert 0 < done.cpu_seconds < 1
    assert done.wall_seconds > 0


def test_a_function_is_called_with_plain_values_and_its_value_comes_back(pool: SandboxPool) -> None:
    source = "class Solution:\n    def pair(self, a, b):\n        return {a: (b, [1.5, None])}"
    call = PythonCall(function="Solution.pair", arguments=encode(["x", {1, 2}]))
    done = run(pool, job(source, call=call))
    assert done.is_clean
    assert decode(done.returned or b"") == {"x": ({1, 2}, [1.5, None])}


@pytest.mark.parametrize(
    ("source", "status", "stderr"),
    [
        ("import sys; sys.exit(3)", 3, b""),
        ("raise SystemExit", 0, b""),
        ("import sys; sys.exit('why')", 1, b"why\n"),
        ("x = (", 1, b"SyntaxError"),
        ("1 / 0", 1, b"    1 / 0\n"),
        ("import os; os._exit(7)", 7, b""),
        ("def f(n): f(n + 1)\nf(0)", 1, b"RecursionError"),
    ],
)
def test_an_exit_is_told_by_its_status(
    pool: SandboxPool, source: str, status: int, stderr: bytes
) -> None:
    done = run(pool, source)
    assert (done.ending, done.exit_status) == (Ending.EXITED, status)
    assert stderr in done.stderr
    assert b"headrace" not in done.stderr


def test_a_signal_is_told_by_its_number(pool: SandboxPool) -> None:
    done = run(pool, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (done.ending, done.signal) == (Ending.SIGNALED, signal.SIGSEGV)


def test_exit_handlers_and_threads_are_waited_for_and_output_is_flushed(pool: SandboxPool) -> None:
    source = (
        "import atexit, threading, time\n"
        "atexit.register(lambda: print('bye', end=''))\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print('main')"
    )
    assert run(pool, source).stdout == b"main\nthread\nbye"


def test_files_of_a_job_are_in_its_directory(pool: SandboxPool) -> None:
    asked = job("print(open('data').read(), end='')")
    asked = Job(job_id=asked.job_id, source=asked.source, files={"data": b"1 2 3"})
    assert run(pool, asked).stdout == b"1 2 3"


def test_a_large_output_comes_whole(pool: SandboxPool) -> None:
    done = run(pool, job("print('x' * 200_000)", limits=Limits()))
    assert done.is_clean
    assert len(done.stdout) == 200_001


@pytest.mark.parametrize(
    ("language", "program", "source"),
    [
        (
            "cpp",
            "g++",
            "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x + 1; }",
        ),
        ("javascript", "node", "console.log(1 + parseInt(require('fs').readFileSync(0)))"),
    ],
)
def test_other_languages_run_by_their_commands(
    pool: SandboxPool, language: str, program: str, source: str
) -> None:
    if not has(program):
        pytest.skip(f"no {program} here")
    done = run(pool, job(source, stdin=b"41", language=language, limits=Limits()))
    assert done.is_clean, done
    assert done.stdout.strip() == b"42"


def test_a_program_that_does_not_compile_says_why(pool: SandboxPool) -> None:
    if not has("g++"):
        pytest.skip("no g++ here")
    done = run(pool, job("int main() { return x; }", language="cpp"))
    assert (done.ending, done.exit_status) == (Ending.EXITED, 1)
    assert b"'x' was not declared" in done.stderr or b"was not declared" in done.stderr


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Job(job_id="l", source="", language="cobol"), "cobol"),
        (Job(job_id="f", source="", files={"../x": b""}), "plain name"),
    ],
)
def test_what_nobody_can_run_is_refused_with_the_reason(
    pool: SandboxPool, asked: Job, reason: str
) -> None:
    done = run(pool, asked)
    assert done.ending is Ending.INFRA
    assert reason in done.detail


def test_a_job_that_is_asked_for_again_is_not_run_again(pool: SandboxPool) -> None:
    async def twice() -> list[Execution]:
        asked = job("import os, time; time.sleep(0.05); print(os.urandom(8))")
        return [*await asyncio.gather(pool.run(asked), pool.run(asked)), await pool.run(asked)]

    assert len({done.stdout for done in asyncio.run(twice())}) == 1


def test_an_id_stands_for_one_job_alone(pool: SandboxPool) -> None:
    run(pool, Job(job_id="same", source="print(1)"))
    with pytest.raises(ValueError, match="another job"):
        run(pool, Job(job_id="same", source="print(2)"))


def test_a_cancelled_call_ends_its_program_and_frees_the_slot() -> None:
    async def cancel(pool: SandboxPool) -> Execution:
        asked = job("while True: pass", limits=Limits(cpu_seconds=900, wall_seconds=900))
        waiting = asyncio.create_task(pool.run(asked))
        # The program cannot say that it has begun.
        while not any(any(descendants(root)) for root in pool.process_ids):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await pool.run(job("print(1)"))

    pool = make_pool(strongest())
    try:
        assert asyncio.run(cancel(pool)).is_clean
    finally:
        pool.close_blocking()


def test_one_of_two_who_wait_for_a_job_may_leave(pool: SandboxPool) -> None:
    async def leave() -> Execution:
        asked = job("import time; time.sleep(0.1); print(1)")
        first, second = (asyncio.create_task(pool.run(asked)) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        return await second

    assert asyncio.run(leave()).stdout == b"1\n"


def test_callers_wait_for_room_in_the_queue() -> None:
    async def crowd(pool: SandboxPool) -> list[Execution]:
        return await asyncio.gather(*(pool.run(job(f"print({k})")) for k in range(20)))

    pool = make_pool(strongest(), max_queued=2)
    try:
        found = asyncio.run(crowd(pool))
    finally:
        pool.close_blocking()
    assert [int(done.stdout) for done in found] == list(range(20))


def test_a_cell_that_is_killed_from_outside_is_replaced_and_its_job_runs_again() -> None:
    pool = make_pool(strongest())

    def kill() -> None:
        while not (found := [pid for root in pool.process_ids for pid in descendants(root)]):
            time.sleep(0.01)
        time.sleep(0.1)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # where the program was quicker
                os.kill(pid, signal.SIGKILL)

    try:
        run(pool, "print(0)")
        killer = threading.Thread(target=kill)
        killer.start()
        done = run(pool, "import time; time.sleep(0.5); print(1)")
        killer.join()
        assert done.ending in {Ending.EXITED, Ending.SIGNALED}
        assert run(pool, "print(2)").stdout == b"2\n"
    finally:
        pool.close_blocking()


def test_calls_come_from_any_loop_and_thread(pool: SandboxPool) -> None:
    found: list[Execution] = []
    threads = [
        threading.Thread(target=lambda: found.append(run(pool, "print(1)"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.stdout for done in found] == [b"1\n"] * 4


def test_a_closed_pool_leaves_no_process_and_runs_nothing() -> None:
    pool = make_pool(strongest())
    run(pool, "print(1)")
    pids = [*pool.process_ids, *(p for root in pool.process_ids for p in descendants(root))]
    assert pids
    pool.close_blocking()
    pool.close_blocking()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110
    assert run(pool, "print(1)").ending is Ending.INFRA


def test_statistics_count_what_was_run(pool: SandboxPool) -> None:
    before = pool.statistics()
    run(pool, "print(1)")
    after = pool.statistics()
    name = "verifier/sandbox/num_exited"
    assert after[name] == before[name] + 1
    assert (
        after["verifier/sandbox/run_seconds/p99"] >= after["verifier/sandbox/run_seconds/p50"] > 0
    )


def test_a_failure_of_ours_is_not_remembered_and_memory_is_bounded() -> None:
    recent = Recent()
    failed, done = (Job(job_id=name, source="") for name in ("failed", "done"))
    recent.keep(failed, Execution(job_id="failed", tier=Tier.CELL, ending=Ending.INFRA))
    large = Execution(job_id="done", tier=Tier.CELL, ending=Ending.EXITED, stdout=bytes(8 << 20))
    recent.keep(done, large)
    assert recent.find(failed) is None
    assert recent.find(done) is large
    for number in range(4):
        recent.keep(Job(job_id=str(number), source=""), large)
    assert recent.find(done) is None
