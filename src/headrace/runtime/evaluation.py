"""One held-out evaluation of a model as it is, without training it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.controller import evaluate_prompts
from headrace.errors import ConfigError
from headrace.models.checkpoint import load_decoder
from headrace.monitors import write_rollouts
from headrace.runtime.local import build_generator, evaluation_plan
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import PreparedRun
from headrace.verifiers import build_verifier
from headrace.weight_sync import MemoryWeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Held-out metrics and the sampling they were measured with."""

    metrics: Mapping[str, float]
    sampling: Mapping[str, object]


async def evaluate_model(prepared: PreparedRun, rollouts: Path | None = None) -> EvaluationResult:
    """Measure ``prepared``'s model on its held-out prompts; write the rollouts if asked to."""
    plan = evaluation_plan(prepared)
    if plan is None:
        msg = "data.eval: missing; an evaluation needs held-out prompts"
        raise ConfigError(msg)
    config = prepared.config
    torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
    decoder = await asyncio.to_thread(
        load_decoder, prepared.model.directory, resolve_dtype(config.generator.dtype)
    )

    async def export() -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in decoder.named_parameters()}

    async with AsyncExitStack() as stack:
        generator = build_generator(prepared)
        stack.push_async_callback(generator.close)
        verifier = build_verifier(config.verifier)
        stack.push_async_callback(verifier.close)
        await MemoryWeightSync(export, [generator]).publish(0)
        groups, metrics = await evaluate_prompts(plan, generator, verifier, config.seed)
    if rollouts is not None:
        write_rollouts(rollouts, groups)
    sampling = {str(mode): dataclasses.asdict(params) for mode, (_, params) in plan.modes.items()}
    return EvaluationResult(metrics=metrics, sampling=sampling)
