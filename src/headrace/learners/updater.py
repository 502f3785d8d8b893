"""PolicyUpdater: the step of a learner, on one process or on each of several ranks.

fp32 master weights, AdamW, one global denominator a minibatch. Owns the first half of invariant 10
(a non-finite gradient changes nothing and is counted) and counts what it leaves out because it
cannot change the gradient. What a step is made of is in `minibatch`; what ranks ask of each other
in `layout`; when a run must stop in `signals`. Knows no threads, files or roles.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from headrace.config import ObjectiveConfig, RunConfig
from headrace.learners.critic import Critic, critic_figures
from headrace.learners.layout import Alone, Layout, ReadingSetting
from headrace.learners.loss import LossSetting, Readings, microbatch_loss
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
from headrace.learners.signals import judge_outcomes, judge_signal
from headrace.learners.state import LearnerCounters
from headrace.learners.value_head import HEAD_PREFIX, ValueHead
from headrace.models.decoder import Decoder
from headrace.models.foreign import Policy
from headrace.objectives.advantages import AdvantageEstimator, Rewards
from headrace.objectives.kl import k1
from headrace.types import RolloutGroup, StepResult


class PolicyUpdater:
    """Updates one decoder, or one rank's part of it."""

    def __init__(
        self,
        decoder: Policy,
        config: RunConfig,
        *,
        num_updates: int,
        compute_dtype: torch.dtype = torch.float32,
        reference: Policy | None = None,
        layout: Layout | None = None,
    ) -> None:
        """``num_updates`` is the run's planned total, for the schedule.

        ``reference``: the policy as training began, where there is a KL coefficient.
        """
        self._decoder = decoder
        self._config = config
        self._num_updates = num_updates
        self._compute_dtype = compute_dtype
        self._device = decoder.output_weight.device
        self._reference = reference
        if config.learner.activation_checkpointing:
            assert isinstance(decoder, Decoder), "preflight refuses it"
            decoder.recompute_layers()
        self._critic = self._build_critic() if config.objective.has_critic else None
        self._layout: Layout = layout or Alone()
        named = self._layout.parameters(decoder, self._head)
        policy = [item for item in named.items() if not item[0].startswith(HEAD_PREFIX)]
        self._optimizer = build_optimizer(policy, config.learner.optimizer)
        if self._critic is not None:
            head = [item for item in named.items() if item[0].startswith(HEAD_PREFIX)]
            add_faster(self._optimizer, head, config.objective.critic.learning_rate_factor)
        self._parameters = list(named.values())
        self._counters = LearnerCounters()

    def _build_critic(self) -> Critic:
        size = self._decoder.output_weight.shape[1]
        head = ValueHead(size, self._device, self._decoder.output_weight.dtype)
        return Critic(head, self._config.objective)

    @property
    def _head(self) -> ValueHead | None:
        return None if self._critic is None else self._critic.head

    @property
    def policy_version(self) -> int:
        """Optimizer updates made so far."""
        return self._counters.policy_version

    def _rehearse(self, longest_prompt: int) -> None:
        batch = largest_microbatch(self._config, longest_prompt=longest_prompt, device=self._device)
        rehearse(
            batch,
            self._config,
            self._optimizer,
            lambda: self._try(batch),
        )

    def _try(self, batch: Microbatch) -> None:
        self._backward(batch, LossSums(), scale=1.0)
        self._layout.take_gradients()

    def _step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner.step`."""
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
        judge_outcomes(self._counters, self._config.learner, outcomes)
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
        judge_signal(self._counters, self._config.learner, groups, scored)
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
        places = {
            id(row.rollout): place
            for place, row in enumerate(row for group in everything.groups for row in group.rows)
        }
        costs, own = torch.zeros(len(places), dtype=torch.float64), LossSums()
        for batch in self._packed(everything.groups):
            gaps = self._gaps(batch)
            if not batch.is_idle:
                own.count(reward_kl=gaps.sum(), reward_tokens=batch.segments.loss_mask.sum())
                at = [places[id(row.rollout)] for row in batch.rows]
                costs[at] = batch.segments.sum(gaps).to("cpu", torch.float64)
        sums.add(self._layout.total(own))
        total = self._layout.summed(costs).tolist()
        coefficient = self._config.objective.kl_coefficient
        return [
            [
                None if reward is None else reward - coefficient * total[places[id(rollout)]]
                for rollout, reward in zip(group.rollouts, own_rewards, strict=True)
            ]
            for group, own_rewards in zip(groups, rewards, strict=True)
        ]

    def _gaps(self, batch: Microbatch) -> Tensor:
        """Return [M] mu - ref of each token."""
        reference = self._reference_logprobs(batch, wanted=True)
        assert reference is not None
        return k1(batch.generator_logprobs, reference, loss_mask=batch.segments.loss_mask)

    def _plan(self, groups: Sequence[ScoredGroup]) -> Minibatch:
        return plan_minibatch(groups, self._config, device=self._device, layout=self._layout)

    def _packed(self, groups: Sequence[TrainingGroup]) -> list[Microbatch]:
        budget, own = self._config.learner.max_tokens_per_microbatch, self._layout.share(groups)
        batches = microbatches(own, max_tokens=budget, device=self._device)
        return self._layout.padded(batches, self._device)

    def _needs_proximal_pass(self, num_minibatches: int) -> bool:
        """Whether p must be known before the training pass: else that pass computes it anyway."""
        objective = self._config.objective
        is_chosen_over_all = objective.correction.m2po is not None
        return objective.proximal == "recompute" and (num_minibatches > 1 or is_chosen_over_all)

    def _logprobs(self, decoder: Policy, batch: Microbatch) -> Tensor:
        return self._read(decoder, batch).logprobs

    def _read(self, decoder: Policy, batch: Microbatch) -> Readings:
        """Return what ``decoder``, and the critic where that is the policy, say of ``batch``."""
        setting = ReadingSetting(
            temperature=self._config.sampling.temperature,
            dtype=self._compute_dtype,
            entropy_gradient=self._config.objective.entropy_coefficient > 0,
        )
        head = self._head if decoder is self._decoder else None
        with self._autocast():
            return self._layout.read(decoder, head, batch, setting)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._compute_dtype in {torch.float32, torch.float64}:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._compute_dtype)

    @torch.no_grad()
    def _recompute_proximal(self, part: Minibatch) -> LossSums:
        """Compute p of every token, and leave out the rollouts that it rejects."""
        for batch in part.batches:
            batch.proximal_logprobs = self._logprobs(self._decoder, batch)
        return drop_rejected(part, self._config, device=self._device, layout=self._layout)

    @torch.no_grad()
    def _judge_ahead(self, part: Minibatch, critic: Critic) -> LossSums:
        """Fix advantages and targets of every token before the first update of the step."""
        total = LossSums()
        for batch in part.batches:
            self._judge(batch, self._read(self._decoder, batch), critic, total)
        return self._layout.total(total)

    def _judge(self, batch: Microbatch, found: Readings, critic: Critic, total: LossSums) -> None:
        """Have the critic fix advantages and targets of ``batch`` from what was read of it."""
        assert found.values is not None
        reference = self._reference_logprobs(batch, wanted=self._kl_in_reward)
        batch.critique, sums = critic.judge(batch, found.logprobs, found.values, reference)
        if not batch.is_idle:
            total.add(sums)

    def _value_terms(
        self, batch: Microbatch, found: Readings, critic: Critic, total: LossSums
    ) -> Tensor:
        """Give ``batch`` its token advantages, and return what its values add to the loss."""
        if batch.critique is None:
            self._judge(batch, found, critic, total)
        assert batch.critique is not None
        assert found.values is not None
        batch.advantages = batch.critique.advantages
        terms, sums = critic.terms(batch, found.values, batch.critique)
        if not batch.is_idle:
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
        """Add up the gradients of one minibatch; return the sums of all ranks."""
        own, scale = LossSums(), self._loss_scale(part)
        for batch in part.batches:
            self._backward(batch, own, scale)
        own.totals["rejected_share"] += part.rejected_share
        self._layout.take_gradients()
        total = self._layout.total(own)
        self._scale_gradient(1.0 / scale)
        self._leave_rejected_uncounted(total)
        return total

    def _backward(self, batch: Microbatch, total: LossSums, scale: float) -> None:
        """Add ``scale`` times the gradient of one micro-batch, and its sums to ``total``."""
        found = self._read(self._decoder, batch)
        reference = self._reference_logprobs(batch, wanted=self._config.objective.kl_in_loss)
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
        if not batch.is_idle:
            total.add(sums)

    def _loss_scale(self, part: Minibatch) -> float:
        if self._compute_dtype != torch.float16:
            return 1.0
        return loss_scale([row.weight for group in part.selection.groups for row in group.rows])

    def _scale_gradient(self, factor: float) -> None:
        if factor != 1.0:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(gradients, factor)

    def _leave_rejected_uncounted(self, sums: LossSums) -> None:
        """Divide the gradient by the share of the denominator that was not rejected."""
        share = sums["rejected_share"]
        if share and sums["tokens"]:
            factor = 1.0 / (1.0 - share)
            self._scale_gradient(factor)
            sums.totals["loss"] *= factor

    @torch.no_grad()
    def _reference_logprobs(self, batch: Microbatch, *, wanted: bool) -> Tensor | None:
        """Return [M] of the policy as training began, None where it is not ``wanted``."""
        return self._logprobs(self._reference_decoder, batch) if wanted else None

    @property
    def _reference_decoder(self) -> Policy:
        assert self._reference is not None, "only asked for with a KL coefficient"
        return self._reference

    def _update(self) -> UpdateOutcome:
        optimizer = self._config.learner.optimizer
        outcome = apply_update(
            self._optimizer,
            self._parameters,
            norm=self._layout.gradient_norm(),
            max_norm=optimizer.max_gradient_norm,
            learning_rate=learning_rate(
                optimizer, self._counters.policy_version, self._num_updates
            ),
        )
        self._counters.policy_version += outcome.applied
        return outcome

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


def frozen(decoder: Policy) -> Policy:
    """Return the policy as it is now. What is not trained is shared, with an adapter nearly all."""
    shared = {id(p): p for p in decoder.parameters() if not p.requires_grad}
    return copy.deepcopy(decoder, shared).requires_grad_(requires_grad=False)


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


def _parts(groups: Sequence[ScoredGroup], count: int) -> list[Sequence[ScoredGroup]]:
    """Split into at most ``count`` runs of nearly equal length, in order."""
    bounds = [len(groups) * index // count for index in range(count + 1)]
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
