"""Which settings of a critic cannot be meant together, and which nothing would read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.config.critic import CriticConfig
from headrace.config.objective import GmpoLoss, GspoLoss, ObjectiveConfig, ReinforceLoss

if TYPE_CHECKING:
    from headrace.config.objective_rules import Refusal

_OF_VTRACE = ("rho_bar", "c_bar", "rho_pg_bar")
_OF_GAE = ("gae_lambda", "value_clip")


def critic_refusals(objective: ObjectiveConfig, num_minibatches: int) -> Iterator[Refusal]:
    """Yield what contradicts itself or would have no effect."""
    yield from _unread(objective)
    if not objective.has_critic:
        return
    yield from _token_advantages(objective)
    if objective.advantage == "vtrace":
        yield from _weighed_twice(objective)
    elif objective.critic.value_clip is not None and num_minibatches == 1:
        text = (
            f"objective.critic.value_clip = {objective.critic.value_clip:g} with "
            "learner.num_minibatches = 1: the only update starts from the values themselves, so "
            "nothing would be clipped; remove it or use more minibatches"
        )
        yield ("objective.critic.value_clip", "learner.num_minibatches"), text


def _unread(objective: ObjectiveConfig) -> Iterator[Refusal]:
    """Refuse options of another estimator."""
    match objective.advantage:
        case "gae":
            names = _changed(objective.critic, _OF_VTRACE)
        case "vtrace":
            names = _changed(objective.critic, _OF_GAE)
        case _:
            names = _changed(objective.critic, tuple(CriticConfig.model_fields))
    if names:
        keys = tuple(f"objective.critic.{name}" for name in names)
        text = (
            f'{", ".join(keys)} with objective.advantage = "{objective.advantage}": nothing reads '
            "it; remove it or use the advantage that it belongs to"
        )
        yield (*keys, "objective.advantage"), text


def _changed(critic: CriticConfig, names: Sequence[str]) -> list[str]:
    plain = CriticConfig()
    return [name for name in names if getattr(critic, name) != getattr(plain, name)]


def _token_advantages(objective: ObjectiveConfig) -> Iterator[Refusal]:
    """Refuse what needs one advantage for a whole rollout."""
    advantage, loss = objective.advantage, objective.loss
    is_whole = isinstance(loss, GmpoLoss) or (
        isinstance(loss, GspoLoss) and loss.level == "sequence"
    )
    if is_whole:
        text = (
            f'objective.loss = "{loss.type}" with objective.advantage = "{advantage}": its ratio '
            "is of a whole rollout and a critic's advantages are of tokens; use "
            'objective.loss = "ppo_clip"'
        )
        yield ("objective.loss", "objective.advantage"), text
    if objective.correction.off_policy_mask is not None:
        text = (
            f'objective.correction.off_policy_mask with objective.advantage = "{advantage}": it '
            "goes by the sign of a rollout's advantage, and a critic's differ from token to token; "
            "remove it"
        )
        yield ("objective.correction.off_policy_mask", "objective.advantage"), text


def _weighed_twice(objective: ObjectiveConfig) -> Iterator[Refusal]:
    """V-trace's advantages hold the weight against the generator already."""
    held = 'objective.advantage = "vtrace"'
    if not isinstance(objective.loss, ReinforceLoss):
        text = (
            f'{held} with objective.loss = "{objective.loss.type}": its advantages hold the weight '
            "e^(q - mu) already, and a ratio would count it twice; use "
            'objective.loss = "reinforce" or objective.advantage = "gae"'
        )
        yield ("objective.advantage", "objective.loss"), text
    if objective.correction.compares_proximal:
        text = (
            f"{held} with objective.correction: its advantages hold the weight e^(q - mu) already; "
            'set objective.correction = "none"'
        )
        yield ("objective.advantage", "objective.correction"), text
