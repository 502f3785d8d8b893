"""Whether the machines of a learner's ranks reach each other, this one, and the run's files.

Asked before anything is placed: ranks that cannot meet would wait for a store's deadline, and a
checkpoint on a disk of one machine alone would be missed only when it is needed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.errors import ClusterError
from headrace.runtime.ray.calls import one_line, start_actor
from headrace.runtime.ray.cluster import own_address

CONNECT_SECONDS = 5.0
"""For a connection from one machine to another."""
ANSWER_SECONDS = 120.0
"""For a machine to start a process and do all that it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a machine can be reached, by itself."""

    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


class Listener:
    """A port at this machine's own address, where whoever comes is greeted and sent away."""

    def __init__(self) -> None:
        """Listen until `close`, or as long as the process lives. Raises OSError."""
        self._socket = socket.create_server((own_address(), 0))
        address, port = self._socket.getsockname()[:2]
        self.place = Place(host=socket.gethostname(), address=address, port=port)
        threading.Thread(target=self._greet, name="reach", daemon=True).start()

    def _greet(self) -> None:
        """Waits for connections; ended by `close`."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class _Probe:
    """Asks and answers from one machine."""

    def listen(self) -> Place:
        self._listener = Listener()
        return self._listener.place

    def problems(self, places: Sequence[Place], marks: Sequence[tuple[Path, str]]) -> list[str]:
        own = self._listener.place
        return [
            *(problem for place in places if (problem := unreached(own, place))),
            *(problem for path, text in marks if (problem := unseen(own, path, text))),
        ]


def unreached(own: Place, place: Place) -> str | None:
    """Return why ``own`` does not reach ``place``; None where it does."""
    try:
        with socket.create_connection((place.address, place.port), CONNECT_SECONDS):
            return None
    except OSError as error:
        return (
            f"{own} cannot connect to {place}: {error}; ranks talk over TCP, on ports of the "
            "system's choice: open those between the machines, or ask for ranks that one has room "
            "for"
        )


def unseen(own: Place, path: Path, text: str) -> str | None:
    """Return what is wrong unless ``own`` finds ``text`` at ``path``."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return None
    return (
        f"{own} does not see {path.parent} as this machine does; ranks read the model and write "
        "checkpoints themselves: put it on a volume that every machine has under this name"
    )


def check_reach(node_ids: Sequence[str], directory: Path, model: Path) -> None:
    """Have each machine reach the others and this one, ``directory`` and ``model``.

    ``directory`` need not exist. Raises ClusterError that names who does not reach what.
    """
    listener = Listener()
    probes = [
        start_actor(_Probe, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        for node in dict.fromkeys(node_ids)
    ]
    try:
        with _marked(directory) as mark:
            places = _answers([probe.listen.remote() for probe in probes])
            marks = [mark, _known(model / "config.json")]
            asked = [
                probe.problems.remote(
                    [listener.place, *(other for other in places if other != place)], marks
                )
                for probe, place in zip(probes, places, strict=True)
            ]
            problems = [problem for found in _answers(asked) for problem in found]
    finally:
        listener.close()
        for probe in probes:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(probe)
    if problems:
        raise ClusterError("; ".join(f"learner.parallel: {problem}" for problem in problems))


def _answers(asked: Sequence[Any]) -> list[Any]:
    """Return what probes say. Raises ClusterError where one does not."""
    try:
        found: list[Any] = ray.get(list(asked), timeout=ANSWER_SECONDS)
    except (RayError, GetTimeoutError) as error:
        msg = f"learner.parallel: a machine for its ranks does not answer: {one_line(error)}"
        raise ClusterError(msg) from error
    return found


@contextmanager
def _marked(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield a file beside which ``directory`` is or will be, and what is in it."""
    text = secrets.token_hex(16)
    there = next(path for path in (directory, *directory.parents) if path.is_dir())
    try:
        descriptor, name = tempfile.mkstemp(prefix=".headrace-seen-", dir=there)
    except OSError as error:
        msg = f"--output {directory}: nothing can be written there: {error}"
        raise ClusterError(msg) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        yield Path(name), text
    finally:
        Path(name).unlink(missing_ok=True)


def _known(path: Path) -> tuple[Path, str]:
    return path, path.read_text(encoding="utf-8")
