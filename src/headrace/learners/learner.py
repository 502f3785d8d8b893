"""TorchLearner: the Learner role on one device.

All torch work runs on one compute thread, which may serve others between two calls. Owns: whoever
waits for that thread waits no longer than ``faults.learner_deadline_seconds``, and after one
deadline was missed not at all. What a step does is `PolicyUpdater`'s.
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
from headrace.errors import LearnerHungError
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
from headrace.models.weights import copied_update, weight_update
from headrace.patience import wait_patiently
from headrace.roles import WeightRoom
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
        room: WeightRoom | None = None,
    ) -> None:
        """``num_updates`` is the run's planned total, for the schedule.

        ``room``: where published weights are computed; None takes memory of its own. ``compute``
        may serve others between two calls and is closed by whoever made it.
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
        self._room = room
        self._deadline_seconds = config.faults.learner_deadline_seconds
        self._hung: LearnerHungError | None = None

    async def start(self) -> None:
        """Return at once: it is made ready to step."""

    async def rehearse(self, longest_prompt: int) -> None:
        """Compute the gradient of the largest micro-batch there can be, and throw it away.

        Before the first step. Raises RunError where it does not fit in memory.
        """
        await self._on_thread(lambda: self._rehearse(longest_prompt), "the rehearsal")

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner`."""
        return await self._on_thread(lambda: self._step(groups), "a step")

    async def save(self, directory: Path) -> None:
        """See `Learner`: the policy under ``hf/``, optimizer and counters beside it."""
        await self._on_thread(lambda: self._save(directory), "a checkpoint")

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
        self._counters = await self._on_thread(lambda: self._load(directory), "the resumption")
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
        """Return the weights in the generators' dtype; without a room, fp32 is by reference.

        An adapter is merged matrix by matrix as they are read. Valid until the next step, and in
        a room until the next export.
        """
        return await self._on_thread(self._export, "the publication of weights")

    def _export(self) -> WeightUpdate:
        version, dtype = self._counters.policy_version, self._export_dtype
        tensors: Mapping[str, Tensor] = dict(self._decoder.named_parameters())
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if isinstance(self._decoder, Decoder) and adapter_of(self._decoder) is not None:
            tensors = MergedWeights(self._decoder, dtype, self._compute.call)
            shapes = {name: self._decoder.get_parameter(name).shape for name in tensors}
        elif self._room is None:
            tensors = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
        if self._room is None:
            return weight_update(version, tensors)
        return copied_update(version, tensors, self._room.take(shapes, dtype))

    async def _on_thread(self, work: Callable[[], T], what: str) -> T:
        """Waits for the compute thread; unblocked by the work's end, or by the deadline.

        Raises LearnerHungError then, and ever after.
        """
        if self._hung is not None:
            raise self._hung
        done = asyncio.wrap_future(self._compute.submit(work))
        try:
            if not await wait_patiently({done}, self._deadline_seconds):
                return done.result()
        finally:
            done.cancel()
        self._hung = LearnerHungError(
            f"{what} has not ended within faults.learner_deadline_seconds = "
            f"{self._deadline_seconds:g}: the learner computes in the controller's process, where "
            "nothing can end it. Go on with --resume; allow more if it was only slow, or give it a "
            "process of its own (learner.parallel.own_process = true), which is started again"
        )
        self._compute.give_up()
        raise self._hung
