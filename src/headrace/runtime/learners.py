"""From a prepared run to its learner: one process, or ranks that are processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.learners import PolicySource, TorchLearner
from headrace.learners.adapter import begin_adapter
from headrace.learners.parallel.hosts import RankHosts
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign import load_policy
from headrace.roles import WeightRoom
from headrace.runtime.devices import engine_device, resolve_device
from headrace.runtime.places import Places
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import PreparedModel, PreparedRun

if TYPE_CHECKING:
    from headrace.learners.parallel.learner import RankedLearner

LocalLearner: TypeAlias = "TorchLearner | RankedLearner"
"""What the process of a run asks."""


def build_learner(
    prepared: PreparedRun,
    num_steps: int,
    compute: ComputeThread,
    places: Places,
    room: WeightRoom | None = None,
) -> LocalLearner:
    """Return the learner of a run, which `LocalLearner.start` brings to life.

    ``places``: where its ranks are, if it has any. ``room``: where it computes what it publishes;
    None: in memory of its own.
    """
    config = prepared.config
    return place_learner(
        config,
        prepared.model,
        num_updates=num_steps * config.learner.num_minibatches,
        compute=compute,
        places=places,
        room=room,
    )


def place_learner(
    config: RunConfig,
    model: PreparedModel,
    *,
    num_updates: int,
    compute: ComputeThread,
    places: Places,
    room: WeightRoom | None = None,
) -> LocalLearner:
    """Return the learner of ``config``; ``num_updates`` is the planned total, for the schedule."""
    if config.learner.parallel.has_processes:
        return _ranked(config, model, num_updates, places.rank_hosts(config, compute), room)
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
    hosts: RankHosts,
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
        hosts=hosts,
        device=device,
        compute_dtype=resolve_dtype(config.learner.compute_dtype, device),
        export_dtype=resolve_dtype(config.generator.dtype, engine_device(config)),
        room=room,
    )
