"""Parts of tensors on disk, by torch.distributed.checkpoint in safetensors: no pickle is read.

Every rank writes the parts it holds into files of its own, each with the offset that it has in its
whole; whoever reads asks for parts of any other cut, or for wholes. A plain safetensors file is the
case of one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from headrace.learners.parallel.regions import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of one tensor, in memory."""

    shape: tuple[int, ...]
    """Of the whole."""
    region: Region
    tensor: Tensor
    """[region.sizes] on the processor."""

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Say what is to be written, as torch.distributed.checkpoint asks every object."""
        offsets = torch.Size(self.region.offsets)
        data = TensorWriteData(
            chunk=_chunk(self.region),
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=torch.Size(self.shape),
        )
        index = MetadataIndex(name, offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]


class _Writing(DefaultSavePlanner):
    """Finds what is to be written: of each name every rank has one part."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the part at ``index``."""
        part = self.state_dict[index.fqn]
        assert isinstance(part, Part)
        return part.tensor


def write_parts(
    directory: Path, parts: Mapping[str, Part], group: dist.ProcessGroup | None = None
) -> None:
    """Write the parts of all ranks of ``group`` into ``directory``: one file each, fsynced.

    Its serialised form stands in memory beside the tensors meanwhile.
    Returns on every rank once all have written. ``group`` must not be used for anything else
    meanwhile. Raises what torch.distributed.checkpoint does when one of them could not.
    """
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    planner = _Writing(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(dict(parts), storage_writer=writer, planner=planner, process_group=group)


class StoredParts:
    """What the safetensors files of some directories hold together."""

    def __init__(self, directories: Iterable[Path]) -> None:
        """Read the files' heads. Raises OSError, SafetensorError or ValueError."""
        self._readers: dict[str, HuggingFaceStorageReader] = {}
        self._stored: dict[str, TensorStorageMetadata] = {}
        for directory in directories:
            reader = HuggingFaceStorageReader(str(directory))
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            for name, stored in metadata.state_dict_metadata.items():
                assert isinstance(stored, TensorStorageMetadata), "safetensors hold nothing else"
                self._readers[name], self._stored[name] = reader, stored

    @property
    def names(self) -> Sequence[str]:
        """What there is."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole, as far as the files know it."""
        return tuple(self._stored[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that it was stored in."""
        return self._stored[name].properties.dtype

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill ``parts`` by name. Raises ValueError where one does not fit or is not all there."""
        wanted: dict[HuggingFaceStorageReader, list[ReadItem]] = {}
        for name, part in parts.items():
            items = self._items(name, part)
            wanted.setdefault(self._readers[name], []).extend(items)
        for reader, items in wanted.items():
            reader.read_data(LoadPlan(items), _Filling(parts)).wait()

    def whole(self, name: str) -> Tensor:
        """Return one tensor from all of its parts."""
        shape = self.shape(name)
        found = torch.empty(shape, dtype=self.dtype(name))
        self.read({name: Part(shape=shape, region=Region.whole(shape), tensor=found)})
        return found

    def _items(self, name: str, part: Part) -> list[ReadItem]:
        if name not in self._stored:
            msg = f"{name} is missing"
            raise ValueError(msg)
        if self.shape(name) != part.shape:
            msg = f"{name} is {list(self.shape(name))}, not {list(part.shape)}, or not all there"
            raise ValueError(msg)
        if not part.region.count:
            return []
        items = create_read_items_for_chunk_list(name, self._stored[name], [_chunk(part.region)])
        if sum(item.lengths.numel() for item in items) != part.region.count:
            msg = f"{name} is not all there"
            raise ValueError(msg)
        return items


class _Filling(DefaultLoadPlanner):
    """Gives what is read its place in memory."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self._parts = parts

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of the part that ``read_item`` fills."""
        tensor = self._parts[read_item.dest_index.fqn].tensor
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: it was filled in place."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:  # noqa: ANN401 - as inherited
        """Never called: there are no bytes beside tensors."""
        del read_item, value


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=torch.Size(region.sizes))
