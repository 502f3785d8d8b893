"""RankLayout: the `Layout` of one rank among several.

FSDP2 (`fully_shard`) cuts every layer's weights over the shards and gathers them layer by layer
while they are needed; with replicas the same over each copy (HSDP); `tensor_plan` cuts matrices
between ranks that compute the same rollouts. Owns invariant 6 over ranks: gradients are summed,
never averaged, since the weights of tokens hold the one global denominator already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter

from headrace.config import ParallelConfig
from headrace.learners.division import divided
from headrace.learners.layout import ReadingSetting
from headrace.learners.loss import LinearLogprobs, Readings, read_tokens
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Microbatch, idle_microbatch
from headrace.learners.parallel.pieces import (
    Piece,
    Place,
    local_gradient,
    sharded_piece,
    whole_piece,
)
from headrace.learners.parallel.split_head import SplitHead, share_lookup
from headrace.learners.parallel.tensor_plan import sees_part_of_heads, split_matrices
from headrace.learners.selection import TrainingGroup
from headrace.learners.value_head import ValueHead, named_parameters
from headrace.models.decoder import Decoder
from headrace.models.foreign import Policy
from headrace.objectives.logprobs import linear_logprobs

T = TypeVar("T")


class _Reader(nn.Module):
    """A decoder's whole forward pass, log-probs included: all that touches weights is inside."""

    def __init__(self, decoder: Decoder, predict: LinearLogprobs) -> None:
        super().__init__()
        self.decoder = decoder
        self.predict = predict

    def forward(
        self, batch: Microbatch, setting: ReadingSetting, head: ValueHead | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        found = read_tokens(
            self.decoder,
            batch,
            setting.temperature,
            setting.dtype,
            entropy_gradient=setting.entropy_gradient,
            head=head,
            predict=self.predict,
        )
        # Plain tensors: the hooks that gather weights for the backward pass look for such.
        return found.logprobs, found.entropy, found.values


class RankLayout:
    """One rank's view; the default process group is that of all ranks."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        """Every rank makes one at the same time: groups of ranks are formed."""
        self._config = config
        self.place = Place.of(dist.get_rank(), config)
        self._mesh = init_device_mesh(
            device.type,
            (config.replicas, config.shards, config.tensor),
            mesh_dim_names=("replica", "shard", "tensor"),
        )
        sides = [
            list(range(first, config.num_ranks, config.tensor)) for first in range(config.tensor)
        ]
        # Those that compute other rollouts than this rank, with the same part of each matrix.
        self._data_group, _ = dist.new_subgroups_by_enumeration(sides)  # type: ignore[no-untyped-call]
        self._readers: dict[int, _Reader] = {}
        self._pieces: tuple[Piece, ...] = ()
        self._in_parts: set[str] = set()
        """Parameters of which each tensor rank computes a part of the gradient."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """What this rank holds of everything that `parameters` was asked for."""
        return self._pieces

    def adopt(self, decoder: Decoder) -> None:
        """Cut ``decoder``, whose memory nothing was read into yet, and keep this rank's part."""
        predict: LinearLogprobs = linear_logprobs
        if self._config.tensor > 1:
            split_matrices(decoder, self._mesh["tensor"])
            predict = SplitHead(self._mesh["tensor"].get_group())
            if decoder.config.tie_word_embeddings:
                share_lookup(decoder.model.embed_tokens, self._config.tensor)
        reader = _Reader(decoder, predict)
        names = ("replica", "shard") if self._config.replicas > 1 else ("shard",)
        for module in (*decoder.model.layers, reader):
            sharded = fully_shard(module, mesh=self._mesh[names], reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(enable=True)
        self._readers[id(decoder)] = reader

    def pieces_of(self, decoder: Decoder) -> list[Piece]:
        """Return what this rank holds of a decoder that was adopted."""
        return [
            sharded_piece(name, parameter, self.place, self._config)
            for name, parameter in decoder.named_parameters()
        ]

    def parameters(self, decoder: Policy, head: ValueHead | None) -> Mapping[str, Parameter]:
        """See `Layout`. A value head is whole on every rank."""
        assert isinstance(decoder, Decoder), "preflight refuses it"
        heads = [
            whole_piece(name, parameter, self.place, self._config)
            for name, parameter in named_parameters(head).items()
        ]
        self._pieces = (*self.pieces_of(decoder), *heads)
        self._in_parts = {p.name for p in self._pieces if sees_part_of_heads(p.name)}
        self._in_parts |= {decoder.output_name}
        return {piece.name: piece.local for piece in self._pieces}

    def read(
        self, decoder: Policy, head: ValueHead | None, batch: Microbatch, setting: ReadingSetting
    ) -> Readings:
        """See `Layout`."""
        logprobs, entropy, values = self._readers[id(decoder)](batch, setting, head)
        return Readings(logprobs=logprobs, entropy=entropy, values=values)

    def share(self, groups: Sequence[TrainingGroup]) -> Sequence[TrainingGroup]:
        """See `Layout`. Ranks that differ in their part of the matrices alone have the same."""
        own = self.place.replica * self._config.shards + self.place.shard
        return divided(groups, self._config.num_data_ranks)[own]

    def padded(self, batches: Sequence[Microbatch], device: torch.device) -> list[Microbatch]:
        """See `Layout`."""
        most = torch.tensor(len(batches))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._data_group)
        missing = int(most) - len(batches)
        return [*batches, *(idle_microbatch(device) for _ in range(missing))]

    def total(self, sums: LossSums) -> LossSums:
        """See `Layout`. Added up in the order of ranks, so all of them have the same bits."""
        found = LossSums()
        for own in self._from_all(sums):
            found.add(own)
        return found

    def summed(self, values: Tensor) -> Tensor:
        """See `Layout`."""
        total = values.clone()
        dist.all_reduce(total, group=self._data_group)
        return total

    def gathered(self, values: Tensor) -> Tensor:
        """See `Layout`."""
        return torch.cat(self._from_all(values.detach().cpu())).to(values.device)

    def _from_all(self, own: T) -> list[T]:
        found: list[T] = [own] * self._config.num_data_ranks
        dist.all_gather_object(found, own, group=self._data_group)
        return found

    def take_gradients(self) -> None:
        """See `Layout`. What FSDP does not add up is added up here."""
        for piece in self._pieces:
            gradient = local_gradient(piece)
            piece.source.grad = None
            piece.local.grad = gradient
            if gradient is None:
                continue
            if piece.local is piece.source:
                dist.all_reduce(gradient, group=self._data_group)
            elif self._config.tensor > 1 and piece.name in self._in_parts:
                dist.all_reduce(gradient, group=self._mesh["tensor"].get_group())

    def gradient_norm(self) -> float:
        """See `Layout`. Elements that several ranks hold count once."""
        square = torch.zeros((), dtype=torch.float64)
        for piece in self._pieces:
            if piece.local.grad is not None:
                norm = torch.linalg.vector_norm(piece.local.grad).to("cpu", torch.float64)
                square += norm.square() / piece.copies
        dist.all_reduce(square)
        return math.sqrt(float(square))
