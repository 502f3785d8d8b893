"""One held-out evaluation of a model as it is, without training it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from headrace.compute import ComputeThread
from headrace.errors import ConfigError, VerifierFailure
from headrace.held_out import evaluate_prompts
from headrace.models.foreign import load_policy
from headrace.models.weights import weight_update
from headrace.runtime.devices import engine_device
from headrace.runtime.generators import CLOSE_SECONDS, build_weight_sync
from headrace.runtime.local import evaluation_plan
from headrace.runtime.places import LocalPlaces
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import PreparedRun
from headrace.types import RolloutGroup, Verdict, WeightUpdate
from headrace.verifiers import build_verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Held-out metrics, the sampling they were measured with, and what they were measured on."""

    metrics: Mapping[str, float]
    sampling: Mapping[str, object]
    groups: Sequence[RolloutGroup]


async def evaluate_model(prepared: PreparedRun) -> EvaluationResult:
    """Measure ``prepared``'s model on its held-out prompts.

    Raises ConfigError if there are none, VerifierFailure if no rollout could be scored.
    """
    plan = evaluation_plan(prepared)
    if plan is None or not plan.prompts:
        msg = "data.eval: missing; an evaluation needs held-out prompts"
        raise ConfigError(msg)
    num_threads = prepared.config.num_threads or os.cpu_count() or 1
    config = prepared.config.model_copy(update={"num_threads": num_threads})
    torch.set_num_threads(1)  # the compute thread has the cores
    dtype = resolve_dtype(config.generator.dtype, engine_device(config))
    decoder = await asyncio.to_thread(load_policy, prepared.model.directory, dtype)

    async def export() -> WeightUpdate:
        tensors = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
        return weight_update(0, tensors)

    async with AsyncExitStack() as stack:
        compute = ComputeThread("generator", num_threads)
        stack.push_async_callback(asyncio.to_thread, compute.close, CLOSE_SECONDS)
        places = LocalPlaces()
        channel = places.channel(config, compute)
        if channel is not None:
            stack.callback(channel.store.close)
        generator = places.generator(config, prepared.model, compute, channel)
        stack.push_async_callback(generator.close)
        verifier = build_verifier(config.verifier)
        stack.push_async_callback(verifier.close)
        await (await build_weight_sync(export, generator, channel).publish(0))
        groups, metrics = await evaluate_prompts(plan, generator, verifier, config.seed)
    _require_scores([verdict for group in groups for verdict in group.verdicts or ()])
    sampling = {str(mode): dataclasses.asdict(params) for mode, (_, params) in plan.modes.items()}
    return EvaluationResult(metrics=metrics, sampling=sampling, groups=groups)


def _require_scores(verdicts: Sequence[Verdict]) -> None:
    if all(verdict.reward is None for verdict in verdicts):
        first = f"; the first: {verdicts[0].detail}" if verdicts else ""
        msg = f"none of the {len(verdicts)} rollouts could be scored{first}"
        raise VerifierFailure(msg)
