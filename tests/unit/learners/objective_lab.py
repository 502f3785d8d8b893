"""Settings of objectives, and a step of the learner that moves nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.learners import TorchLearner
from headrace.learners.optimizer import UpdateOutcome
from headrace.types import RolloutGroup, VersionSpan

MakeLearner = Callable[..., TorchLearner]
MakeGroup = Callable[..., RolloutGroup]
Gradient = Mapping[str, Tensor]

VERSION = 4
"""Of the learner; the batch's tokens are of versions 0 to 4."""


def weight(
    level: str = "token", mode: str = "truncate", low: float | None = None, high: float = 2.0
) -> dict[str, Any]:
    return {"weight": {"level": level, "mode": mode, "low": low, "high": high}}


def rejection(
    divergence: str = "k1",
    reduction: str = "mean",
    low: float | None = 0.4,
    high: float = 1.05,
) -> dict[str, Any]:
    table = {"divergence": divergence, "reduction": reduction, "low": low, "high": high}
    return {"rejection": table}


def stale(batch: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the batch with a token of each version after the other."""

    def aged(group: RolloutGroup) -> RolloutGroup:
        rollouts = tuple(
            dataclasses.replace(
                rollout,
                version_spans=tuple(
                    VersionSpan(policy_version=place % 5, start=place, end=place + 1)
                    for place in range(len(rollout.completion_ids))
                ),
            )
            for rollout in group.rollouts
        )
        return dataclasses.replace(group, rollouts=rollouts)

    return [aged(group) for group in batch]


def prepared(make_learner: MakeLearner, **settings: object) -> TorchLearner:
    """Return a learner that has left its start, or a KL to it would be 0."""
    learner = make_learner(**settings)
    learner._counters.policy_version = VERSION
    with torch.no_grad():
        for parameter in learner._decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.05)
    return taught(learner)


def taught(learner: TorchLearner) -> TorchLearner:
    """Return ``learner`` with a value head, if it has one, that is not 0 any more."""
    head = learner._head
    if head is not None:
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-0.4, 0.5, len(head.weight)))
            head.bias.fill_(0.3)
    return learner


def outcome(
    learner: TorchLearner, groups: Sequence[RolloutGroup]
) -> tuple[Gradient, Mapping[str, float]]:
    """Return the summed gradient and the metrics of a step that moves nothing."""
    total: dict[str, Tensor] = {}

    def keep() -> UpdateOutcome:
        for name, parameter in learner._decoder.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad
            parameter.grad = None
        return UpdateOutcome(applied=True, gradient_norm=1.0)

    learner._update = keep  # type: ignore[method-assign] - nothing may move
    metrics = asyncio.run(learner.step(groups)).metrics
    return total, metrics


def difference(found: Gradient, expected: Gradient) -> float:
    """L2 distance over L2 norm, all parameters together."""
    squares = [(found[n].double() - expected[n].double()).square().sum() for n in expected]
    return math.sqrt(sum(squares) / sum(expected[n].double().square().sum() for n in expected))


RECOMPUTE = {"objective__proximal": "recompute"}
STALE_TIS = {"objective__correction": "tis", "max_staleness": 6}

Settings = dict[str, object]
LOSS, CORRECTION = "objective__loss", "objective__correction"
