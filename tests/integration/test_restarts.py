"""`train --restarts`: a run whose process is killed is resumed by the one that started it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from lab import Lab, Running
from test_resume import FOR_EVER, assert_same_run, num_steps

pytestmark = pytest.mark.slow


def run_of(running: Running) -> psutil.Process | None:
    """Return the process of the run, below the one that started it; None between two of them."""
    try:
        below = psutil.Process(running.process.pid).children()
    except psutil.NoSuchProcess:
        return None
    return below[0] if below else None


def kill_run(running: Running) -> psutil.Process:
    process = run_of(running)
    assert process is not None
    process.kill()
    return process


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_all_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 60.0
    while not all(map(has_ended, processes)):
        assert time.monotonic() < deadline, f"still there: {processes}"
        time.sleep(0.02)


def test_a_run_that_is_killed_is_resumed_and_ends_like_one_never_killed(
    lab: Lab, finished: Path
) -> None:
    run = lab.folder / "restarted"
    running = lab.train("restarted", "--restarts", 2)
    assert running.wait_until((run / "config.json").is_file)
    kill_run(running)
    assert running.wait_until(lambda: num_steps(run) >= 1)
    kill_run(running)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    # A new checkpoint: the count begins anew.
    kill_run(running)
    ended = running.wait()
    assert ended.status == 0, ended.err
    assert "killed by SIGKILL; restart 2 of 2" in ended.err
    assert ended.err.count("restart 1 of 2") == 2
    assert_same_run(run, finished)


def test_what_a_killed_run_leaves_running_is_ended_before_it_is_resumed(own_lab: Lab) -> None:
    (own_lab.folder / "reward.py").write_text(
        "import subprocess, sys\n\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)\n\n\n"
        "def share_of_ones(prompt, completion, answer, metadata):\n"
        "    return completion.count('1') / max(len(completion), 1)\n",
        encoding="utf-8",
    )
    run = own_lab.folder / "leaving"
    running = own_lab.train("leaving", "--restarts", 1)
    assert running.wait_until(lambda: num_steps(run) >= 1)
    first = run_of(running)
    assert first is not None
    below = first.children(recursive=True)
    assert len(below) >= 2
    kill_run(running)
    events = run / "events.jsonl"
    assert running.wait_until(lambda: '"kind": "resume"' in read(events))
    assert all(map(has_ended, below))
    running.process.kill()
    running.wait()


def test_the_run_ends_with_the_process_that_started_it(lab: Lab) -> None:
    run = lab.folder / "supervisor-killed"
    running = lab.train("supervisor-killed", *FOR_EVER, "--restarts", 3)
    assert running.wait_until(lambda: num_steps(run) >= 1)
    everything = psutil.Process(running.process.pid).children(recursive=True)
    assert everything
    running.process.kill()
    running.wait()
    assert_all_end(everything)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_stops_once_and_is_not_started_again(
    lab: Lab, number: signal.Signals
) -> None:
    name = f"supervised-{number.name}"
    running = lab.train(name, "--restarts", 3)
    assert running.wait_until(lambda: num_steps(lab.folder / name) >= 1)
    running.process.send_signal(number)
    ended = running.wait()
    assert ended.status == 0, ended.err
    assert "stopped after step" in ended.out
    assert ended.err.count("finishing the step") == 1
    assert "restart" not in ended.err


def test_a_run_that_is_killed_too_often_ends_and_says_so(lab: Lab) -> None:
    run = lab.folder / "killed-too-often"
    running = lab.train("killed-too-often", "--restarts", 1)
    assert running.wait_until((run / "config.json").is_file)
    kill_run(running)
    assert running.wait_until(lambda: num_steps(run) >= 1)
    kill_run(running)
    ended = running.wait()
    assert ended.status == 1
    assert "killed by SIGKILL, 2 times in a row without a new checkpoint" in ended.err
    assert "--restarts = 1" in ended.err
    assert "Traceback" not in ended.err


def test_what_the_user_can_fix_is_said_once_and_not_tried_again(lab: Lab) -> None:
    ended = lab.train("refused", "--restarts", 3, "--set", "group_size=0").wait()
    assert ended.status == 2
    assert ended.err.count("error: group_size") == 1


def test_a_run_that_is_killed_when_it_has_nothing_left_to_do_has_ended_well(lab: Lab) -> None:
    run = lab.folder / "killed-at-the-end"
    running = lab.train("killed-at-the-end", "--restarts", 1)
    assert running.wait_until(lambda: '"kind": "end"' in read(run / "events.jsonl"))
    kill_run(running)
    ended = running.wait()
    assert ended.status == 0, ended.err
    assert "restart 1 of 1" in ended.err
    assert "done: 8 steps" in ended.out
    assert (run / "report.html").is_file()
    assert num_steps(run) == 8


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
