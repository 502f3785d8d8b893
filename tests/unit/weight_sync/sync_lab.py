"""A generator's process for tests: opens notices that it is sent and says what it read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.models.weights import checksum, weight_update
from headrace.roles import WeightReader, WeightSync
from headrace.types import WeightNotice, WeightUpdate

DEADLINE = 60.0


def weights(seed: int, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(64, 96, generator=random).to(dtype),
        "odd": torch.randn(3, 5, generator=random).to(dtype),
        "norm": torch.randn(7, generator=random),
        "none": torch.empty(0, 4, dtype=dtype),
    }


async def published(sync: WeightSync, version: int) -> None:
    """Return once a publication is over."""
    await (await sync.publish(version))


def update(version: int, tensors: Mapping[str, Tensor] | None = None) -> WeightUpdate:
    return weight_update(version, weights(version) if tensors is None else tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """``hold``: keep the context open until the next request."""

    notice: WeightNotice
    hold: bool = False


class ReaderProcess:
    def __init__(self, reader: WeightReader) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._send(reader)

    def read(self, notice: WeightNotice, *, hold: bool = False) -> int:
        """Return the checksum of what it read. Raises what it raised."""
        self._send(Ask(notice=notice, hold=hold))
        assert self.process.stdout is not None
        answer = pickle.load(self.process.stdout)  # noqa: S301 - our own child
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, int)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._send(None)
        self._end()

    def _end(self) -> None:
        self.process.wait(DEADLINE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _send(self, value: object) -> None:
        assert self.process.stdin is not None
        pickle.dump(value, self.process.stdin)
        self.process.stdin.flush()


@contextmanager
def reader_process(reader: WeightReader) -> Iterator[ReaderProcess]:
    process = ReaderProcess(reader)
    try:
        yield process
    finally:
        process.close()


def _serve() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    reader = pickle.load(requests)  # noqa: S301 - our own parent
    held = None
    while (asked := pickle.load(requests)) is not None:  # noqa: S301 - our own parent
        if held is not None:
            held.__exit__(None, None, None)
            held = None
        context = reader.open(asked.notice)
        try:
            found = context.__enter__()
            answer: object = checksum(found.tensors.items())
            del found
        except WeightSyncError as error:
            answer = WeightSyncError(str(error))
        else:
            held = context
            if not asked.hold:
                held.__exit__(None, None, None)
                held = None
        pickle.dump(answer, replies)
        replies.flush()
    reader.close()


if __name__ == "__main__":
    from sync_lab import Ask as _Ask  # noqa: F401 - requests are pickled under that name

    _serve()
