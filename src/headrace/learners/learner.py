"""TorchLearner: the Learner role on one device.

All torch work runs on one compute thread, which may serve others between two calls. What a step
does is `PolicyUpdater`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.learners.state import (
    SHARDED_DIRECTORY,
    LearnerCounters,
    load_state,
    save_state,
)
from headrace.learners.updater import PolicyUpdater, frozen
from headrace.models.decoder import Decoder
from headrace.models.foreign import Policy
from headrace.models.lora import MergedWeights, adapter_of
from headrace.models.weights import weight_update
from headrace.types import RolloutGroup, StepResult, WeightUpdate

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """Where the policy comes from, for writing it back as a complete Hugging Face directory."""

    directory: Path
    hf_config: Mapping[str, Any]


class TorchLearner(PolicyUpdater):
    """Updates one decoder."""

    def __init__(
        self,
        decoder: Policy,
        source: PolicySource,
        config: RunConfig,
        *,
        num_updates: int,
        compute: ComputeThread,
        compute_dtype: torch.dtype = torch.float32,
        export_dtype: torch.dtype = torch.float32,
    ) -> None:
        """``num_updates`` is the run's planned total, for the schedule.

        ``compute`` may serve others between two calls and is closed by whoever made it.
        """
        assert all(parameter.dtype == torch.float32 for parameter in decoder.parameters())
        super().__init__(
            decoder,
            config,
            num_updates=num_updates,
            compute_dtype=compute_dtype,
            reference=frozen(decoder) if config.objective.kl_coefficient > 0 else None,
        )
        self._source, self._export_dtype, self._compute = source, export_dtype, compute

    async def start(self) -> None:
        """Return at once: it is made ready to step."""

    async def rehearse(self, longest_prompt: int) -> None:
        """Compute the gradient of the largest micro-batch there can be, and throw it away.

        Before the first step. Raises RunError where it does not fit in memory.
        """
        await self._on_thread(lambda: self._rehearse(longest_prompt))

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner`."""
        return await self._on_thread(lambda: self._step(groups))

    async def save(self, directory: Path) -> None:
        """See `Learner`: the policy under ``hf/``, optimizer and counters beside it."""
        await self._on_thread(lambda: self._save(directory))

    def _save(self, directory: Path) -> None:
        save_state(
            directory,
            self._decoder,
            self._optimizer,
            self._counters,
            hf_config=self._source.hf_config,
            source_directory=self._source.directory,
            head=self._head,
        )

    async def load(self, directory: Path) -> int:
        """See `Learner`."""
        self._counters = await self._on_thread(lambda: self._load(directory))
        return self._counters.policy_version

    def _load(self, directory: Path) -> LearnerCounters:
        if not (directory / SHARDED_DIRECTORY).is_dir():
            return load_state(directory, self._decoder, self._optimizer, self._head)
        # Imported where it is needed: it takes a second.
        from headrace.learners.parallel import checkpoint, pieces  # noqa: PLC0415 - see above

        whole = pieces.whole_pieces(self._layout.parameters(self._decoder, self._head))
        return checkpoint.restore(directory, whole, self._optimizer)

    async def close(self) -> None:
        """See `Learner`. What was begun ends with the compute thread."""

    async def export(self) -> WeightUpdate:
        """Return the weights in the generators' dtype; fp32 is by reference, never a copy.

        An adapter is merged matrix by matrix as they are read. Valid until the next step.
        """
        return await self._on_thread(self._export)

    def _export(self) -> WeightUpdate:
        tensors: Mapping[str, Tensor]
        if not isinstance(self._decoder, Decoder) or adapter_of(self._decoder) is None:
            tensors = {
                name: parameter.detach().to(self._export_dtype)
                for name, parameter in self._decoder.named_parameters()
            }
        else:
            tensors = MergedWeights(self._decoder, self._export_dtype, self._compute.call)
        return weight_update(self._counters.policy_version, tensors)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._compute.submit(work))
