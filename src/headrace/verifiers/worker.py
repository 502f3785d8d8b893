"""The program inside a worker process: takes jobs from a pipe, one at a time, and answers.

Started by `worker_process` as ``python -m headrace.verifiers.worker SETTINGS``. Owns: nothing that
runs here can write into the channel by printing, an answer carries the number of its job, and the
process ends with its parent.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from headrace.child import die_with_parent, take_channel
from headrace.errors import ConfigError
from headrace.verifiers import frames

Handler = Callable[[frames.Message], frames.Message]


def main(settings: frames.Message) -> None:
    """Answer jobs until the parent closes the pipe, or until a job runs out of memory."""
    requests, replies = take_channel()
    die_with_parent(requests)
    _limit_memory(settings["memory_mib"])
    try:
        handler = _handler(settings["kind"], settings["target"])
    except ConfigError as error:
        _send(replies, {"ready": False, "detail": str(error)})
        return
    _send(replies, {"ready": True, "cpu_seconds": time.process_time()})
    pid = os.getpid()
    while (request := frames.read(requests)) is not None:
        began = time.perf_counter()
        try:
            reply = handler(request["job"])
        except MemoryError:
            # What is left of the heap cannot be trusted: say so and end.
            reply = {"status": "oom", "detail": "out of memory; its process was ended"}
        if os.getpid() != pid:
            # A fork that the function left behind: the answer is its parent's to give.
            os._exit(0)
        figures = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time()}
        _send(replies, {**reply, **figures, "sequence": request["sequence"]})
        if reply["status"] == "oom":
            return


def _handler(kind: str, target: str) -> Handler:
    """Import what a kind of job needs; only the worker of that kind pays for it."""
    match kind:
        case "math":
            from headrace.verifiers.math import grading  # noqa: PLC0415 - needs flint

            return grading.handle
        case "function":
            from headrace.verifiers import calling  # noqa: PLC0415 - runs the user's module

            return calling.load(target)
        case "reward_model":
            from headrace.verifiers import reward_scoring  # noqa: PLC0415 - torch takes seconds

            return reward_scoring.load(target)
        case _:
            msg = f"unknown kind of worker {kind!r}"
            raise AssertionError(msg)


def _limit_memory(mebibytes: int | None) -> None:
    if mebibytes is None:
        return
    limit = mebibytes * 1024 * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(replies: BinaryIO, message: frames.Message) -> None:
    replies.write(frames.encode(message))
    replies.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
