"""What one rank holds of each parameter: a plain tensor, and where it lies in the whole.

Optimizer, export and checkpoints know pieces alone, whatever cut them. Owns: over all ranks the
pieces that are `is_first` tile every parameter exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from headrace.config import ParallelConfig
from headrace.learners.parallel.regions import Region
from headrace.learners.parallel.tensor_plan import cut_dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands."""

    replica: int
    shard: int
    tensor: int

    @classmethod
    def of(cls, rank: int, config: ParallelConfig) -> Place:
        """Return the place of ``rank``: tensor ranks lie side by side, then shards."""
        data, tensor = divmod(rank, config.tensor)
        replica, shard = divmod(data, config.shards)
        return cls(replica=replica, shard=shard, tensor=tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One rank's part of one parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    region: Region
    local: Parameter
    """The part itself: memory that it shares with ``source``."""
    source: Parameter
    """What the module computes with, and where a backward pass leaves the gradient."""
    is_first: bool
    """Whether of all ranks with these elements this is the first, which writes them."""
    copies: int
    """Ranks that hold the same elements."""


def sharded_piece(name: str, source: Parameter, place: Place, config: ParallelConfig) -> Piece:
    """Return the piece of a parameter that was cut for tensor ranks first, then for shards."""
    region, dim = Region.whole(source.shape), cut_dimension(name)
    if dim is not None:
        region = region.chunk(place.tensor, config.tensor, dim)
    region = region.chunk(place.shard, config.shards)
    with torch.no_grad():
        held = source.to_local() if isinstance(source, DTensor) else source.detach()
    assert tuple(held.shape) == region.sizes, f"{name} lies otherwise than it was cut"
    return Piece(
        name=name,
        shape=tuple(source.shape),
        region=region,
        local=Parameter(held.detach(), requires_grad=source.requires_grad),
        source=source,
        is_first=place.replica == 0 and (dim is not None or place.tensor == 0),
        copies=config.replicas * (1 if dim is not None else config.tensor),
    )


def whole_piece(name: str, parameter: Parameter, place: Place, config: ParallelConfig) -> Piece:
    """Return the piece of a parameter that every rank has all of."""
    return Piece(
        name=name,
        shape=tuple(parameter.shape),
        region=Region.whole(parameter.shape),
        local=parameter,
        source=parameter,
        is_first=place == Place(replica=0, shard=0, tensor=0),
        copies=config.num_ranks,
    )


def whole_pieces(parameters: Mapping[str, Parameter]) -> list[Piece]:
    """Return the pieces of a learner that is one process alone."""
    place = Place(replica=0, shard=0, tensor=0)
    return [whole_piece(name, p, place, ParallelConfig()) for name, p in parameters.items()]


def local_gradient(piece: Piece) -> Tensor | None:
    """Return the gradient of this rank's part, None where no backward pass left one."""
    gradient = piece.source.grad
    if isinstance(gradient, DTensor):
        with torch.no_grad():
            return gradient.to_local()
    return gradient
