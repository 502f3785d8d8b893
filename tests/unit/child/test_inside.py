"""A process that answers over its pipes ends with its parent, however early that ends."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

CHILD = """
import sys, time
from headrace.child import die_with_parent, take_channel

time.sleep(float(sys.argv[1]))  # as if it were importing
requests, replies = take_channel()
die_with_parent(requests)
if sys.argv[1] == "0":
    replies.write(b"asked\\n")
    replies.flush()
time.sleep(600)  # as if it were waiting for somebody else
"""

PARENT = """
import subprocess, sys, time

child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
child.stdin.write(b"a request that nobody will read the answer of\\n")
child.stdin.flush()
print(child.pid, flush=True)
if sys.argv[2] == "0":
    child.stdout.readline()
    print("asked", flush=True)
time.sleep(600)
"""


def ended_with_its_parent(seconds_of_imports: str) -> bool:
    command = [sys.executable, "-c", PARENT, CHILD, seconds_of_imports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if seconds_of_imports == "0":
            assert parent.stdout.readline() == "asked\n"
        parent.kill()
        parent.wait()
    try:
        deadline = time.monotonic() + 60.0
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        return True
    else:
        return True
    finally:
        if child.is_running():
            child.kill()


def test_a_parent_that_dies_takes_its_child_with_it() -> None:
    assert ended_with_its_parent("0")


def test_a_parent_that_died_while_the_child_was_importing_takes_it_too() -> None:
    assert ended_with_its_parent("1")
