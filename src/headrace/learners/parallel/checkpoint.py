"""What the ranks of a learner need to go on exactly where they were, on as many ranks or others.

Copied first, written afterwards: training goes on meanwhile. The policy, AdamW's moments and the
value head are parts by name under ``sharded/``, with config and tokenizer beside them; counters are
in ``learner.json``, as in a checkpoint of one process. Both kinds are read into any layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.learners.parallel.pieces import Piece
from headrace.learners.parallel.regions import Region
from headrace.learners.parallel.stored import Part, StoredParts
from headrace.learners.state import (
    ADAMW_STATE,
    COUNTERS_FILE,
    HF_DIRECTORY,
    SHARDED_DIRECTORY,
    LearnerCounters,
)
from headrace.learners.value_head import HEAD_PREFIX
from headrace.models.hf_files import weight_files


def copied(pieces: Sequence[Piece], optimizer: torch.optim.Optimizer) -> dict[str, Part]:
    """Return a copy of what this rank has to write of weights and moments, on the processor."""
    return dict(_copies(pieces, optimizer))


def _copies(
    pieces: Sequence[Piece], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Part]]:
    for piece in pieces:
        if not piece.is_first or not piece.region.count:
            continue
        yield piece.name, _copy(piece.local, piece)
        for key, value in optimizer.state[piece.local].items():
            if value.dim() or not piece.shape:
                yield f"{piece.name}:{key}", _copy(value, piece)
            elif not any(piece.region.offsets):
                # The same on all ranks: the one with the first element writes it.
                whole = Region.whole(())
                yield (
                    f"{piece.name}:{key}",
                    Part(shape=(), region=whole, tensor=value.cpu().clone()),
                )


def _copy(tensor: Tensor, piece: Piece) -> Part:
    held = tensor.detach().to("cpu", copy=True).contiguous()
    return Part(shape=piece.shape, region=piece.region, tensor=held)


def write_counters(directory: Path, counters: LearnerCounters) -> None:
    """Write what every rank counts alike. Raises CheckpointError."""
    path = directory / COUNTERS_FILE
    try:
        path.write_text(json.dumps(asdict(counters)) + "\n", encoding="utf-8")
    except OSError as error:
        msg = f"{path} could not be written: {error}"
        raise CheckpointError(msg) from error


def restore(
    directory: Path, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer
) -> LearnerCounters:
    """Give this rank its part of a checkpoint of either kind, in place; return the counters.

    Raises CheckpointError if any part is missing or does not fit; nothing is replaced then.
    """
    try:
        counters = LearnerCounters(**json.loads((directory / COUNTERS_FILE).read_text("utf-8")))
        parts = dict(_wanted(pieces))
        _read(directory, parts)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        msg = f"checkpoint {directory} cannot be resumed from: {error}"
        raise CheckpointError(msg) from error
    _install(pieces, optimizer, parts)
    return counters


def _wanted(pieces: Sequence[Piece]) -> Iterator[tuple[str, Part]]:
    for piece in pieces:
        yield piece.name, _room(piece.shape, piece.region, piece.local.dtype)
        if piece.local.requires_grad:
            for key in ADAMW_STATE:
                is_count = key == "step"
                shape = () if is_count else piece.shape
                region = Region.whole(()) if is_count else piece.region
                dtype = torch.float32 if is_count else piece.local.dtype
                yield f"{piece.name}:{key}", _room(shape, region, dtype)


def _room(shape: tuple[int, ...], region: Region, dtype: torch.dtype) -> Part:
    return Part(shape=shape, region=region, tensor=torch.empty(region.sizes, dtype=dtype))


def _read(directory: Path, parts: Mapping[str, Part]) -> None:
    """Fill ``parts``. Raises ValueError unless the checkpoint holds them all and nothing else."""
    if (directory / SHARDED_DIRECTORY).is_dir():
        stored, by_name = StoredParts([directory / SHARDED_DIRECTORY]), dict(parts)
    else:
        # What one process wrote: a model's directory, and two files beside it.
        if not (directory / HF_DIRECTORY).is_dir():
            msg = f"there is neither {SHARDED_DIRECTORY}/ nor {HF_DIRECTORY}/ in it"
            raise ValueError(msg)
        stored = StoredParts([directory / HF_DIRECTORY, directory])
        by_name = {_name_beside(name): part for name, part in parts.items()}
    if unfit := sorted(set(stored.names) ^ set(by_name)):
        msg = f"it does not fit this learner: {_unfit(unfit[0], stored)}"
        raise ValueError(msg)
    stored.read(by_name)


def _unfit(name: str, stored: StoredParts) -> str:
    what = "the policy's weight" if ":" not in name else "the optimizer's state"
    return f"{what} {name} is {'not wanted' if name in stored.names else 'missing'}, among others"


def _name_beside(name: str) -> str:
    """Return the name that one process gives a tensor: a head's weights are alone in their file."""
    is_head_weight = name.startswith(HEAD_PREFIX) and ":" not in name
    return name.removeprefix(HEAD_PREFIX) if is_head_weight else name


@torch.no_grad()
def _install(
    pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, parts: Mapping[str, Part]
) -> None:
    optimizer.state.clear()
    for piece in pieces:
        piece.local.copy_(parts[piece.name].tensor)
        moments = {
            key: parts[name].tensor.to(piece.local.device)
            for key in ADAMW_STATE
            if (name := f"{piece.name}:{key}") in parts
        }
        if moments:
            optimizer.state[piece.local] = moments


def fill(pieces: Sequence[Piece], directory: Path) -> None:
    """Read this rank's part of a Hugging Face model, in place; its names and shapes were checked.

    Raises OSError or SafetensorError.
    """
    held = {piece.name: piece for piece in pieces if piece.region.count}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in held:
                    piece = held[name]
                    places = piece.region.within(Region.whole(piece.shape))
                    piece.local.copy_(file.get_slice(name)[places])
