"""Ranks that are started once and do one job after another, each in a process group of its own.

A job is a function of this module; it is called on every rank and its answers come back by rank.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.config import ParallelConfig, RunConfig
from headrace.learners.metrics import LossSums
from headrace.learners.parallel import checkpoint
from headrace.learners.parallel.pieces import Piece
from headrace.learners.parallel.rank_layout import RankLayout
from headrace.learners.parallel.regions import Region
from headrace.learners.parallel.stored import write_parts
from headrace.learners.state import SHARDED_DIRECTORY
from headrace.learners.updater import PolicyUpdater, frozen
from headrace.models.checkpoint import load_decoder, unfilled_decoder
from headrace.models.decoder import Decoder
from headrace.types import RolloutGroup, StepResult

CPU = torch.device("cpu")
PATIENCE_SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """A policy, a recipe and what it learns from."""

    model: Path
    config: RunConfig
    batches: Sequence[Sequence[RolloutGroup]]
    """Of each step."""
    dtype: torch.dtype = torch.float64
    compute: torch.dtype | None = None
    """Of products; None: of the weights."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of one tensor."""

    name: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor
    is_first: bool
    copies: int


@dataclass(frozen=True)
class Trained:
    """What came of a case on one rank."""

    weights: list[Held]
    results: list[StepResult]


@dataclass(frozen=True)
class Gradient:
    """What one rank has of it, and the norm of all of it."""

    pieces: list[Held]
    norm: float


# --- jobs -------------------------------------------------------------------------------------


def ranked(case: Case, parallel: ParallelConfig) -> tuple[PolicyUpdater, RankLayout]:
    layout = RankLayout(parallel, CPU)

    def adopted() -> Decoder:
        decoder = unfilled_decoder(case.model, case.dtype)
        layout.adopt(decoder)
        checkpoint.fill(layout.pieces_of(decoder), case.model)
        return decoder

    has_reference = case.config.objective.kl_coefficient > 0
    updater = PolicyUpdater(
        adopted(),
        case.config,
        num_updates=10,
        compute_dtype=case.compute or case.dtype,
        reference=adopted() if has_reference else None,
        layout=layout,
    )
    return updater, layout


def train(case: Case, parallel: ParallelConfig) -> Trained:
    updater, layout = ranked(case, parallel)
    results = [updater._step(list(batch)) for batch in case.batches]
    return Trained(weights=held(layout.pieces), results=results)


def gradient(case: Case, parallel: ParallelConfig) -> Gradient:
    updater, layout = ranked(case, parallel)
    for _ in range(2):  # nothing of the first may be left in the second
        for parameter in updater._parameters:
            parameter.grad = None
        updater._accumulate(updater._plan(updater._score(list(case.batches[0]), LossSums())))
    return Gradient(pieces=held(layout.pieces, of_gradients=True), norm=layout.gradient_norm())


def save(case: Case, parallel: ParallelConfig, directory: Path) -> None:
    updater, layout = ranked(case, parallel)
    for batch in case.batches:
        updater._step(list(batch))
    parts = checkpoint.copied(layout.pieces, updater._optimizer)
    if dist.get_rank() == 0:
        checkpoint.write_counters(directory, updater._counters)
    write_parts(directory / SHARDED_DIRECTORY, parts, dist.new_group(backend="gloo"))


def resume(case: Case, parallel: ParallelConfig, directory: Path) -> Trained:
    updater, layout = ranked(case, parallel)
    updater._counters = checkpoint.restore(directory, layout.pieces, updater._optimizer)
    results = [updater._step(list(batch)) for batch in case.batches]
    return Trained(weights=held(layout.pieces), results=results)


def held(pieces: Sequence[Piece], *, of_gradients: bool = False) -> list[Held]:
    return [
        Held(
            name=piece.name,
            shape=piece.shape,
            region=piece.region,
            tensor=_tensor(piece.local.grad if of_gradients else piece.local),
            is_first=piece.is_first,
            copies=piece.copies,
        )
        for piece in pieces
    ]


def _tensor(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().clone()


# --- one process ------------------------------------------------------------------------------


def alone(case: Case) -> PolicyUpdater:
    decoder = load_decoder(case.model, case.dtype)
    return PolicyUpdater(
        decoder,
        case.config,
        num_updates=10,
        compute_dtype=case.compute or case.dtype,
        reference=frozen(decoder) if case.config.objective.kl_coefficient > 0 else None,
    )


def trained_alone(case: Case) -> tuple[dict[str, Tensor], list[StepResult]]:
    updater = alone(case)
    results = [updater._step(list(batch)) for batch in case.batches]
    named = updater._layout.parameters(updater._decoder, updater._head)
    return {name: p.detach() for name, p in named.items()}, results


# --- ranks ------------------------------------------------------------------------------------


def whole(by_rank: Sequence[Sequence[Held]]) -> dict[str, Tensor]:
    """Put the tensors together; every element comes from exactly one rank, and copies agree."""
    found: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for part in (part for parts in by_rank for part in parts):
        places = part.region.within(Region.whole(part.shape))
        if part.name not in found:
            found[part.name] = torch.full(part.shape, torch.nan, dtype=part.tensor.dtype)
            times[part.name] = torch.zeros(part.shape, dtype=torch.int64)
        if part.is_first:
            found[part.name][places] = part.tensor
            times[part.name][places] += 1
    assert all((count == 1).all() for count in times.values())
    for part in (part for parts in by_rank for part in parts):
        places = part.region.within(Region.whole(part.shape))
        torch.testing.assert_close(part.tensor, found[part.name][places], equal_nan=True)
    return found


class Ranks:
    """Four processes."""

    SIZE = 4

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0
        self.made: dict[str, Path] = {}
        """What tests share."""
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(self.SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def __call__(
        self, job: Callable[..., Any], *arguments: object, parallel: Mapping[str, int]
    ) -> list[Any]:
        """Return what ``job`` returns on each rank of this layout."""
        self._jobs += 1
        store = f"{self._folder.name}/{self._jobs}"
        config = ParallelConfig(**parallel)
        ends = self._ends[: config.num_ranks]
        for rank, end in enumerate(ends):
            end.send((job.__name__, rank, store, config, arguments))
        return [_answer(end) for end in ends]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _answer(end: Connection) -> Any:  # noqa: ANN401 - whatever the job returns
    assert end.poll(PATIENCE_SECONDS), "a rank does not answer"
    is_error, value = end.recv()
    assert not is_error, value
    return value


def _serve(end: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            name, rank, store, config, arguments = end.recv()
        except EOFError:
            return
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=config.num_ranks
        )
        try:
            case, *rest = arguments
            answer = False, globals()[name](case, config, *rest)
        except Exception:  # noqa: BLE001 - told to the test
            answer = True, traceback.format_exc()
        end.send(answer)
        dist.destroy_process_group()
