"""TorchLearner: the Learner role on one device.

fp32 master weights, AdamW, one global denominator a minibatch. Owns invariant 10 (a non-finite
gradient changes nothing and is counted; several in a row stop the run) and counts what it leaves
out because it cannot change the gradient. All torch work runs on one compute thread. What a step
is made of is in `minibatch`.
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
from headrace.config import ObjectiveConfig, RunConfig
from headrace.errors import DivergedError, NoSignalError
from headrace.learners.critic import Critic, critic_figures
from headrace.learners.loss import (
    LossSetting,
    Readings,
    microbatch_loss,
    read_tokens,
)
from headrace.learners.metrics import LossSums, loss_figures
from headrace.learners.minibatch import Minibatch, drop_rejected, plan_minibatch
from headrace.learners.optimizer import (
    UpdateOutcome,
    add_faster,
    apply_update,
    build_optimizer,
    learning_rate,
    loss_scale,
)
from headrace.learners.packing import Microbatch, microbatches
from headrace.learners.rehearsal import largest_microbatch, rehearse
from headrace.learners.selection import (
    ScoredGroup,
    TrainingGroup,
    less_overlong,
    refuse_too_long,
    score,
    select,
    trained_rewards,
)
from headrace.learners.state import LearnerCounters, load_state, save_state
from headrace.learners.value_head import ValueHead, named_parameters
from headrace.models.decoder import Decoder
from headrace.models.foreign import Policy
from headrace.models.lora import MergedWeights, adapter_of
from headrace.models.weights import weight_update
from headrace.objectives.advantages import AdvantageEstimator, Rewards
from headrace.objectives.kl import k1
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
        self._decoder = decoder
        self._source = source
        self._config = config
        self._num_updates = num_updates
        self._compute_dtype, self._export_dtype = compute_dtype, export_dtype
        self._device = decoder.output_weight.device
        self._parameters = list(decoder.parameters())
        self._optimizer = build_optimizer(decoder.named_parameters(), config.learner.optimizer)
        if config.learner.activation_checkpointing:
            assert isinstance(decoder, Decoder), "preflight refuses it"
            decoder.recompute_layers()
        self._critic = self._build_critic() if config.objective.has_critic else None
        self._reference = _frozen(decoder) if config.objective.kl_coefficient > 0 else None
        self._counters = LearnerCounters()
        self._compute = compute

    def _build_critic(self) -> Critic:
        objective, size = self._config.objective, self._decoder.output_weight.shape[1]
        head = ValueHead(size, self._device, self._decoder.output_weight.dtype)
        named = named_parameters(head)
        add_faster(self._optimizer, named.items(), objective.critic.learning_rate_factor)
        self._parameters += named.values()
        return Critic(head, objective)

    async def rehearse(self, longest_prompt: int) -> None:
        """Compute the gradient of the largest micro-batch there can be, and throw it away.

        Before the first step. Raises RunError where it does not fit in memory.
        """
        await self._on_thread(lambda: self._rehearse(longest_prompt))

    def _rehearse(self, longest_prompt: int) -> None:
        batch = largest_microbatch(self._config, longest_prompt=longest_prompt, device=self._device)
        rehearse(
            batch,
            self._config,
            self._optimizer,
            lambda: self._backward(batch, LossSums(), scale=1.0),
        )

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
        self._counters = await self._on_thread(
            lambda: load_state(directory, self._decoder, self._optimizer, self._head)
        )
        return self._counters.policy_version

    @property
    def _head(self) -> ValueHead | None:
        return None if self._critic is None else self._critic.head

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

    @property
    def policy_version(self) -> int:
        """Optimizer updates made so far."""
        return self._counters.policy_version

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._compute.submit(work))

    def _step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        sums = LossSums()
        scored = self._score(groups, sums)
        parts = [self._plan(part) for part in _parts(scored, self._config.learner.num_minibatches)]
        if self._needs_proximal_pass(len(parts)):
            for part in parts:
                sums.add(self._recompute_proximal(part))
        if self._critic is not None and len(parts) > 1:
            for part in parts:
                sums.add(self._judge_ahead(part, self._critic))
        outcomes = [outcome for part in parts if (outcome := self._learn(part, sums))]
        self._judge_outcomes(outcomes)
        return StepResult(
            policy_version=self._counters.policy_version,
            num_updates=sum(outcome.applied for outcome in outcomes),
            metrics=self._metrics(parts, sums, outcomes),
        )

    def _score(self, groups: Sequence[RolloutGroup], sums: LossSums) -> list[ScoredGroup]:
        """Return the rollouts with their advantages, which are over the whole batch."""
        objective = self._config.objective
        refuse_too_long(groups, self._decoder.config.max_positions)
        rewards = trained_rewards(groups)
        if objective.overlong is not None:
            longest = self._config.sampling.max_tokens
            rewards = less_overlong(groups, rewards, objective.overlong, longest)
        estimator = _estimator(objective)
        scored = score(groups, rewards, estimator=estimator)
        self._judge_signal(groups, scored)
        if not self._kl_in_reward or self._critic is not None:
            return scored
        rewards = self._less_kl(groups, rewards, scored, sums)
        return score(groups, rewards, estimator=estimator)

    @property
    def _kl_in_reward(self) -> bool:
        return self._reference is not None and not self._config.objective.kl_in_loss

    @torch.no_grad()
    def _less_kl(
        self,
        groups: Sequence[RolloutGroup],
        rewards: Sequence[Rewards],
        scored: Sequence[ScoredGroup],
        sums: LossSums,
    ) -> list[list[float | None]]:
        """Return ``rewards`` less the coefficient times the sum of mu - ref over each rollout."""
        everything = select(scored, aggregation="token", max_tokens=1, keep_no_spread=True)
        costs: dict[int, float] = {}
        for batch in self._packed(everything.groups):
            reference = self._logprobs(self._reference_decoder, batch)
            everywhere = batch.segments.loss_mask
            gaps = k1(batch.generator_logprobs, reference, loss_mask=everywhere)
            sums.count(reward_kl=gaps.sum(), reward_tokens=everywhere.sum())
            own = batch.segments.sum(gaps).tolist()
            costs |= {id(row.rollout): c for row, c in zip(batch.rows, own, strict=True)}
        coefficient = self._config.objective.kl_coefficient
        return [
            [
                None if reward is None else reward - coefficient * costs[id(rollout)]
                for rollout, reward in zip(group.rollouts, own_rewards, strict=True)
            ]
            for group, own_rewards in zip(groups, rewards, strict=True)
        ]

    def _plan(self, groups: Sequence[ScoredGroup]) -> Minibatch:
        return plan_minibatch(groups, self._config, device=self._device)

    def _packed(self, groups: Sequence[TrainingGroup]) -> list[Microbatch]:
        budget = self._config.learner.max_tokens_per_microbatch
        return microbatches(groups, max_tokens=budget, device=self._device)

    def _needs_proximal_pass(self, num_minibatches: int) -> bool:
        """Whether p must be known before the training pass: else that pass computes it anyway."""
        objective = self._config.objective
        is_chosen_over_all = objective.correction.m2po is not None
        return objective.proximal == "recompute" and (num_minibatches > 1 or is_chosen_over_all)

    def _logprobs(self, decoder: Policy, batch: Microbatch) -> Tensor:
        return self._read(decoder, batch).logprobs

    def _read(self, decoder: Policy, batch: Microbatch) -> Readings:
        """Return what ``decoder``, and the critic where that is the policy, say of ``batch``."""
        with self._autocast():
            return read_tokens(
                decoder,
                batch,
                self._config.sampling.temperature,
                self._compute_dtype,
                entropy_gradient=self._config.objective.entropy_coefficient > 0,
                head=self._head if decoder is self._decoder else None,
            )

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._compute_dtype)

    @torch.no_grad()
    def _recompute_proximal(self, part: Minibatch) -> LossSums:
        """Compute p of every token, and leave out the rollouts that it rejects."""
        for batch in part.batches:
            batch.proximal_logprobs = self._logprobs(self._decoder, batch)
        return drop_rejected(part, self._config, device=self._device)

    @torch.no_grad()
    def _judge_ahead(self, part: Minibatch, critic: Critic) -> LossSums:
        """Fix advantages and targets of every token before the first update of the step."""
        total = LossSums()
        for batch in part.batches:
            found = self._read(self._decoder, batch)
            assert found.values is not None
            batch.critique, sums = critic.judge(
                batch, found.logprobs, found.values, self._reward_reference(batch)
            )
            total.add(sums)
        return total

    def _value_terms(
        self, batch: Microbatch, found: Readings, critic: Critic, total: LossSums
    ) -> Tensor:
        """Give ``batch`` its token advantages, and return what its values add to the loss."""
        assert found.values is not None
        if batch.critique is None:
            batch.critique, sums = critic.judge(
                batch, found.logprobs, found.values, self._reward_reference(batch)
            )
            total.add(sums)
        batch.advantages = batch.critique.advantages
        terms, sums = critic.terms(batch, found.values, batch.critique)
        total.add(sums)
        return terms

    def _learn(self, part: Minibatch, sums: LossSums) -> UpdateOutcome | None:
        """Make one update, or none where no token is left to learn from."""
        if not part.batches:
            return None
        own = self._accumulate(part)
        sums.add(own)
        return self._update() if own["tokens"] else None

    def _accumulate(self, part: Minibatch) -> LossSums:
        """Add up the gradients of one minibatch."""
        total, scale = LossSums(), self._loss_scale(part)
        for batch in part.batches:
            self._backward(batch, total, scale)
        self._scale_gradient(1.0 / scale)
        self._leave_rejected_uncounted(part, total)
        return total

    def _backward(self, batch: Microbatch, total: LossSums, scale: float) -> None:
        """Add ``scale`` times the gradient of one micro-batch, and its sums to ``total``."""
        found = self._read(self._decoder, batch)
        reference = self._reference_logprobs(batch)
        terms = None
        if self._critic is not None:
            terms = self._value_terms(batch, found, self._critic, total)
        setting = LossSetting(
            objective=self._config.objective,
            max_tokens=self._config.sampling.max_tokens,
            policy_version=self._counters.policy_version,
        )
        loss, sums = microbatch_loss(
            batch, found.logprobs, found.entropy, setting, reference, terms
        )
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        total.add(sums)

    def _loss_scale(self, part: Minibatch) -> float:
        if self._compute_dtype != torch.float16:
            return 1.0
        return loss_scale([row.weight for group in part.selection.groups for row in group.rows])

    def _scale_gradient(self, factor: float) -> None:
        if factor != 1.0:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(gradients, factor)

    def _leave_rejected_uncounted(self, part: Minibatch, sums: LossSums) -> None:
        """Divide the gradient by the share of the denominator that was not rejected."""
        share = sums["rejected_share"] + part.rejected_share
        if share and sums["tokens"]:
            factor = 1.0 / (1.0 - share)
            self._scale_gradient(factor)
            sums.totals["loss"] *= factor

    @torch.no_grad()
    def _reference_logprobs(self, batch: Microbatch) -> Tensor | None:
        if not self._config.objective.kl_in_loss:
            return None
        return self._logprobs(self._reference_decoder, batch)

    @torch.no_grad()
    def _reward_reference(self, batch: Microbatch) -> Tensor | None:
        if not self._kl_in_reward:
            return None
        return self._logprobs(self._reference_decoder, batch)

    @property
    def _reference_decoder(self) -> Policy:
        assert self._reference is not None, "only asked for with a KL coefficient"
        return self._reference

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

    def _judge_signal(self, groups: Sequence[RolloutGroup], scored: Sequence[ScoredGroup]) -> None:
        """Count steps whose rewards teach nothing, and stop when they keep coming.

        A KL term moves the weights without any reward, so an update is no proof of a signal, and
        neither is an advantage that comes of the KL in the reward: ``scored`` is without it. Judged
        before anything moves, so that the run stops with the weights of its last step.
        """
        counters, limit = self._counters, self._config.learner.max_no_signal_steps
        has_signal = any(group.has_signal for group in scored)
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
        self, parts: Sequence[Minibatch], sums: LossSums, outcomes: Sequence[UpdateOutcome]
    ) -> dict[str, float]:
        selections = [part.selection for part in parts]
        rewards = [reward for selection in selections for reward in selection.trained_rewards]
        metrics = {
            "learner/groups/num_no_spread": float(sum(s.num_no_spread for s in selections)),
            "learner/groups/num_trained": float(sum(len(s.groups) for s in selections)),
            "learner/tokens/num_trained": sums["tokens"],
            "learner/step/num_skipped": float(sum(not outcome.applied for outcome in outcomes)),
            "learner/step/num_no_signal": float(self._counters.num_no_signal > 0),
            "learner/loss/total": sums["loss"],
        }
        if rewards:
            metrics["learner/reward/trained_mean"] = sum(rewards) / len(rewards)
        if outcomes:
            metrics["learner/gradient/norm"] = outcomes[-1].gradient_norm
            metrics["learner/optimizer/learning_rate"] = self._optimizer.param_groups[0]["lr"]
        return metrics | loss_figures(sums, self._config.objective) | critic_figures(sums)


def _estimator(objective: ObjectiveConfig) -> AdvantageEstimator:
    """Return what scores rollouts.

    With a critic that says whether there is a signal, and the critic's own advantages take its
    place token by token.
    """
    match objective.advantage:
        case "gae" | "vtrace":
            return "reinforce_pp"
        case _:
            return objective.advantage


def _frozen(decoder: Policy) -> Policy:
    """Return the policy as it is now. What is not trained is shared, with an adapter nearly all."""
    shared = {id(p): p for p in decoder.parameters() if not p.requires_grad}
    return copy.deepcopy(decoder, shared).requires_grad_(requires_grad=False)


def _parts(groups: Sequence[ScoredGroup], count: int) -> list[Sequence[ScoredGroup]]:
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
