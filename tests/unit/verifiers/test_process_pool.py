import asyncio
import dataclasses
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from headrace.verifiers.process_pool import ProcessPool, Reply, ReplyStatus
from headrace.verifiers.worker_process import WorkerProcess, WorkerSpec

REWARDS = """
import os, struct, subprocess, sys, time

STRAY = b'{"status": "ok", "value": 0.5, "sequence": 0}'
STRAY = struct.pack(">I", len(STRAY)) + STRAY

def reward(prompt, completion, answer, metadata):
    print("noise on standard output", flush=True)
    os.write(1, b"more noise")
    if completion == "loop":
        while True:
            pass
    if completion == "hang":
        time.sleep(1000)
    if completion == "exit":
        os._exit(3)
    if completion == "child":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if completion == "session":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(__file__ + ".pid", "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
    if completion == "fork":
        if os.fork() == 0:
            return 0.75
        time.sleep(0.2)
        return 0.5
    if completion == "stray":
        for fd in range(3, 20):
            try:
                os.write(fd, STRAY)
            except OSError:
                pass
        return 0.5
    if completion.startswith("pay "):
        return float(completion[4:])
    if completion.startswith("wait "):
        while not os.path.exists(completion[5:]):
            time.sleep(0.01)
        return 0.25
    if completion == "nap":
        time.sleep(0.02)
    if completion == "memory":
        return len(bytearray(8 * 1024**3))
    return 1.0
"""


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return WorkerSpec(
        kind="function",
        target=f"{file}:reward",
        num_processes=2,
        timeout_seconds=4.0,
        memory_mib=2048,
    )


@pytest.fixture
def pool(spec: WorkerSpec) -> Iterator[ProcessPool]:
    pool = ProcessPool(spec)
    yield pool
    pool.close_blocking()
    assert children() == []


def children() -> list[psutil.Process]:
    """All but Python's own tracker of shared memory, which other tests may have started."""
    tracker = resource_tracker._resource_tracker._pid
    every = psutil.Process().children(recursive=True)
    return [child for child in every if child.pid != tracker]


def job(completion: str) -> dict[str, object]:
    return {"prompt": "p", "completion": completion, "answer": None, "metadata": {}}


async def call_all(pool: ProcessPool, *completions: str) -> list[Reply]:
    return await asyncio.gather(*(pool.call(job(text)) for text in completions))


def statuses(pool: ProcessPool, *completions: str) -> list[str]:
    return [reply.status.value for reply in asyncio.run(call_all(pool, *completions))]


def test_nothing_is_started_before_the_first_job(pool: ProcessPool) -> None:
    assert pool.pids == ()
    assert children() == []


def test_prints_of_the_user_do_not_reach_the_channel(pool: ProcessPool) -> None:
    assert statuses(pool, "ok", "ok", "ok") == ["ok"] * 3


def test_a_job_that_never_ends_costs_one_process_and_no_slot(pool: ProcessPool) -> None:
    asyncio.run(call_all(pool, "ok", "ok"))
    before = set(pool.pids)
    result = statuses(pool, *["ok"] * 7, "hang", *["ok"] * 8)
    assert result == ["ok"] * 7 + ["timeout"] + ["ok"] * 8
    assert len(pool.pids) == 2
    gone = before - set(pool.pids)
    assert len(gone) == 1
    assert not psutil.pid_exists(gone.pop())


