"""Token advantages and targets from a value head: PPO's and IMPALA's critic.

A rollout's reward comes with its last trained token, a KL in the reward with each of them. The
value after the last one is 0: every rollout is judged as it ended. Owns: advantages and targets are
constants, those of a step with several updates from before the first one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.config import ObjectiveConfig
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Critique, Microbatch
from headrace.learners.value_head import ValueHead
from headrace.objectives.kl import k1
from headrace.objectives.value_loss import value_loss
from headrace.objectives.vtrace import gae, vtrace


class Critic:
    """The value head and what is made of its values."""

    def __init__(self, head: ValueHead, objective: ObjectiveConfig) -> None:
        self.head = head
        self._objective = objective

    @torch.no_grad()
    def judge(
        self, batch: Microbatch, logprobs: Tensor, values: Tensor, reference: Tensor | None
    ) -> tuple[Critique, LossSums]:
        """Return advantages and targets from current q and V, [M] each.

        ``reference`` [M] is there exactly with a KL in the reward.
        """
        config, segments = self._objective.critic, batch.segments
        rewards, sums = self._token_rewards(batch, reference)
        bootstrap = values.new_zeros(segments.count)
        if self._objective.advantage == "vtrace":
            found = vtrace(
                logprobs - batch.generator_logprobs,
                rewards,
                values,
                bootstrap=bootstrap,
                discounts=torch.full_like(values, config.gamma),
                segments=segments,
                rho_bar=config.rho_bar,
                c_bar=config.c_bar,
                rho_pg_bar=config.rho_pg_bar,
            )
            return Critique(advantages=found.advantages, targets=found.targets, values=values), sums
        advantages = gae(
            rewards,
            values,
            bootstrap=bootstrap,
            segments=segments,
            gamma=config.gamma,
            lambda_=config.gae_lambda,
        )
        return Critique(advantages=advantages, targets=advantages + values, values=values), sums

    def terms(
        self, batch: Microbatch, values: Tensor, critique: Critique
    ) -> tuple[Tensor, LossSums]:
        """Return [M] what each token adds to the loss by its value, differentiably."""
        config = self._objective.critic
        everywhere = batch.segments.loss_mask
        losses, clipped = value_loss(
            values,
            critique.targets,
            loss_mask=everywhere,
            values_before=critique.values,
            clip=config.value_clip,
        )
        sums = LossSums()
        targets = critique.targets.detach()
        sums.count(
            **{
                "critic/tokens": everywhere.sum(),
                "critic/values": values.sum(),
                "critic/targets": targets.sum(),
                "critic/squared_targets": targets.square().sum(),
                "critic/squared_errors": (values - targets).square().sum(),
                "critic/advantages": critique.advantages.sum(),
                "critic/clipped": clipped.sum(),
            }
        )
        return config.value_coefficient * losses, sums

    def _token_rewards(
        self, batch: Microbatch, reference: Tensor | None
    ) -> tuple[Tensor, LossSums]:
        """Return [M] the reward that comes with each token, and what the KL in it adds up to."""
        segments, sums = batch.segments, LossSums()
        rewards = torch.zeros_like(batch.generator_logprobs)
        # Of one rollout tokens lie side by side, in their order.
        rewards[segments.lengths.cumsum(0) - 1] = batch.rewards.to(rewards.dtype)
        if reference is not None:
            gaps = k1(batch.generator_logprobs, reference, loss_mask=segments.loss_mask)
            rewards -= self._objective.kl_coefficient * gaps
            sums.count(reward_kl=gaps.sum(), reward_tokens=segments.loss_mask.sum())
        return rewards, sums


def critic_figures(sums: LossSums) -> dict[str, float]:
    """Return the metrics of `Critic.terms`; none where no token was computed."""
    tokens = sums["critic/tokens"]
    if not tokens:
        return {}
    target = sums["critic/targets"] / tokens
    error = sums["critic/squared_errors"] / tokens
    variance = sums["critic/squared_targets"] / tokens - target * target
    found = {
        "learner/value/mean": sums["critic/values"] / tokens,
        "learner/value/target_mean": target,
        "learner/value/squared_error": error,
        "learner/value/clip_share": sums["critic/clipped"] / tokens,
        "learner/advantage/mean": sums["critic/advantages"] / tokens,
    }
    if variance > 0.0:
        found["learner/value/explained_variance"] = 1.0 - error / variance
    return found
