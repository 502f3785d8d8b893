"""TorchLearner: the Learner role on one device.

fp32 master weights, AdamW, one global denominator a minibatch. Owns invariant 10 (a non-finite
gradient changes nothing and is counted; several in a row stop the run) and counts what it leaves
out because it cannot change the gradient. All torch work runs on one compute thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.errors import DivergedError, NoSignalError
from headrace.learners.loss import LossSums, microbatch_loss, token_logprobs
from headrace.learners.optimizer import (
    UpdateOutcome,
    apply_update,
    build_optimizer,
    learning_rate,
)
from headrace.learners.packing import Microbatch, Selection, microbatches, select
from headrace.learners.state import LearnerCounters, load_state, save_state
from headrace.models.decoder import Decoder
from headrace.models.weights import weight_update
from headrace.objectives.importance import effective_sample_share
from headrace.types import RolloutGroup, StepResult, WeightUpdate

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """Where the policy comes from, for writing it back as a complete Hugging Face directory."""

    directory: Path
    hf_config: Mapping[str, Any]


class TorchLearner:
    """Updates one decoder."""

    def __init__(
        self,
        decoder: Decoder,
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
        self._decoder = decoder
        self._source = source
        self._config = config
        self._num_updates = num_updates
        self._compute_dtype, self._export_dtype = compute_dtype, export_dtype
        self._device = decoder.output_weight.device
        self._parameters = list(decoder.parameters())
        self._optimizer = build_optimizer(decoder.named_parameters(), config.learner.optimizer)
        self._reference = _frozen(decoder) if config.objective.kl_coefficient > 0 else None
        self._counters = LearnerCounters()
        self._compute = compute

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner`."""
        return await self._on_thread(lambda: self._step(groups))

    async def save(self, directory: Path) -> None:
        """See `Learner`: the policy under ``hf/``, optimizer and counters beside it."""
        await self._on_thread(
            lambda: save_state(
                directory,
                self._decoder,
                self._optimizer,
                self._counters,
                hf_config=self._source.hf_config,
                source_directory=self._source.directory,
            )
        )

    async def load(self, directory: Path) -> int:
        """See `Learner`."""
        self._counters = await self._on_thread(
            lambda: load_state(directory, self._decoder, self._optimizer)
        )
        return self._counters.policy_version

    async def close(self) -> None:
        """See `Learner`. What was begun ends with the compute thread."""

    async def export(self) -> WeightUpdate:
        """Return the weights in the generators' dtype; fp32 is by reference, never a copy.

        Valid until the next step.
        """
        return await self._on_thread(self._export)

    def _export(self) -> WeightUpdate:
        tensors = {
            name: parameter.detach().to(self._export_dtype)
            for name, parameter in self._decoder.named_parameters()
        }
        return weight_update(self._counters.policy_version, tensors)

    @property
    def policy_version(self) -> int:
        """Optimizer updates made so far."""
        return self._counters.policy_version

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._compute.submit(work))

    def _step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        plans = [self._plan(part) for part in _parts(groups, self._config.learner.num_minibatches)]
        selections = [selection for selection, _ in plans]
        self._judge_signal(groups, selections)
        if len(plans) > 1 and self._config.objective.proximal == "recompute":
            self._recompute_proximal([batch for _, batches in plans for batch in batches])
        sums, outcomes = LossSums(), []
        for _, batches in plans:
            if batches:
                sums.add(self._accumulate(batches))
                outcomes.append(self._update())
        self._judge_outcomes(outcomes)
        return StepResult(
            policy_version=self._counters.policy_version,
            num_updates=sum(outcome.applied for outcome in outcomes),
            metrics=self._metrics(selections, sums, outcomes),
        )

    def _plan(self, groups: Sequence[RolloutGroup]) -> tuple[Selection, list[Microbatch]]:
        config = self._config
        selection = select(
            groups,
            estimator=config.objective.advantage,
            aggregation=config.objective.aggregation,
            max_tokens=config.sampling.max_tokens,
            # A KL term pulls on every rollout, whatever its group's spread.
            keep_no_spread=self._reference is not None,
        )
        budget = config.learner.max_tokens_per_microbatch
        return selection, microbatches(selection.groups, max_tokens=budget, device=self._device)

    def _logprobs(self, decoder: Decoder, batch: Microbatch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return token_logprobs(
                decoder, batch, self._config.sampling.temperature, self._compute_dtype
            )

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._compute_dtype)

    @torch.no_grad()
    def _recompute_proximal(self, batches: Sequence[Microbatch]) -> None:
        for batch in batches:
            batch.proximal_logprobs, _ = self._logprobs(self._decoder, batch)

    def _accumulate(self, batches: Sequence[Microbatch]) -> LossSums:
        """Add up the gradients of one minibatch."""
        total = LossSums()
        for batch in batches:
            logprobs, entropy = self._logprobs(self._decoder, batch)
            loss, sums = microbatch_loss(
                batch, logprobs, entropy, self._config.objective, self._reference_logprobs(batch)
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total.add(sums)
        return total

    @torch.no_grad()
    def _reference_logprobs(self, batch: Microbatch) -> Tensor | None:
        return None if self._reference is None else self._logprobs(self._reference, batch)[0]

    def _update(self) -> UpdateOutcome:
        optimizer = self._config.learner.optimizer
        outcome = apply_update(
            self._optimizer,
            self._parameters,
            max_norm=optimizer.max_gradient_norm,
            learning_rate=learning_rate(
                optimizer, self._counters.policy_version, self._num_updates
            ),
        )
        self._counters.policy_version += outcome.applied
        return outcome

    def _judge_signal(
        self, groups: Sequence[RolloutGroup], selections: Sequence[Selection]
    ) -> None:
        """Count steps whose rewards teach nothing, and stop when they keep coming.

        A KL term moves the weights without any reward, so an update is no proof of a signal. Judged
        before anything moves, so that the run stops with the weights of its last step.
        """
        counters, limit = self._counters, self._config.learner.max_no_signal_steps
        has_signal = any(selection.num_with_spread for selection in selections)
        counters.num_no_signal = 0 if has_signal else counters.num_no_signal + 1
        if counters.num_no_signal >= limit:
            msg = (
                f"{counters.num_no_signal} steps in a row had no group with a spread of rewards: "
                f"{_reasons(groups)}. Nothing can be learned from them. If they are as good as can "
                "be, the policy has learned what these prompts teach; otherwise choose easier or "
                "harder prompts, a larger group_size or a higher sampling.temperature"
            )
            raise NoSignalError(msg)

    def _judge_outcomes(self, outcomes: Sequence[UpdateOutcome]) -> None:
        """Count steps whose every gradient was not finite, and stop when they keep coming."""
        counters, limit = self._counters, self._config.learner.max_nonfinite_steps
        if outcomes:
            all_failed = not any(outcome.applied for outcome in outcomes)
            counters.num_nonfinite = counters.num_nonfinite + 1 if all_failed else 0
        if counters.num_nonfinite >= limit:
            msg = (
                f"the gradient was not finite {counters.num_nonfinite} steps in a row "
                f"(last norm {outcomes[-1].gradient_norm}); the weights are those of version "
                f"{counters.policy_version}. Lower learner.optimizer.learning_rate, or look at the "
                "rollouts of the last steps with `headrace inspect`"
            )
            raise DivergedError(msg)

    def _metrics(
        self, selections: Sequence[Selection], sums: LossSums, outcomes: Sequence[UpdateOutcome]
    ) -> dict[str, float]:
        rewards = [reward for selection in selections for reward in selection.trained_rewards]
        metrics = {
            "learner/groups/num_no_spread": float(sum(s.num_no_spread for s in selections)),
            "learner/groups/num_trained": float(sum(len(s.groups) for s in selections)),
            "learner/tokens/num_trained": sums.tokens,
            "learner/step/num_skipped": float(sum(not outcome.applied for outcome in outcomes)),
            "learner/step/num_no_signal": float(not any(s.num_with_spread for s in selections)),
            "learner/loss/total": sums.loss,
        }
        if rewards:
            metrics["learner/reward/trained_mean"] = sum(rewards) / len(rewards)
        if outcomes:
            metrics["learner/gradient/norm"] = outcomes[-1].gradient_norm
            metrics["learner/optimizer/learning_rate"] = self._optimizer.param_groups[0]["lr"]
        if sums.tokens:
            metrics |= _token_means(sums)
            if self._config.objective.correction != "none":
                metrics |= _importance_statistics(sums)
            if self._reference is not None:
                metrics["learner/kl/reference"] = sums.reference_k3 / sums.tokens
        return metrics


def _token_means(sums: LossSums) -> dict[str, float]:
    return {
        "learner/entropy/mean": sums.entropy / sums.tokens,
        "learner/importance_ratio/mean": sums.ratio / sums.tokens,
        "learner/importance_ratio/max": sums.max_ratio,
        "learner/clip/share": sums.clipped / sums.tokens,
        "learner/mismatch/k1": sums.mismatch_k1 / sums.tokens,
        "learner/mismatch/k3": sums.mismatch_k3 / sums.tokens,
    }


def _importance_statistics(sums: LossSums) -> dict[str, float]:
    """Describe the weights as they were applied, so after the truncation."""
    return {
        "learner/importance_weight/mean": sums.importance / sums.tokens,
        "learner/importance_weight/max": sums.max_importance,
        "learner/importance_weight/truncated_share": sums.truncated / sums.tokens,
        "learner/importance_weight/ess": effective_sample_share(
            sums.importance, sums.squared_importance, sums.tokens
        ),
    }


def _frozen(decoder: Decoder) -> Decoder:
    return copy.deepcopy(decoder).requires_grad_(requires_grad=False)


def _parts(groups: Sequence[RolloutGroup], count: int) -> list[Sequence[RolloutGroup]]:
    """Split into at most ``count`` runs of nearly equal length, in order."""
    bounds = [len(groups) * index // count for index in range(count + 1)]
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]


def _reasons(groups: Sequence[RolloutGroup]) -> str:
    """Say of the last batch why its groups have no spread."""
    table: dict[str, int] = {}
    for group in groups:
        scored = [reward for reward in group.rewards if reward is not None]
        reason = f"all equal {scored[0]:g}" if scored else "none scored"
        table[reason] = table.get(reason, 0) + 1
    return ", ".join(f"{count} groups {reason}" for reason, count in sorted(table.items()))
