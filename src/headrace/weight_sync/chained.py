"""Weights as changes since the version before, with all of them every so often.

A notice names the last whole version and every change since, so that it is enough by itself: who
holds one of these versions reads what came after it, and who holds none reads all. Owns: a change
is added only to the very version it was made from, told by version and checksum; where one is
missing or does not fit, nothing is guessed: the reader begins at the whole version, and where that
does not help either, the writer is asked for another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.errors import WeightSyncError
from headrace.models.weight_layout import WeightLayout
from headrace.types import WeightNotice, WeightPart, WeightUpdate
from headrace.weight_sync import delta
from headrace.weight_sync.blocks import Block, BlockHeader, Carrier, Fetcher
from headrace.weight_sync.store import last_index, on_thread, whole_header


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """All weights of one version, in memory of one's own."""

    policy_version: int
    checksum: int
    tensors: Mapping[str, Tensor]

    def is_of(self, version: tuple[int, int]) -> bool:
        return (self.policy_version, self.checksum) == version


class ChainedStore:
    """A `WeightStore` that writes what changed. Holds a copy of the last version."""

    def __init__(
        self, carrier: Carrier, *, whole_every: int, compute: ComputeThread | None = None
    ) -> None:
        """``whole_every``: publications from one whole version to the next.

        ``compute``: where tensors are compared; None takes any thread, with one core.
        """
        self._carrier, self._every, self._compute = carrier, whole_every, compute
        self._held: _Held | None = None
        self._chains: list[list[WeightPart]] = []
        """Whole versions with the changes since, oldest first: the last one goes on."""

    async def write(self, update: WeightUpdate, *, is_whole: bool = False) -> WeightNotice:
        """See `WeightStore`."""
        return await on_thread(self._compute, lambda: self._write(update, is_whole=is_whole))

    def release(self, policy_version: int) -> None:
        """See `WeightStore`. A chain goes once a later whole version is behind everybody.

        Later is what was written later: after a learner's restart versions go back.
        """
        since = last_index(
            [any(part.policy_version == policy_version for part in c) for c in self._chains]
        )
        while len(self._chains) > 1 and (
            since > 0 or self._chains[1][0].policy_version <= policy_version
        ):
            since -= 1
            for part in self._chains.pop(0):
                self._carrier.drop(part)

    def close(self) -> None:
        """See `WeightStore`."""
        self._carrier.close()

    @torch.no_grad()
    def _write(self, update: WeightUpdate, *, is_whole: bool) -> WeightNotice:
        held, self._held = self._held, None  # whatever fails, nothing rests on what is half known
        if held is not None and held.is_of((update.policy_version, update.checksum)):
            # Once more, for who lost what it held: the learner may have made a step meanwhile.
            update = replace(update, tensors=held.tensors)
        layout = WeightLayout.of_tensors(update.tensors)
        fits = held is not None and WeightLayout.of_tensors(held.tensors) == layout
        goes_on = held is not None and fits and held.policy_version < update.policy_version
        if held is None or not goes_on or is_whole or len(self._chains[-1]) >= self._every:
            part = self._carrier.put(whole_header(update, layout), update.tensors)
            self._chains.append([part])
        else:
            changes = delta.encode(held.tensors, update.tensors)
            header = BlockHeader(
                policy_version=update.policy_version,
                checksum=update.checksum,
                base=(held.policy_version, held.checksum),
                layout=WeightLayout.of_tensors(changes),
            )
            self._chains[-1].append(self._carrier.put(header, changes))
        self._held = _Held(
            policy_version=update.policy_version,
            checksum=update.checksum,
            tensors=_copied(update.tensors, held.tensors if held is not None and fits else None),
        )
        return WeightNotice(parts=tuple(self._chains[-1]))


class ChainedReader:
    """A `WeightReader` of what a `ChainedStore` writes. Holds a copy of the last version."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._held: _Held | None = None

    @contextmanager
    def open(self, notice: WeightNotice) -> Iterator[WeightUpdate]:
        """See `WeightReader`."""
        held = self._caught_up(notice.parts)
        yield WeightUpdate(
            policy_version=notice.policy_version, tensors=held.tensors, checksum=notice.checksum
        )

    def close(self) -> None:
        """See `WeightReader`."""
        self._held = None
        self._fetcher.close()

    def _caught_up(self, parts: tuple[WeightPart, ...]) -> _Held:
        known = [(part.policy_version, part.checksum) for part in parts]
        if self._held is not None and any(self._held.is_of(version) for version in known[:-1]):
            first = 1 + next(i for i, version in enumerate(known) if self._held.is_of(version))
            try:
                return self._read(parts[first:])
            except WeightSyncError:
                pass  # what it holds is not what it was taken for: once more, from the beginning
        return self._read(parts)

    def _read(self, parts: tuple[WeightPart, ...]) -> _Held:
        held, self._held = self._held, None  # no version until all parts are in
        for part in parts:
            with self._fetcher.fetch(part) as block:
                held = _after(held, block, part)
        assert held is not None, "a first part is whole, or it was refused"
        self._held = held
        return held


@torch.no_grad()
def _after(held: _Held | None, block: Block, part: WeightPart) -> _Held:
    """Return what ``block`` makes of ``held``, in whose memory it lies. Raises WeightSyncError."""
    base = block.header.base
    if base is None:
        tensors = _copied(block.tensors, None if held is None else held.tensors)
    elif held is None or not held.is_of(base):
        has = "nothing" if held is None else f"version {held.policy_version}"
        msg = (
            f"version {part.policy_version} came as changes since version {base[0]} with checksum "
            f"{base[1]:x}, and this reader holds {has}; publish it whole"
        )
        raise WeightSyncError(msg)
    else:
        delta.apply(block.tensors, held.tensors)
        tensors = held.tensors
    return _Held(policy_version=part.policy_version, checksum=part.checksum, tensors=tensors)


def _copied(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor] | None
) -> Mapping[str, Tensor]:
    """Return a copy of ``tensors``, in ``targets`` where these are as large."""
    fits = targets is not None and WeightLayout.of_tensors(targets) == WeightLayout.of_tensors(
        tensors
    )
    if targets is None or not fits:
        return {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)
    return targets
