"""Every option of the objective changes the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from objective_lab import (
    CORRECTION,
    LOSS,
    RECOMPUTE,
    STALE_TIS,
    MakeLearner,
    Settings,
    difference,
    outcome,
    prepared,
    rejection,
    stale,
    weight,
)

from headrace.config import ObjectiveConfig, RunConfig
from headrace.config.schema import all_keys
from headrace.types import RolloutGroup

# --- every option -----------------------------------------------------------------------------


def pairs(
    key: str, base: Settings, path: str, values: Sequence[object]
) -> Iterator[tuple[str, Settings, Settings]]:
    """Yield ``base`` with the first value at ``path`` against it with each other one."""
    for value in values[1:]:
        yield key, {**base, path: values[0]}, {**base, path: value}


def table(kind: str, **options: object) -> dict[str, object]:
    return {"type": kind, **options}


ADVANTAGE, CRITIC = "objective__advantage", "objective__critic"
GAE: Settings = {ADVANTAGE: "gae"}
IMPALA: Settings = {ADVANTAGE: "vtrace", LOSS: "reinforce"}
OF_SEVERAL_UPDATES = {"critic.value_clip", "critic.learning_rate_factor"}
"""What does nothing to the gradient of a single update; the tests of the critic have them."""

OPTIONS: list[tuple[str, Settings, Settings]] = [
    *pairs(
        "advantage",
        {},
        "objective__advantage",
        (
            "grpo",
            "dr_grpo",
            "rloo",
            "rloo_std",
            "opo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "gae",
        ),
    ),
    *pairs("advantage", {LOSS: "reinforce", "max_staleness": 0}, ADVANTAGE, ("gae", "vtrace")),
    *pairs("critic", GAE, CRITIC, ({}, {"gamma": 0.8})),
    *pairs("critic.gamma", GAE, CRITIC, ({}, {"gamma": 0.8})),
    *pairs("critic.gae_lambda", GAE, CRITIC, ({}, {"gae_lambda": 0.3})),
    *pairs("critic.rho_bar", IMPALA, CRITIC, ({}, {"rho_bar": 2.0})),
    *pairs("critic.c_bar", IMPALA, CRITIC, ({}, {"c_bar": 0.1})),
    *pairs("critic.rho_pg_bar", IMPALA, CRITIC, ({}, {"rho_pg_bar": 0.5})),
    *pairs("critic.value_coefficient", GAE, CRITIC, ({}, {"value_coefficient": 3.0})),
    *pairs("overlong", {}, "objective__overlong", (None, {"buffer_tokens": 12})),
    *pairs(
        "overlong.buffer_tokens",
        {},
        "objective__overlong",
        ({"buffer_tokens": 12}, {"buffer_tokens": 16}),
    ),
    *pairs(
        "overlong.penalty",
        {},
        "objective__overlong",
        ({"buffer_tokens": 12}, {"buffer_tokens": 12, "penalty": 2.0}),
    ),
    *pairs(
        "loss.type",
        {},
        LOSS,
        ("ppo_clip", "reinforce", "cispo", "gspo", "gmpo", "sapo", "dppo_tv", "prime"),
    ),
    *pairs("loss.clip_low", {}, LOSS, ("ppo_clip", table("ppo_clip", clip_low=0.5))),
    *pairs("loss.clip_high", {}, LOSS, ("ppo_clip", table("ppo_clip", clip_high=0.9))),
    *pairs("loss.dual_clip", {}, LOSS, ("ppo_clip", table("ppo_clip", dual_clip=1.1))),
    *pairs("loss.clip_low", {}, LOSS, ("gspo", table("gspo", clip_low=0.9))),
    *pairs("loss.clip_high", {}, LOSS, ("gspo", table("gspo", clip_high=3.0))),
    *pairs("loss.clip_low", {}, LOSS, ("gmpo", table("gmpo", clip_low=0.1))),
    *pairs("loss.clip_high", {}, LOSS, ("gmpo", table("gmpo", clip_high=0.1))),
    *pairs("loss.min_ratio", {}, LOSS, ("cispo", table("cispo", min_ratio=0.9))),
    *pairs("loss.max_ratio", {}, LOSS, ("cispo", table("cispo", max_ratio=1.1))),
    *pairs("loss.tau_positive", {}, LOSS, ("sapo", table("sapo", tau_positive=2.0))),
    *pairs("loss.tau_negative", {}, LOSS, ("sapo", table("sapo", tau_negative=2.0))),
    *pairs("loss.delta", {}, LOSS, ("dppo_tv", table("dppo_tv", delta=0.001))),
    *pairs("loss.anchor", {}, LOSS, ("dppo_tv", table("dppo_tv", anchor=0.1))),
    *pairs(
        "loss.level", {**RECOMPUTE, CORRECTION: "tis"}, LOSS, ("gspo", table("gspo", level="token"))
    ),
    *pairs(
        "proximal",
        {"max_staleness": 0},
        "objective__proximal",
        ("generator", "recompute"),
    ),
    *pairs("proximal", STALE_TIS, "objective__proximal", ("recompute", "loglinear")),
    *pairs(
        "correction",
        RECOMPUTE,
        CORRECTION,
        ("none", "tis", "seq_tis", "seq_mis", "geo_rs", "icepop", "trl"),
    ),
    *pairs("correction.weight", RECOMPUTE, CORRECTION, ({}, weight())),
    *pairs(
        "correction.weight.level",
        RECOMPUTE,
        CORRECTION,
        (weight(), weight("sequence"), weight("geometric")),
    ),
    *pairs(
        "correction.weight.mode",
        RECOMPUTE,
        CORRECTION,
        (weight(high=1.2), weight(mode="clip", low=0.9, high=1.2), weight(mode="mask", high=1.2)),
    ),
    *pairs(
        "correction.weight.low",
        RECOMPUTE,
        CORRECTION,
        (weight(mode="clip", low=0.5), weight(mode="clip", low=0.9)),
    ),
    *pairs("correction.weight.high", RECOMPUTE, CORRECTION, (weight(), weight(high=1.1))),
    *pairs("correction.rejection", RECOMPUTE, CORRECTION, ({}, rejection())),
    *pairs(
        "correction.rejection.divergence",
        RECOMPUTE,
        CORRECTION,
        (
            rejection(low=None, high=1.2, reduction="sum"),
            rejection("k2", low=None, high=1.2, reduction="sum"),
        ),
    ),
    *pairs(
        "correction.rejection.divergence",
        RECOMPUTE,
        CORRECTION,
        (
            rejection("k2", low=None, high=0.7),
            rejection("k3", low=None, high=0.7),
        ),
    ),
    *pairs(
        "correction.rejection.reduction",
        RECOMPUTE,
        CORRECTION,
        (rejection("k3", "mean", None, 1.0), rejection("k3", "sum", None, 1.0)),
    ),
    *pairs(
        "correction.rejection.reduction",
        RECOMPUTE,
        CORRECTION,
        (rejection("k3", "mean", None, 1.0), rejection("k3", "max", None, 1.0)),
    ),
    *pairs("correction.rejection.low", RECOMPUTE, CORRECTION, (rejection(), rejection(low=0.99))),
    *pairs("correction.rejection.high", RECOMPUTE, CORRECTION, (rejection(), rejection(high=9.0))),
    *pairs("correction.veto", RECOMPUTE, CORRECTION, ({}, {"veto": 0.3})),
    *pairs("correction.off_policy_mask", {}, CORRECTION, ({}, {"off_policy_mask": 0.1})),
    *pairs("correction.m2po", RECOMPUTE, CORRECTION, ({}, {"m2po": 0.2})),
    *pairs(
        "correction.count_rejected",
        RECOMPUTE,
        CORRECTION,
        (weight(mode="mask", high=1.2), {**weight(mode="mask", high=1.2), "count_rejected": False}),
    ),
    *pairs("aggregation", {}, "objective__aggregation", ("token", "sequence", "constant")),
    *pairs("kl_coefficient", {}, "objective__kl_coefficient", (0.0, 0.1)),
    *pairs(
        "kl_estimator",
        {"objective__kl_coefficient": 0.1},
        "objective__kl_estimator",
        ("k3", "k2", "k1_reward"),
    ),
    *pairs("entropy_coefficient", {}, "objective__entropy_coefficient", (0.0, 0.1)),
]


def test_the_walk_below_visits_every_option_of_the_objective() -> None:
    every = {".".join(path) for path in all_keys(ObjectiveConfig)}
    assert {key for key, _, _ in OPTIONS} | {"loss"} | OF_SEVERAL_UPDATES == every


@pytest.mark.parametrize(
    ("base", "changed"),
    [option[1:] for option in OPTIONS],
    ids=[f"{number}-{key}" for number, (key, _, _) in enumerate(OPTIONS)],
)
def test_changing_an_option_changes_the_gradient(
    base: Settings, changed: Settings, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    one, _ = outcome(prepared(make_learner, **base), stale(batch))
    other, _ = outcome(prepared(make_learner, **changed), stale(batch))
    if not one or not other:
        assert bool(one) != bool(other), "one of them had nothing left to learn from"
        return
    assert difference(other, one) > 1e-4
    assert all(gradient.isfinite().all() for gradient in other.values())


def test_slimes_veto_is_beside_the_weights_of_tis(make_config: Callable[..., RunConfig]) -> None:
    slime, tis = (
        make_config(objective__correction=name, **RECOMPUTE).objective.correction
        for name in ("slime_mis", "tis")
    )
    assert slime.weight == tis.weight
    assert (slime.veto, tis.veto) == (1e-4, None)
