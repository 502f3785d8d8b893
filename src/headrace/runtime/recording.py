"""What a run keeps so that a step of it can be done again: weights, facts, and in what order.

Owns: a checkpoint is there only once the records of all steps up to it are, so that a run which is
resumed from it has them; and which facts beside the batch decide a step's last bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import platform
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import torch

from headrace import __version__
from headrace.checkpoints import Checkpoints, Write
from headrace.config import ParallelConfig, RunConfig
from headrace.errors import RunDirectoryError
from headrace.monitors import Facts, RecordedStep, RolloutMonitor, Weights
from headrace.runtime.devices import engine_device, resolve_device
from headrace.runtime.precision import resolve_dtype
from headrace.types import WeightUpdate

LAYOUT_FACTS = ("num_threads", "num_updates", "compute_dtype", "weights_dtype", "parallel")
"""Facts of how a learner is laid out, which can be the same on another machine."""

Export: TypeAlias = Callable[[], Awaitable[WeightUpdate]]


class Recording:
    """Writes what `RolloutMonitor` writes of a run, in the order that makes it complete."""

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        *,
        num_steps: int,
        num_threads: int,
        generator_threads: int,
    ) -> None:
        """``num_threads`` are those of the learner. Raises OSError."""
        self._published: list[Weights] = []
        """Since the last step that was told of, that step's own first; no version twice in a row:
        a generator that joins late asks for the same again."""
        self.monitor: RolloutMonitor | None = None
        """None where neither rollouts nor records are asked for."""
        every = config.monitors.rollouts_every
        if _records_steps(config):
            facts = facts_of(
                config,
                num_updates=num_steps * config.learner.num_minibatches,
                num_threads=num_threads,
                generator_threads=generator_threads,
            )
            self.monitor = RolloutMonitor(directory, every=1, take_weights=self._take, facts=facts)
        elif every:
            self.monitor = RolloutMonitor(directory, every=every)

    def noting(self, export: Export) -> Export:
        """Return ``export``, noting what it exports. Forgets what was noted of another learner."""
        self._published.clear()

        async def noted() -> WeightUpdate:
            update = await export()
            weights = Weights(policy_version=update.policy_version, checksum=update.checksum)
            if self._published and self._published[-1].policy_version == weights.policy_version:
                self._published.pop()
            self._published.append(weights)
            return update

        return noted

    def before(self, checkpoints: Checkpoints) -> Checkpoints:
        """Return ``checkpoints`` that are there only once the records before them are."""
        if self.monitor is None:
            return checkpoints
        return _RecordedCheckpoints(checkpoints, self.settle)

    def settle(self) -> None:
        """Return once all that was told is written, or cannot be, or the writer's patience ends.

        What failed is told by the monitor itself, and is no reason to end anything.
        """
        if self.monitor is not None:
            with contextlib.suppress(Exception):
                self.monitor.flush()

    def _take(self, policy_version: int) -> tuple[Weights, Weights]:
        """Return the weights before and after the step that led to ``policy_version``.

        A step without an update published nothing: both are the same. Raises LookupError where
        that version was not published.
        """
        versions = [weights.policy_version for weights in self._published]
        if policy_version not in versions:
            msg = f"weights of version {policy_version} were told of before they were published"
            raise LookupError(msg)
        place = versions.index(policy_version)
        before, after = self._published[max(place - 1, 0)], self._published[place]
        del self._published[:place]
        return before, after


class _RecordedCheckpoints:
    """Checkpoints that become durable after the records of the steps before them."""

    def __init__(self, checkpoints: Checkpoints, settle: Callable[[], None]) -> None:
        self._checkpoints = checkpoints
        self._settle = settle

    async def begin(self, step: int, policy_version: int, write: Write) -> asyncio.Task[Any]:
        """See `Checkpoints`: training goes on while records are waited for."""

        async def recorded(directory: Path) -> Awaitable[None]:
            writing = await write(directory)

            async def finish() -> None:
                if writing is not None:
                    await writing
                await asyncio.to_thread(self._settle)

            return finish()

        return await self._checkpoints.begin(step, policy_version, recorded)


def facts_of(
    config: RunConfig, *, num_updates: int, num_threads: int, generator_threads: int
) -> Facts:
    """Return what decides the bits of a learner's step on this machine beside batch and recipe.

    ``num_updates`` is the planned total, ``num_threads`` those of the learner; those of a generator
    decide the bits of what it samples.
    """
    device = resolve_device(config.device)
    weights = resolve_dtype(config.generator.dtype, engine_device(config))
    return {
        **machine_facts(device),
        "num_threads": num_threads,
        "num_updates": num_updates,
        "generator_threads": generator_threads,
        "compute_dtype": _name(resolve_dtype(config.learner.compute_dtype, device)),
        "weights_dtype": _name(weights),
        "parallel": config.learner.parallel.model_dump_json(),
    }


def machine_facts(device: torch.device) -> Facts:
    """Return those of the machine and of what is installed on it."""
    return {
        "headrace": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "numba": importlib.metadata.version("numba"),
        "machine": platform.machine(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def as_recorded(config: RunConfig, record: RecordedStep) -> RunConfig:
    """Return ``config`` with what ``record`` says of number formats and the learner's layout.

    Raises RunDirectoryError where it does not tell them.
    """
    parallel = ParallelConfig.model_validate_json(str(fact(record, "parallel")))
    learner = config.learner.model_copy(
        update={"compute_dtype": fact(record, "compute_dtype"), "parallel": parallel}
    )
    generator = config.generator.model_copy(update={"dtype": fact(record, "weights_dtype")})
    return config.model_copy(update={"learner": learner, "generator": generator})


def fact(record: RecordedStep, name: str) -> str | int:
    """Return one of the facts of a record. Raises RunDirectoryError where it is not told."""
    found = record.facts.get(name)
    if found is None:
        msg = (
            f"the record of step {record.step} does not tell {name}; replay it with the headrace "
            f"that wrote it ({record.facts.get('headrace')})"
        )
        raise RunDirectoryError(msg)
    return found


def _records_steps(config: RunConfig) -> bool:
    match config.monitors.record:
        case "auto":
            return config.max_staleness > 0
        case "steps":
            return True
        case "none":
            return False
        case _:
            assert_never(config.monitors.record)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _processor() -> str:
    """Return the processor's name; only Linux tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
