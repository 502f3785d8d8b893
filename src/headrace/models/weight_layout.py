"""Where each weight lies in one block of memory, whoever maps it.

Says nothing of what surrounds the block, who may write it and when.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a tensor begins at a whole cache line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of a block."""

    name: str
    dtype: str
    """As torch spells it, without ``torch.``."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """The tensors of a block, in order."""

    places: tuple[Place, ...]
    num_bytes: int
    """Of the block; at least 1, since nothing cannot be mapped."""

    @classmethod
    def of(
        cls, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]
    ) -> WeightLayout:
        """Lay out tensors of these names, one after another."""
        places, end = [], 0
        for name, shape in shapes.items():
            dtype = dtypes[name]
            places.append(
                Place(
                    name=name,
                    dtype=str(dtype).removeprefix("torch."),
                    shape=tuple(shape),
                    offset=end,
                )
            )
            size = torch.Size(shape).numel() * dtype.itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(places=tuple(places), num_bytes=max(end, 1))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> WeightLayout:
        """Lay out copies of ``tensors``; each is asked for once."""
        kinds = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        return cls.of(
            {name: shape for name, (shape, _) in kinds.items()},
            {name: dtype for name, (_, dtype) in kinds.items()},
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WeightLayout:
        """Return what `to_json` wrote. Raises KeyError, TypeError or ValueError."""
        places = tuple(
            Place(name=name, dtype=dtype, shape=tuple(map(int, shape)), offset=int(offset))
            for name, dtype, shape, offset in value["places"]
        )
        return cls(places=places, num_bytes=int(value["num_bytes"]))

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        places = [[p.name, p.dtype, list(p.shape), p.offset] for p in self.places]
        return {"places": places, "num_bytes": self.num_bytes}

    def views(
        self, memory: mmap.mmap | bytearray | memoryview, start: int = 0
    ) -> dict[str, Tensor]:
        """Return tensors that lie in ``memory`` from ``start`` on, and keep it alive."""
        return {place.name: _view(memory, start, place) for place in self.places}


def _view(memory: mmap.mmap | bytearray | memoryview, start: int, place: Place) -> Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    count = torch.Size(place.shape).numel()
    if count == 0:
        return torch.empty(place.shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + place.offset)
    return flat.view(place.shape)
