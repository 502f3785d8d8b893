"""Weights out of shards: every element arrives, and never a second model stands anywhere."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from headrace.config import ParallelConfig
from headrace.learners.parallel.pieces import Piece, Place
from headrace.learners.parallel.regions import Region
from headrace.learners.parallel.tensor_plan import cut_dimension
from headrace.learners.parallel.weights import (
    Bucket,
    BucketedWeights,
    buckets_of,
    parts_of,
    tensor_slices,
    write_parts_of,
)
from headrace.models.weights import checksum

MAX_BYTES = 4096
SHAPES = {
    "model.embed_tokens.weight": (61, 8),
    "model.norm.weight": (8,),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(6)
        for name, shape in {
            "self_attn.q_proj.weight": (16, 8),
            "self_attn.k_proj.weight": (4, 8),
            "self_attn.o_proj.weight": (8, 16),
            "mlp.gate_proj.weight": (12, 8),
            "mlp.down_proj.weight": (8, 12),
            "input_layernorm.weight": (8,),
        }.items()
    },
}


@pytest.fixture
def model() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def cut(model: Mapping[str, Tensor], config: ParallelConfig) -> list[list[Piece]]:
    """Return the pieces of each rank, cut as the layout cuts them."""
    return [
        [_piece(name, tensor, Place.of(rank, config), config) for name, tensor in model.items()]
        for rank in range(config.num_ranks)
    ]


def _piece(name: str, tensor: Tensor, place: Place, config: ParallelConfig) -> Piece:
    whole, dim = Region.whole(tensor.shape), cut_dimension(name)
    region = whole if dim is None else whole.chunk(place.tensor, config.tensor, dim)
    region = region.chunk(place.shard, config.shards)
    local = Parameter(tensor[region.within(whole)].clone())
    return Piece(
        name=name,
        shape=tuple(tensor.shape),
        region=region,
        local=local,
        source=local,
        is_first=place.replica == 0 and (dim is not None or place.tensor == 0),
        copies=1,
    )


class Counted(BucketedWeights):
    """Counts the bytes of the buckets that are there at the same time."""

    def __init__(self, buckets: Sequence[Bucket], ranks: Sequence[Sequence[Piece]]) -> None:
        self.bytes = self.peak = self.num_fetched = 0

        def fill(bucket: Bucket, path: str) -> None:
            for pieces in ranks:
                write_parts_of(bucket, path, parts_of(bucket, pieces))

        super().__init__(buckets, fill)

    def _fetched(self, bucket: Bucket) -> mmap.mmap:
        memory = super()._fetched(bucket)
        self.num_fetched += 1
        self._count(len(memory))
        weakref.finalize(memory, self._count, -len(memory))
        return memory

    def _count(self, change: int) -> None:
        self.bytes += change
        self.peak = max(self.peak, self.bytes)


LAYOUTS = [
    {"shards": 4},
    {"tensor": 2},
    {"replicas": 2, "shards": 3},
    {"shards": 3, "tensor": 2},
]


def whole_of(model: Mapping[str, Tensor]) -> dict[str, Region]:
    return {name: Region.whole(tensor.shape) for name, tensor in model.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_arrives_whole_and_rounded_once(
    layout: dict[str, int], dtype: torch.dtype, model: dict[str, Tensor]
) -> None:
    ranks = cut(model, ParallelConfig(**layout))
    found = Counted(buckets_of(whole_of(model), dtype, MAX_BYTES), ranks)
    assert list(found) == list(model)
    for name, tensor in model.items():
        assert torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_generator_of_several_ranks_gets_its_slices_straight_from_the_shards(
    layout: dict[str, int], count: int, model: dict[str, Tensor]
) -> None:
    ranks = cut(model, ParallelConfig(**layout))
    for rank in range(count):
        regions = tensor_slices(SHAPES, cut_dimension, rank=rank, count=count)
        found = Counted(buckets_of(regions, torch.float32, MAX_BYTES), ranks)
        for name, tensor in model.items():
            dim = cut_dimension(name)
            expected = tensor if dim is None else tensor.chunk(count, dim)[rank]
            assert torch.equal(found[name], expected), name


def test_reading_in_order_fetches_once_and_holds_no_more_than_is_allowed(
    model: dict[str, Tensor],
) -> None:
    ranks = cut(model, ParallelConfig(shards=2))
    buckets = buckets_of(whole_of(model), torch.float32, MAX_BYTES)
    assert sum(bucket.num_bytes for bucket in buckets) > 2 * MAX_BYTES, "or nothing is shown"
    found = Counted(buckets, ranks)
    assert checksum(found.items()) == checksum(model.items())
    assert found.num_fetched == len(buckets)
    assert 0 < found.peak <= MAX_BYTES


def test_a_reader_that_lets_go_of_what_it_read_has_one_bucket_at_a_time(
    model: dict[str, Tensor],
) -> None:
    buckets = buckets_of(whole_of(model), torch.float32, MAX_BYTES)
    found = Counted(buckets, cut(model, ParallelConfig(shards=2)))
    for name in model:
        found[name].sum()
    assert found.peak == max(bucket.num_bytes for bucket in buckets)


def test_what_was_read_keeps_its_values_when_the_next_bucket_comes(
    model: dict[str, Tensor],
) -> None:
    found = Counted(
        buckets_of(whole_of(model), torch.float32, MAX_BYTES), cut(model, ParallelConfig(shards=2))
    )
    everything = dict(found.items())
    assert all(torch.equal(everything[name], tensor) for name, tensor in model.items())


def test_what_is_multiplied_together_lies_in_one_bucket(model: dict[str, Tensor]) -> None:
    for bucket in buckets_of(whole_of(model), torch.float32, max_bytes=64):
        names = {slot.name.rsplit(".", 2)[0] for slot in bucket.slots}
        assert len(names) == 1
