"""Which settings of the objective cannot be meant together, and which nothing would read.

Every option of ``[objective]`` changes the loss or is refused here. Judges settings alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from headrace.config.correction import preset_of
from headrace.config.critic_rules import critic_refusals
from headrace.config.generator import SamplingConfig
from headrace.config.objective import (
    BEYOND_GROUPS,
    DppoTvLoss,
    GspoLoss,
    LossConfig,
    ObjectiveConfig,
    ReinforceLoss,
)

Refusal: TypeAlias = tuple[tuple[str, ...], str]
"""The dotted keys it rests on, and one line: keys, values, why not, and what to do."""

_LEAST_LOGLINEAR_STALENESS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSetting:
    """An objective and what it depends on elsewhere in the recipe."""

    objective: ObjectiveConfig
    sampling: SamplingConfig
    group_size: int
    groups_per_step: int
    num_minibatches: int
    max_staleness: int


def objective_refusals(setting: ObjectiveSetting) -> Iterator[Refusal]:
    """Yield what contradicts itself or would have no effect."""
    yield from _estimator(setting)
    yield from _rewards(setting)
    yield from _loss(setting)
    yield from _gspo_level(setting)
    yield from _proximal(setting)
    yield from _correction(setting)
    yield from _unweighted(setting)
    yield from _support(setting)
    yield from critic_refusals(setting.objective, setting.num_minibatches)


def correction_named(objective: ObjectiveConfig) -> str:
    """Return ``objective.correction`` as a recipe would say it."""
    name = preset_of(objective.correction)
    return f'objective.correction = "{name}"' if name else "objective.correction"


def _estimator(setting: ObjectiveSetting) -> Iterator[Refusal]:
    advantage = setting.objective.advantage
    if setting.group_size == 1 and advantage not in BEYOND_GROUPS:
        text = (
            f'group_size = 1 with objective.advantage = "{advantage}": a group of one has no '
            'spread, so nothing could be learned; use group_size >= 2, "reinforce_pp", or a '
            'critic ("gae", "vtrace")'
        )
        yield ("group_size", "objective.advantage"), text
    elif setting.group_size * setting.groups_per_step == 1:
        text = (
            "group_size = 1 with groups_per_step = 1: a batch of one rollout has no spread, so "
            "nothing could be learned; use groups_per_step >= 2"
        )
        yield ("group_size", "groups_per_step"), text
    if setting.sampling.temperature == 0.0:
        text = (
            "sampling.temperature = 0: every rollout of a group would be the same; train "
            "with a temperature above 0 (eval.greedy measures greedy decoding)"
        )
        yield ("sampling.temperature",), text


def _rewards(setting: ObjectiveSetting) -> Iterator[Refusal]:
    objective, longest = setting.objective, setting.sampling.max_tokens
    if objective.overlong is not None and objective.overlong.buffer_tokens > longest:
        text = (
            f"objective.overlong.buffer_tokens = {objective.overlong.buffer_tokens} with "
            f"sampling.max_tokens = {longest}: the punishment would begin before the first token; "
            f"use at most {longest}"
        )
        yield ("objective.overlong.buffer_tokens", "sampling.max_tokens"), text
    if objective.kl_coefficient == 0.0 and objective.kl_estimator != "k3":
        text = (
            f'objective.kl_estimator = "{objective.kl_estimator}" with objective.kl_coefficient = '
            "0: nothing reads it; remove it or set objective.kl_coefficient above 0"
        )
        yield ("objective.kl_estimator", "objective.kl_coefficient"), text


def _loss(setting: ObjectiveSetting) -> Iterator[Refusal]:
    objective, loss = setting.objective, setting.objective.loss
    if isinstance(loss, DppoTvLoss) and objective.proximal != "generator":
        text = (
            f'objective.loss = "dppo_tv" with objective.proximal = "{objective.proximal}": it '
            "compares with the generator's log-probs alone, so nothing would read others; set "
            'objective.proximal = "generator"'
        )
        yield ("objective.loss", "objective.proximal"), text
    if isinstance(loss, ReinforceLoss) and setting.num_minibatches > 1:
        text = (
            f'objective.loss = "reinforce" with learner.num_minibatches = '
            f"{setting.num_minibatches}: it has no ratio to make up for the updates inside a step; "
            'use learner.num_minibatches = 1 or objective.loss = "cispo"'
        )
        yield ("objective.loss", "learner.num_minibatches"), text
    names = _changed_options(loss)
    if names and objective.proximal == "recompute" and setting.num_minibatches == 1:
        keys = tuple(f"objective.loss.{name}" for name in names)
        text = (
            f'{", ".join(keys)} with objective.proximal = "recompute" and learner.num_minibatches '
            "= 1: every ratio is 1 when it is used, so nothing would be bounded; remove it, use "
            'more minibatches or set objective.proximal = "generator"'
        )
        yield (*keys, "objective.proximal", "learner.num_minibatches"), text


def _gspo_level(setting: ObjectiveSetting) -> Iterator[Refusal]:
    objective, weight = setting.objective, setting.objective.correction.weight
    loss, is_split = objective.loss, weight is not None and weight.level == "token"
    is_split = is_split or objective.has_critic
    if isinstance(loss, GspoLoss) and loss.level == "token" and not is_split:
        text = (
            f'objective.loss.level = "token" with {correction_named(objective)}: where all '
            'tokens of a rollout count alike it has the gradient of "sequence"; remove it or '
            'give a correction with weights of level "token", or a critic\'s advantages'
        )
        yield ("objective.loss.level", "objective.correction"), text


def _changed_options(loss: LossConfig) -> list[str]:
    """Return the options of ``loss`` that are not its defaults and bound a ratio to p."""
    if isinstance(loss, DppoTvLoss):
        return []
    plain = type(loss).model_validate({"type": loss.type})
    bounds = [name for name in type(loss).model_fields if name != "level"]
    return [name for name in bounds if getattr(loss, name) != getattr(plain, name)]


def _proximal(setting: ObjectiveSetting) -> Iterator[Refusal]:
    objective, bound = setting.objective, setting.max_staleness
    is_read = (
        not isinstance(objective.loss, ReinforceLoss) or objective.correction.compares_proximal
    )
    if objective.proximal != "generator" and not is_read:
        text = (
            f'objective.proximal = "{objective.proximal}" with objective.loss = "reinforce" and '
            f"{correction_named(objective)}: there is no ratio and no weight that reads it; set "
            'objective.proximal = "generator" or objective.correction = "tis"'
        )
        yield ("objective.proximal", "objective.loss", "objective.correction"), text
    if objective.proximal == "loglinear" and bound < _LEAST_LOGLINEAR_STALENESS:
        text = (
            f'objective.proximal = "loglinear" with max_staleness = {bound}: where a token is at '
            "most one version old it is the generator's log-prob; give max_staleness >= 2 or "
            'objective.proximal = "generator"'
        )
        yield ("objective.proximal", "max_staleness"), text


def _correction(setting: ObjectiveSetting) -> Iterator[Refusal]:
    objective, correction = setting.objective, setting.objective.correction
    named = correction_named(objective)
    if correction.compares_proximal and objective.proximal == "generator":
        text = (
            f'{named} with objective.proximal = "generator": the proximal log-probs would be the '
            "generator's own, every weight 1 and nothing rejected; set "
            'objective.proximal = "recompute" or objective.correction = "none"'
        )
        yield ("objective.correction", "objective.proximal"), text
    if correction.m2po is not None and objective.proximal == "loglinear":
        text = (
            'objective.correction.m2po with objective.proximal = "loglinear": it chooses among all '
            "tokens of a minibatch, whose proximal log-probs must be known before; set "
            'objective.proximal = "recompute"'
        )
        yield ("objective.correction.m2po", "objective.proximal"), text
    if not correction.count_rejected and not correction.rejects:
        text = (
            "objective.correction.count_rejected = false: nothing is rejected, so nothing reads "
            "it; remove it or give a rejection, a veto or a weight that masks"
        )
        yield ("objective.correction.count_rejected",), text


def _unweighted(setting: ObjectiveSetting) -> Iterator[Refusal]:
    """Refuse rollouts of older policies where nothing weighs them against who sampled them."""
    objective, bound = setting.objective, setting.max_staleness
    if objective.correction.bounds_gap:
        return
    within = setting.num_minibatches - 1
    named = correction_named(objective)
    old = (
        "rollouts of older policies would be trained on as if they were new, since nothing weighs "
        'them against the policy that sampled them; set objective.correction = "tis"'
    )
    if objective.proximal != "generator" and bound > within:
        text = (
            f'objective.proximal = "{objective.proximal}" and {named} with max_staleness = {bound} '
            f"and learner.num_minibatches = {setting.num_minibatches}: {old}, max_staleness = "
            f'{within} or objective.proximal = "generator"'
        )
        yield (
            (
                "objective.proximal",
                "objective.correction",
                "max_staleness",
                "learner.num_minibatches",
            ),
            text,
        )
    elif isinstance(objective.loss, ReinforceLoss) and bound > 0 and not weighs_itself(objective):
        text = (
            f'objective.loss = "reinforce" and {named} with max_staleness = {bound}: {old} and '
            'objective.proximal = "recompute", or max_staleness = 0'
        )
        yield ("objective.loss", "objective.correction", "max_staleness"), text


def _support(setting: ObjectiveSetting) -> Iterator[Refusal]:
    """Say which settings leave the generator fewer tokens than the learner sums over.

    That biases whatever compares the two: a ratio to the generator's log-probs, or a weight. Where
    the kept tokens are recorded the learner sums over them, and nothing is biased.
    """
    objective, sampling = setting.objective, setting.sampling
    compared = _compared_with_generator(objective)
    if compared is None or sampling.kept_support:
        return
    what, option, named, instead = compared
    filters, masks = ("top_p", "top_k", "min_p"), ("allowed_token_ids", "banned_token_ids")
    params = sampling.params(())
    biased = (
        f"with {named}: the learner's log-probs cover the whole vocabulary and the generator's "
        f"only the tokens that could be sampled, so the {what} would be biased; "
    )
    ways = f'objective.{option} = "{instead}"'
    # Without a model its end-of-sequence ids are not known, and min_tokens is there to ban them.
    for names, is_on, way in (
        (filters, params.truncates, f"set sampling.kept_support = true or {ways}"),
        (
            ("min_tokens", *masks),
            params.masks or params.min_tokens > 0,
            f"sample without them or set {ways}",
        ),
    ):
        if is_on:
            keys = tuple(f"sampling.{name}" for name in names)
            yield (*keys, f"objective.{option}"), f"sampling.{', '.join(names)} {biased}{way}"


def weighs_itself(objective: ObjectiveConfig) -> bool:
    """Whether the advantages hold the weight against the policy that sampled."""
    return objective.advantage == "vtrace"


def _compared_with_generator(objective: ObjectiveConfig) -> tuple[str, str, str, str] | None:
    """Return what compares the learner with the generator, the key, how it is said, and instead."""
    correction = objective.correction
    if correction.compares_proximal or correction.off_policy_mask is not None:
        return "weights", "correction", correction_named(objective), "none"
    if weighs_itself(objective):
        return "weights", "advantage", 'objective.advantage = "vtrace"', "gae"
    if objective.kl_coefficient > 0 and objective.kl_estimator == "k1_reward":
        return "KL", "kl_estimator", 'objective.kl_estimator = "k1_reward"', "k3"
    if objective.proximal == "recompute" or isinstance(objective.loss, ReinforceLoss):
        return None
    return "ratio", "proximal", f'objective.proximal = "{objective.proximal}"', "recompute"