def test_of_jobs_that_are_given_together_each_has_its_own_end(spec: WorkerSpec) -> None:
    pool = ProcessPool(_with(spec, num_processes=1))
    texts = [f"pay {n}" for n in range(40)]
    texts[7], texts[8], texts[20], texts[30] = "loop", "exit", "memory", "stray"

    async def work() -> list[Reply]:
        await call_all(pool, *["ok"] * 4)
        pool.slots.read()
        return await call_all(pool, *texts)

    try:
        replies = asyncio.run(work())
    finally:
        pool.close_blocking()
    crash = ReplyStatus.CRASH
    odd = {7: ReplyStatus.TIMEOUT, 8: crash, 20: ReplyStatus.OOM, 30: crash}
    for n, reply in enumerate(replies):
        assert reply.status is odd.get(n, ReplyStatus.OK), (n, reply)
        assert n in odd or reply.value == n
    assert replies[7].cpu_seconds > 0.0
    assert replies[8].exit_status == 3
    figures = pool.slots.read()
    assert (figures.num_jobs, figures.num_retries, figures.num_cancelled) == (40, 2, 0)
    # All but the one at work, and those that had not asked yet when it ended.
    assert 30 <= figures.max_waiting <= 39


def test_small_jobs_are_given_together_and_large_ones_one_at_a_time(
    spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    cut = ProcessPool._cut

    def noted(pool: ProcessPool) -> object:
        batch = cut(pool)
        sizes.append(len(batch))
        return batch

    monkeypatch.setattr(ProcessPool, "_cut", noted)
    pool = ProcessPool(_with(spec, num_processes=1, timeout_seconds=60.0))
    try:
        asyncio.run(call_all(pool, "ok", "ok"))
        asyncio.run(call_all(pool, *["ok"] * 64))
        small, sizes[:] = list(sizes), []
        asyncio.run(call_all(pool, *["nap"] * 8))
        sizes.clear()
        asyncio.run(call_all(pool, *["nap"] * 8))
    finally:
        pool.close_blocking()
    assert max(small) > 4
    assert sizes == [1] * 8


def test_a_caller_that_gives_up_costs_those_beside_it_nothing(spec: WorkerSpec) -> None:
    pool = ProcessPool(_with(spec, num_processes=1, timeout_seconds=100.0))

    async def work() -> list[Reply]:
        await call_all(pool, *["ok"] * 4)
        texts = ["pay 1", "loop", "pay 2", "loop", "pay 3"]
        calls = [asyncio.create_task(pool.call(job(text))) for text in texts]
        await asyncio.sleep(0.1)
        for loops in (calls[1], calls[3]):
            loops.cancel()
        return await asyncio.gather(*calls[::2])

    try:
        assert [reply.value for reply in asyncio.run(work())] == [1.0, 2.0, 3.0]
        assert pool.slots.read().num_cancelled == 2
    finally:
        pool.close_blocking()
    assert children() == []


def test_what_nobody_foresaw_is_raised_at_every_caller(
    spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_process(spec: WorkerSpec) -> WorkerProcess:
        msg = f"no more descriptors for {spec.kind}"
        raise OSError(msg)

    monkeypatch.setattr(WorkerProcess, "start", no_process)
    pool = ProcessPool(spec)
    try:
        for _ in range(3):
            with pytest.raises(OSError, match="descriptors for function"):
                asyncio.run(pool.call(job("ok")))
    finally:
        pool.close_blocking()


@pytest.mark.slow
def test_twenty_timeouts_leave_no_zombie_and_a_pool_of_the_same_size(spec: WorkerSpec) -> None:
    pool = ProcessPool(_with(spec, timeout_seconds=0.3))
    try:
        assert statuses(pool, *["hang"] * 20) == ["timeout"] * 20
        assert len(pool.pids) == 2
        assert len(children()) == 2
        assert all(child.status() != psutil.STATUS_ZOMBIE for child in children())
        pool._spec = spec  # whose deadline is of what answers
        assert statuses(pool, "ok") == ["ok"]
    finally:
        pool.close_blocking()
    assert children() == []


def test_a_kill_takes_what_the_process_started(pool: ProcessPool) -> None:
    assert statuses(pool, "child") == ["timeout"]
    assert all(child.name() != "sleep" for child in children())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the children of a process")
def test_a_kill_takes_what_started_a_session_of_its_own(
    spec: WorkerSpec, pool: ProcessPool
) -> None:
    assert statuses(pool, "session") == ["timeout"]
    pid = int(Path(spec.target.removesuffix(":reward") + ".pid").read_text())
    # It may be a zombie until init, which inherited it, has reaped it.
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("odd", ["fork", "stray"])
def test_a_second_answer_to_one_job_never_becomes_the_answer_to_the_next(
    spec: WorkerSpec, odd: str
) -> None:
    pool = ProcessPool(_with(spec, num_processes=1, timeout_seconds=60.0))
    try:
        replies = [pool.call_blocking(job(odd))]
        replies += [pool.call_blocking(job(f"pay {reward}")) for reward in range(5)]
    finally:
        pool.close_blocking()
    assert [reply.value for reply in replies] == [0.5, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert children() == []


def test_a_module_that_hangs_ends_at_the_limit_of_the_start_and_is_named(
    tmp_path: Path, spec: WorkerSpec
) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    target = f"{tmp_path}/hangs.py:reward"
    pool = ProcessPool(_with(spec, target=target, start_seconds=1.5, num_processes=1))
    try:
        start = time.monotonic()
        reply = pool.call_blocking(job("ok"))
        assert time.monotonic() - start < 120.0  # a hang guard
    finally:
        pool.close_blocking()
    assert reply.status is ReplyStatus.TIMEOUT
    assert target in reply.detail
    assert "import did not end within 1.5 s" in reply.detail


def test_a_process_that_ends_or_is_too_slow_is_named(pool: ProcessPool, spec: WorkerSpec) -> None:
    for completion in ("exit", "hang"):
        assert spec.target in pool.call_blocking(job(completion)).detail


def test_a_process_that_ends_is_replaced_and_its_job_tried_once_more(pool: ProcessPool) -> None:
    reply = asyncio.run(pool.call(job("exit")))
    assert reply.status is ReplyStatus.CRASH
    assert statuses(pool, "ok") == ["ok"]


def test_a_process_killed_from_outside_costs_no_job(pool: ProcessPool) -> None:
    assert statuses(pool, "ok") == ["ok"]
    for pid in pool.pids:
        psutil.Process(pid).kill()
    assert statuses(pool, "ok") == ["ok"]


def test_running_out_of_memory_is_told_apart(pool: ProcessPool) -> None:
    assert statuses(pool, "memory", "ok") == ["oom", "ok"]


def test_the_pool_works_from_any_loop_and_thread(pool: ProcessPool) -> None:
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.extend(statuses(pool, "ok")))
    thread.start()
    thread.join(60)
    assert results + statuses(pool, "ok") == ["ok", "ok"]
    assert pool.call_blocking(job("ok")).status is ReplyStatus.OK


def test_a_cancelled_caller_takes_its_process_with_it(spec: WorkerSpec) -> None:
    pool = ProcessPool(_with(spec, timeout_seconds=100.0))

    async def give_up() -> None:
        await pool.call(job("ok"))
        task = asyncio.create_task(pool.call(job("loop")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Answered, so the slot came back.
        assert (await pool.call(job("ok"))).status is ReplyStatus.OK

    try:
        asyncio.run(give_up())
    finally:
        pool.close_blocking()
    assert children() == []


def test_close_ends_jobs_in_progress_and_may_be_called_twice(spec: WorkerSpec) -> None:
    pool = ProcessPool(_with(spec, timeout_seconds=100.0))

    async def close_during_a_job() -> Reply:
        await pool.call(job("ok"))
        task = asyncio.create_task(pool.call(job("loop")))
        await asyncio.sleep(0.2)
        await pool.close()
        await pool.close()
        return await task

    assert asyncio.run(close_during_a_job()).status is ReplyStatus.CRASH
    assert children() == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.call_blocking(job("ok"))


def _with(spec: WorkerSpec, **changes: object) -> WorkerSpec:
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 8])
def test_close_while_a_process_starts_leaves_no_caller_waiting(
    spec: WorkerSpec, milliseconds: int
) -> None:
    async def close_during_a_start() -> list[Reply]:
        pool = ProcessPool(spec)
        calls = [asyncio.create_task(pool.call(job("ok"))) for _ in range(4)]
        await asyncio.sleep(milliseconds / 1000)
        await pool.close()
        return await asyncio.wait_for(asyncio.gather(*calls), 120)

    replies = asyncio.run(close_during_a_start())
    assert {reply.status for reply in replies} == {ReplyStatus.CRASH}
    gc.collect()
    assert children() == []


# --- more and fewer processes ---------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    """Wait; the deadlines of jobs end it."""
    while not holds():  # noqa: ASYNC110 - processes tell nobody
        await asyncio.sleep(0.01)


@pytest.fixture
def patient(spec: WorkerSpec) -> Iterator[ProcessPool]:
    """One process, whose jobs may wait for a test on a busy machine."""
    pool = ProcessPool(dataclasses.replace(spec, num_processes=1, timeout_seconds=300.0))
    yield pool
    pool.close_blocking()
    assert children() == []


def test_a_pool_that_grows_takes_what_waits_at_once(patient: ProcessPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def grow() -> list[Reply]:
        calls = asyncio.ensure_future(call_all(patient, *[f"wait {gate}"] * 3))
        await until(lambda: len(patient.pids) == 1)
        await patient.resize(3)
        await until(lambda: len(patient.pids) == 3)
        gate.touch()
        return await calls

    assert [reply.value for reply in asyncio.run(grow())] == [0.25] * 3
    assert patient.num_workers == 3


def test_a_pool_that_shrinks_waits_for_the_work_in_hand_and_loses_none(
    patient: ProcessPool, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    async def shrink() -> list[Reply]:
        await patient.resize(3)
        calls = asyncio.ensure_future(call_all(patient, *[f"wait {gate}"] * 3))
        await until(lambda: patient._num_serving == len(patient.pids) == 3)
        resize = asyncio.ensure_future(patient.resize(1))
        await until(lambda: patient.num_workers == 1)
        await asyncio.sleep(0.05)
        assert not resize.done()
        assert len(patient.pids) == 3
        gate.touch()
        await resize
        assert len(patient.pids) == 1
        return [*await calls, *await call_all(patient, "pay 0.5", "pay 0.5")]

    assert [reply.value for reply in asyncio.run(shrink())] == [0.25] * 3 + [0.5] * 2
    assert len(patient.pids) == 1


@pytest.mark.parametrize("seed", range(3))
def test_every_job_is_answered_once_and_rightly_however_a_pool_grows_and_shrinks(
    patient: ProcessPool, seed: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - no secret

    async def one(k: int) -> Reply:
        return await patient.call(job(f"pay {k}" if k % 7 else "exit"))

    async def work() -> list[Reply]:
        calls, resizes = [], []
        for k in range(60):
            calls.append(asyncio.ensure_future(one(k)))
            if dice.random() < 0.2:
                resizes.append(asyncio.ensure_future(patient.resize(dice.randint(1, 3))))
            if dice.random() < 0.2:
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        replies = await asyncio.gather(*calls)
        await asyncio.gather(*resizes)
        await patient.resize(1)
        return replies

    for k, reply in enumerate(asyncio.run(work())):
        assert reply.value == k if k % 7 else reply.status is ReplyStatus.CRASH
    assert len(patient.pids) <= 1
    assert patient.slots.read().num_jobs == 60


def test_who_waits_for_fewer_processes_is_let_go_when_the_pool_is_closed(
    patient: ProcessPool, tmp_path: Path
) -> None:
    async def close() -> list[Reply]:
        await patient.resize(2)
        calls = asyncio.ensure_future(call_all(patient, *[f"wait {tmp_path}/never"] * 2))
        await until(lambda: patient._num_serving == len(patient.pids) == 2)
        resize = asyncio.ensure_future(patient.resize(1))
        await until(lambda: patient.num_workers == 1)
        await patient.close()
        await resize
        await patient.resize(3)
        return await calls

    assert {reply.status for reply in asyncio.run(close())} == {ReplyStatus.CRASH}
