"""From a prepared run to its learner: one process, or ranks that are processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.learners import PolicySource, TorchLearner
from headrace.learners.adapter import begin_adapter
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign import load_policy
from headrace.roles import WeightRoom
from headrace.runtime.devices import engine_device, resolve_device
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import PreparedModel, PreparedRun

if TYPE_CHECKING:
    from headrace.learners.parallel.learner import RankedLearner

LocalLearner: TypeAlias = "TorchLearner | RankedLearner"
"""What this runtime places."""


def build_learner(
    prepared: PreparedRun,
    num_steps: int,
    compute: ComputeThread,
    room: WeightRoom | None = None,
) -> LocalLearner:
    """Return the learner of a run, which `LocalLearner.start` brings to life.

    ``room``: where it computes what it publishes; None: in memory of its own.
    """
    config = prepared.config
    return place_learner(
        config,
        prepared.model,
        num_updates=num_steps * config.learner.num_minibatches,
        compute=compute,
        room=room,
    )


def place_learner(
    config: RunConfig,
    model: PreparedModel,
    *,
    num_updates: int,
    compute: ComputeThread,
    room: WeightRoom | None = None,
) -> LocalLearner:
    """Return the learner of ``config``; ``num_updates`` is the planned total, for the schedule.

    Ranks use as many threads as ``compute`` has.
    """
    if config.learner.parallel.has_processes:
        return _ranked(config, model, num_updates, compute.num_threads, room)
    device = resolve_device(config.device)
    decoder = load_policy(model.directory, device=device)
    if config.learner.lora is not None:
        assert isinstance(decoder, Decoder), "preflight refuses it"
        begin_adapter(decoder, config.learner.lora, seed=config.seed)
    return TorchLearner(
        decoder,
        PolicySource(directory=model.directory, hf_config=model.hf_config),
        config,
        num_updates=num_updates,
        compute=compute,
        compute_dtype=resolve_dtype(config.learner.compute_dtype, device),
        export_dtype=resolve_dtype(config.generator.dtype, engine_device(config)),
        room=room,
    )


def _ranked(
    config: RunConfig,
    model: PreparedModel,
    num_updates: int,
    num_threads: int,
    room: WeightRoom | None,
) -> RankedLearner:
    # Only where there are ranks: what they need of torch takes seconds to import.
    from headrace.learners.parallel.learner import RankedLearner  # noqa: PLC0415 - see above

    assert isinstance(model.decoder_config, DecoderConfig), "preflight refuses it"
    device = resolve_device(config.device)
    return RankedLearner(
        model.decoder_config,
        PolicySource(directory=model.directory, hf_config=model.hf_config),
        config,
        num_updates=num_updates,
        num_threads=num_threads,
        device=device,
        compute_dtype=resolve_dtype(config.learner.compute_dtype, device),
        export_dtype=resolve_dtype(config.generator.dtype, engine_device(config)),
        room=room,
    )
