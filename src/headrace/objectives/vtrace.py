"""Targets and advantages from a value function: V-trace and generalised advantage estimation.

A step is a trained token: what lies between two of them (a tool's answer, a forced prefix) is
skipped, not filled with zeros, so the value after token t is that of the next trained token. Values
are the learner's, rewards come with the token that earned them; ``bootstrap`` [R] is the value
after the last token, 0 where the rollout ended. Owns: everything returned is a constant to the
gradient, and a cell outside the mask is 0 and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.objectives.importance import LOG_WEIGHT_LIMIT
from headrace.objectives.segments import Segments, next_values, suffix_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class VTrace:
    """What V-trace says of each token, [N] each."""

    targets: Tensor
    """vs: what the critic is fitted to."""
    advantages: Tensor
    """min(rho_pg_bar, w) (R + gamma vs_(t+1) - V): the policy gradient's factor."""


@torch.no_grad()
def vtrace(
    log_weights: Tensor,
    rewards: Tensor,
    values: Tensor,
    *,
    bootstrap: Tensor,
    discounts: Tensor,
    segments: Segments,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_pg_bar: float = 1.0,
) -> VTrace:
    """Return targets and advantages under the current policy of what another one sampled.

    ``log_weights``: q - mu in nats; ``rewards``, ``values``, ``discounts``: [N]. IMPALA
    (arXiv:1802.01561, section 4.1, equation 1 in the recursive form of remark 1), with
    w = e^(q - mu), rho = min(rho_bar, w), c = min(c_bar, w):

        delta_t = rho_t (R_t + gamma_t V_(t+1) - V_t)
        vs_t = V_t + delta_t + gamma_t c_t (vs_(t+1) - V_(t+1))

    ``rho_bar`` decides what is converged to, ``c_bar`` how fast. Log-weights are clamped to
    `LOG_WEIGHT_LIMIT`.
    """
    log_weights, rewards, values, discounts = (
        _masked(tensor, segments) for tensor in (log_weights, rewards, values, discounts)
    )
    weights = log_weights.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    later = next_values(values, bootstrap, segments)
    deltas = weights.clamp(max=rho_bar) * (rewards + discounts * later - values)
    excess = suffix_sums(deltas, discounts * weights.clamp(max=c_bar), segments)
    targets = values + excess
    later_targets = next_values(targets, bootstrap, segments)
    advantages = weights.clamp(max=rho_pg_bar) * (rewards + discounts * later_targets - values)
    return VTrace(targets=_masked(targets, segments), advantages=_masked(advantages, segments))


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    bootstrap: Tensor,
    segments: Segments,
    gamma: float,
    lambda_: float,
) -> Tensor:
    """Return the advantage of each token [N]; with the values added it is the critic's target.

    Schulman et al. 2016 (arXiv:1506.02438, equation 16): the sum of (gamma lambda)^k delta_(t+k)
    with delta_t = R_t + gamma V_(t+1) - V_t. ``lambda_`` 1 is the discounted return less V, 0 is
    delta alone. ``rewards``, ``values``: [N].
    """
    rewards, values = _masked(rewards, segments), _masked(values, segments)
    deltas = rewards + gamma * next_values(values, bootstrap, segments) - values
    return suffix_sums(deltas, torch.full_like(deltas, gamma * lambda_), segments)


def _masked(values: Tensor, segments: Segments) -> Tensor:
    return torch.where(segments.loss_mask, values, values.new_zeros(()))
