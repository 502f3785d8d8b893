"""RankedLearner: the Learner role in front of ranks that are processes of their own.

Holds no weights: it asks every rank for the same thing and says what they say. All of them make
each step; weights leave in buckets; checkpoints are written while training goes on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

import torch

from headrace.config import RunConfig
from headrace.errors import CheckpointError
from headrace.learners.learner import PolicySource
from headrace.learners.parallel.hosts import RankHosts
from headrace.learners.parallel.processes import RankProcesses
from headrace.learners.parallel.rank import RankSetting
from headrace.learners.parallel.regions import Region
from headrace.learners.parallel.weights import (
    MAX_BYTES,
    Bucket,
    BucketedWeights,
    buckets_of,
    write_parts_of,
)
from headrace.learners.state import SHARDED_DIRECTORY
from headrace.models.checkpoint import write_companions
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import copied_update, weight_update
from headrace.roles import WeightRoom
from headrace.types import RolloutGroup, StepResult, WeightUpdate


class RankedLearner:
    """Updates one decoder that lies on several ranks."""

    def __init__(
        self,
        decoder_config: DecoderConfig,
        source: PolicySource,
        config: RunConfig,
        *,
        num_updates: int,
        hosts: RankHosts,
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
        export_dtype: torch.dtype = torch.float32,
        room: WeightRoom | None = None,
    ) -> None:
        """Nothing is started yet. ``hosts``: where ranks are; closed with the learner.

        ``device``: of what type each computes on; ``room``: where published weights are put
        together.
        """
        self._source, self._export_dtype, self._room = source, export_dtype, room
        self._shapes = {
            name: tuple(shape) for name, shape in decoder_config.tensor_shapes().items()
        }
        self._version = 0
        self._hosts = hosts
        parallel = config.learner.parallel
        settings = [
            RankSetting(
                rank=rank,
                meeting=hosts.meeting(),
                config=config,
                model=_seen_elsewhere(source.directory),
                num_updates=num_updates,
                num_threads=hosts.num_threads,
                device=hosts.device(device.type, rank),
                compute_dtype=compute_dtype,
            )
            for rank in range(parallel.num_ranks)
        ]
        self._ranks = RankProcesses(settings, hosts, timeout_seconds=parallel.timeout_seconds)

    @property
    def policy_version(self) -> int:
        """Optimizer updates made so far."""
        return self._version

    async def start(self) -> None:
        """Start the ranks, which read the policy. Raises RunError."""
        await self._ranks.start()

    async def rehearse(self, longest_prompt: int) -> None:
        """Have every rank try the largest micro-batch, and throw its gradient away.

        Before the first step. Raises RunError where it does not fit in memory.
        """
        await self._ranks.ask("rehearse", longest_prompt)

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner`. Every rank has the same result."""
        results = await self._ranks.ask("step", list(groups))
        result = results[0]
        assert isinstance(result, StepResult)
        self._version = result.policy_version
        return result

    async def save(self, directory: Path) -> Awaitable[None]:
        """See `Learner`."""
        asked = await self._ranks.ask_twice("save", _seen_elsewhere(directory))

        async def written() -> None:
            await asyncio.wrap_future(asked.later)
            await asyncio.to_thread(self._write_companions, directory / SHARDED_DIRECTORY)

        return written()

    def _write_companions(self, directory: Path) -> None:
        try:
            write_companions(directory, self._source.hf_config, self._source.directory)
        except OSError as error:
            msg = f"{directory} could not be written: {error}"
            raise CheckpointError(msg) from error

    async def load(self, directory: Path) -> int:
        """See `Learner`."""
        versions = await self._ranks.ask("load", _seen_elsewhere(directory))
        self._version = int(versions[0])
        return self._version

    async def export(self) -> WeightUpdate:
        """Return the weights in the generators' dtype, a bucket of them at a time.

        Valid until the next step, and in a room until the next export.
        """
        return await asyncio.to_thread(self._export)

    def _export(self) -> WeightUpdate:
        whole = {name: Region.whole(shape) for name, shape in self._shapes.items()}
        tensors = self.weights(whole)
        if self._room is None:
            return weight_update(self._version, tensors)
        targets = self._room.take(self._shapes, self._export_dtype)
        return copied_update(self._version, tensors, targets)

    def weights(self, regions: Mapping[str, Region], max_bytes: int = MAX_BYTES) -> BucketedWeights:
        """Return these parts of the weights, whatever the ranks hold; valid until the next step."""
        return BucketedWeights(buckets_of(regions, self._export_dtype, max_bytes), self._fill)

    def _fill(self, bucket: Bucket, path: str) -> None:
        if self._hosts.are_here:
            self._ranks.ask_blocking("fill", bucket, path)
            return
        brought = self._ranks.ask_blocking("bring", bucket)
        write_parts_of(bucket, path, itertools.chain.from_iterable(brought))

    async def close(self) -> None:
        """See `Learner`. Ends every process."""
        await self._ranks.close()


def _seen_elsewhere(directory: Path) -> Path:
    """Return its whole name: a rank on another machine works in another folder."""
    return directory.absolute()
