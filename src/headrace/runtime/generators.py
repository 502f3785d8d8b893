"""How a run's generators are built: which engine, with how many cores, from what is prepared."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from headrace.compute import ComputeThread
from headrace.config import EngineName, GeneratorConfig, RunConfig
from headrace.generators import TorchGenerator
from headrace.generators.pool import GeneratorPool, PoolSettings
from headrace.generators.pool.proxy import Hosted, Launch
from headrace.generators.vllm import VllmGenerator, VllmSettings
from headrace.models.decoder_config import DecoderConfig
from headrace.roles import WeightReader, WeightSync
from headrace.runtime.cores import learner_threads, threads_of_each
from headrace.runtime.devices import engine_device, resolve_device
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import PreparedModel
from headrace.waves import PausableGenerator
from headrace.weight_sync import MemoryWeightSync, StoredWeightSync, WeightChannel
from headrace.weight_sync.memory import Export

CLOSE_SECONDS = 600.0
"""A run that ends waits so long for what still computes; work that hangs must not hold its end."""


def compute_threads(
    stack: AsyncExitStack, config: RunConfig
) -> tuple[ComputeThread, ComputeThread]:
    """Return where generator and learner compute; ``stack`` closes it.

    A synchronous run has them take turns with all cores, so both get the same thread. An
    asynchronous one divides the cores between two, unless the engine computes elsewhere and
    nobody would use the generator's.
    """
    assert config.num_threads is not None
    if config.placement.is_disaggregated:
        shared = _compute_thread(stack, "learner", learner_threads(config, config.num_threads))
        return shared, shared
    if config.max_staleness == 0 or not _takes_cores(config.generator.engine):
        shared = _compute_thread(stack, "compute", config.num_threads)
        return shared, shared
    half = max(1, config.num_threads // 2)
    return (
        _compute_thread(stack, "generator", config.num_threads - half or 1),
        _compute_thread(stack, "learner", half),
    )


def generator_threads(config: RunConfig, compute: ComputeThread) -> int:
    """Return the cores of each generator; ``compute`` is that of one in this process."""
    if not config.placement.is_disaggregated:
        return compute.num_threads
    assert config.num_threads is not None
    return threads_of_each(config, config.num_threads)


def _takes_cores(engine: EngineName) -> bool:
    """Whether an engine computes with the cores of this machine; servers have their own."""
    match engine:
        case "torch":
            return True
        case "vllm":
            return resolve_device("auto").type == "cpu"
        case "sglang":
            return False
        case _:
            assert_never(engine)


def _compute_thread(stack: AsyncExitStack, name: str, num_threads: int) -> ComputeThread:
    compute = ComputeThread(name, num_threads)
    stack.push_async_callback(asyncio.to_thread, compute.close, CLOSE_SECONDS)
    return compute


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGenerator:
    """What a process builds its generator from: a `GeneratorSpec`."""

    config: RunConfig
    model_directory: Path
    num_threads: int
    reader: WeightReader

    def build(self) -> Hosted:
        """See `GeneratorSpec`."""
        model = PreparedModel.read(self.model_directory)
        compute = ComputeThread("generator", self.num_threads)
        return Hosted(generator=build_generator(self.config, model, compute), weights=self.reader)


def build_pool(
    config: RunConfig, launch: Launch, channel: WeightChannel, *, member_bytes: int = 0
) -> GeneratorPool:
    """Return the pool of a run, whose members ``launch`` starts with the first weights.

    ``member_bytes``: see `PoolSettings`.
    """
    placement = config.placement
    settings = PoolSettings(
        num_members=placement.num_generators,
        max_rollouts=config.generator.max_concurrent_rollouts,
        heartbeat_seconds=placement.heartbeat_seconds,
        hang_seconds=placement.hang_seconds,
        max_restarts=placement.max_restarts,
        backoff_seconds=placement.backoff_seconds,
        member_bytes=member_bytes,
        save_seconds=placement.save_seconds,
        on_update=config.generator.on_update,
    )
    return GeneratorPool(launch, settings, channel.store)


def build_weight_sync(
    export: Export,
    generator: PausableGenerator,
    channel: WeightChannel | None,
    *,
    is_copied: bool = False,
) -> WeightSync:
    """Return what brings weights to ``generator``: through ``channel``, or within this process.

    ``is_copied``: ``export`` returns copies, beside which the learner may step.
    """
    if channel is None:
        return MemoryWeightSync(export, [generator], is_copied=is_copied)
    assert isinstance(generator, GeneratorPool), "who is told of weights is a pool"
    return StoredWeightSync(export, channel.store, [generator])


def build_generator(
    config: RunConfig, model: PreparedModel, compute: ComputeThread
) -> PausableGenerator:
    """Return the generator of a run; it holds no weights until the first are published."""
    match config.generator.engine:
        case "torch":
            return _torch_generator(config, model, compute)
        case "vllm":
            return _vllm_generator(config, model, compute)
        case "sglang":
            return _sglang_generator(config.generator, model)
        case _:
            assert_never(config.generator.engine)


def _torch_generator(
    run: RunConfig, model: PreparedModel, compute: ComputeThread
) -> TorchGenerator:
    config = run.generator
    cache, device = config.max_cache_gib, engine_device(run)
    return TorchGenerator(
        model.decoder_config,
        decode=model.tokenizer.decode,
        compute=compute,
        dtype=resolve_dtype(config.dtype, device),
        device=device,
        is_quantized=config.dtype == "int8",
        max_concurrent_rollouts=config.max_concurrent_rollouts,
        max_prefill_tokens=config.max_prefill_tokens,
        on_update=config.on_update,
        max_cache_bytes=None if cache is None else int(cache * 2**30),
        batch_invariant=config.batch_invariant,
        staged_updates=config.staged_updates,
    )


def _sglang_generator(config: GeneratorConfig, model: PreparedModel) -> PausableGenerator:
    """Return the client of the servers; it asks them for the first time with the first weights."""
    from headrace.generators.sglang import SGLangGenerator  # noqa: PLC0415 - an extra

    assert isinstance(model.decoder_config, DecoderConfig), "preflight refuses it"
    variable = config.sglang.api_key_variable
    return SGLangGenerator(
        config.sglang,
        model.decoder_config,
        hf_config=model.hf_config,
        model_directory=model.directory,
        decode=model.tokenizer.decode,
        api_key=None if variable is None else os.environ[variable],
        on_update=config.on_update,
        max_concurrent_rollouts=config.max_concurrent_rollouts,
    )


def _vllm_generator(run: RunConfig, model: PreparedModel, compute: ComputeThread) -> VllmGenerator:
    config = run.generator
    assert isinstance(model.decoder_config, DecoderConfig), "preflight refuses it"
    cache = config.max_cache_gib
    return VllmGenerator(
        model.decoder_config,
        decode=model.tokenizer.decode,
        on_update=config.on_update,
        settings=VllmSettings(
            model=model.directory,
            dtype=resolve_dtype(config.dtype, engine_device(run)),
            options=config.vllm,
            max_concurrent_rollouts=config.max_concurrent_rollouts,
            max_prefill_tokens=config.max_prefill_tokens,
            max_cache_bytes=None if cache is None else int(cache * 2**30),
            num_threads=compute.num_threads,
        ),
    )
