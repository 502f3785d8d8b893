"""One rank of a learner: the program inside its process, and what it does when it is asked.

Started by `processes` as ``python -m headrace.learners.parallel.rank``. Owns: nothing printed here
gets into the channel, and the process ends with its parent. What it is asked, all ranks are asked,
in the same order: most of it waits for the others.
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.checkpoint.api import CheckpointException

from headrace.child import die_with_parent, take_channel
from headrace.child.channel import READY, Answer, Request, encode, read_request
from headrace.config import RunConfig
from headrace.errors import CheckpointError, HeadraceError, RunError
from headrace.learners.parallel import checkpoint
from headrace.learners.parallel.rank_layout import RankLayout
from headrace.learners.parallel.stored import Part, write_parts
from headrace.learners.parallel.weights import Bucket, SlotPart, parts_of, write_parts_of
from headrace.learners.state import SHARDED_DIRECTORY
from headrace.learners.updater import PolicyUpdater
from headrace.models.checkpoint import unfilled_decoder
from headrace.models.decoder import Decoder
from headrace.types import RolloutGroup, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetting:
    """What a rank must know before anything else."""

    rank: int
    meeting: str
    """Where the ranks find each other, as `RankHosts.meeting` says."""
    config: RunConfig
    model: Path
    num_updates: int
    num_threads: int
    device: str
    """By the numbers of the rank's own process."""
    compute_dtype: torch.dtype


class Rank(PolicyUpdater):
    """A rank's part of the policy."""

    def __init__(self, setting: RankSetting) -> None:
        """Every rank makes one at the same time."""
        config, device = setting.config, _own_device(setting)
        layout = RankLayout(config.learner.parallel, device)
        self._ranks = layout
        self._writing = dist.new_group(backend="gloo")
        """For writing checkpoints alone, which goes on beside steps."""
        has_reference = config.objective.kl_coefficient > 0
        super().__init__(
            _adopted(layout, setting.model, device),
            config,
            num_updates=setting.num_updates,
            compute_dtype=setting.compute_dtype,
            reference=_adopted(layout, setting.model, device) if has_reference else None,
            layout=layout,
        )

    def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner`."""
        return self._step(groups)

    def rehearse(self, longest_prompt: int) -> None:
        """Compute the gradient of the largest micro-batch there can be, and throw it away."""
        self._rehearse(longest_prompt)

    def load(self, directory: Path) -> int:
        """Restore this rank's part and return the policy version. Raises CheckpointError."""
        self._counters = checkpoint.restore(directory, self._ranks.pieces, self._optimizer)
        return self.policy_version

    def fill(self, bucket: Bucket, path: str) -> None:
        """Write what this rank holds into shared memory."""
        write_parts_of(bucket, path, parts_of(bucket, self._ranks.pieces))

    def bring(self, bucket: Bucket) -> list[SlotPart]:
        """Return a copy of what this rank holds of ``bucket``, for a learner elsewhere."""
        return [
            replace(part, tensor=part.tensor.to("cpu", bucket.dtype, copy=True).contiguous())
            for part in parts_of(bucket, self._ranks.pieces)
        ]

    def copied(self, directory: Path) -> dict[str, Part]:
        """Return a copy of what this rank writes into a checkpoint; counters are written at once.

        Raises CheckpointError.
        """
        if dist.get_rank() == 0:
            checkpoint.write_counters(directory, self._counters)
        return checkpoint.copied(self._ranks.pieces, self._optimizer)

    def write(self, directory: Path, parts: Mapping[str, Part]) -> None:
        """Write ``parts`` together with all other ranks. Raises CheckpointError."""
        try:
            write_parts(directory / SHARDED_DIRECTORY, parts, self._writing)
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            # What torch.distributed.checkpoint raises names every rank that failed.
            msg = f"a rank of the learner could not write its part: {_last_error(error)}"
            raise CheckpointError(msg) from error


def _adopted(layout: RankLayout, model: Path, device: torch.device) -> Decoder:
    decoder = unfilled_decoder(model, device=device)
    layout.adopt(decoder)
    checkpoint.fill(layout.pieces_of(decoder), model)
    return decoder


def _own_device(setting: RankSetting) -> torch.device:
    device = torch.device(setting.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _last_error(error: BaseException) -> str:
    """Return the line of a long report that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [type(error).__name__])[-1]


class Service:
    """Does what is asked, one after another, and answers."""

    def __init__(self, rank: Rank, replies: BinaryIO) -> None:
        self._rank = rank
        self._replies = replies
        self._gate = threading.Lock()
        self._writer: threading.Thread | None = None

    def serve(self, requests: BinaryIO) -> None:
        """Waits for requests; unblocked by the learner, whose closing of the pipe ends it."""
        self._answer(Answer(number=READY))
        while (request := read_request(requests)) is not None:
            work = self._save if request.method == "save" else self._do
            self._try(request.number, functools.partial(work, request))

    def _do(self, request: Request) -> Any:  # noqa: ANN401 - whatever the method returns
        methods: Mapping[str, Callable[..., Any]] = {
            "step": self._rank.step,
            "rehearse": self._rank.rehearse,
            "load": self._rank.load,
            "fill": self._rank.fill,
            "bring": self._rank.bring,
        }
        return methods[request.method](*request.arguments)

    def _save(self, request: Request) -> None:
        """Copy what is to be kept, and answer; once it is written, answer again."""
        (directory,) = request.arguments
        if self._writer is not None:
            # One that nobody waits for any more: its collectives must not mix with these.
            self._writer.join()
        parts = self._rank.copied(directory)
        self._writer = threading.Thread(
            target=self._try,
            args=(request.number + 1, lambda: self._rank.write(directory, parts)),
            name="checkpoint",
            daemon=True,
        )
        self._writer.start()

    def _try(self, number: int, work: Callable[[], Any]) -> None:
        try:
            answer = Answer(number=number, value=work())
        except HeadraceError as error:
            answer = Answer(number=number, error=error)
        except Exception as error:  # noqa: BLE001 - told to the learner, which ends the run
            traceback.print_exc()
            answer = Answer(number=number, error=RunError(f"{type(error).__name__}: {error}"))
        self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        with self._gate:
            self._replies.write(encode(answer))
            self._replies.flush()


def _met(meeting: str, num_ranks: int) -> Store:
    """Return the store at ``meeting``, which is a file or which the learner serves."""
    place = urlsplit(meeting)
    match place.scheme:
        case "file":
            return FileStore(place.path, num_ranks)
        case "tcp":
            assert place.hostname is not None
            assert place.port is not None
            return TCPStore(
                place.hostname, place.port, num_ranks, is_master=False, wait_for_workers=False
            )
        case _:
            msg = f"ranks cannot meet at {meeting}"
            raise ValueError(msg)


def main() -> None:
    """Join the other ranks, answer requests, and end when the learner closes the pipe."""
    requests, replies = take_channel()
    die_with_parent(requests)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    first = read_request(requests)
    if first is None:
        return
    (setting,) = first.arguments
    torch.set_num_threads(setting.num_threads)
    parallel = setting.config.learner.parallel
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if setting.device.startswith("cuda") else "gloo",
        store=_met(setting.meeting, parallel.num_ranks),
        rank=setting.rank,
        world_size=parallel.num_ranks,
        # The learner's own deadline comes first, and knows who is late.
        timeout=dt.timedelta(seconds=2 * parallel.timeout_seconds),
    )
    Service(Rank(setting), replies).serve(requests)
    # Not torn down: the others may have ended already, and what is left ends with the process.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
