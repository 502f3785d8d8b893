"""The loss of a micro-batch against loops over scalars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from objective_lab import CORRECTION, LOSS, RECOMPUTE, MakeLearner, Settings, rejection, weight
from torch import Tensor

from headrace.config import ObjectiveConfig, RunConfig
from headrace.learners.loss import LossSetting, microbatch_loss
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Microbatch
from headrace.learners.selection import TrainingRow
from headrace.types import RolloutGroup

# --- the loss of a micro-batch, literally -----------------------------------------------------


def literal_objective(
    objective: ObjectiveConfig, q: Sequence[Tensor], p: Sequence[float], advantage: float, t: int
) -> Tensor:
    """One token's objective in scalars; q, p: of its rollout's tokens that are not rejected."""
    loss: Any = objective.loss
    gaps = [one - other for one, other in zip(q, p, strict=True)]
    ratio = gaps[t].exp()
    match loss.type:
        case "ppo_clip":
            bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            return torch.minimum(ratio * advantage, bounded * advantage)
        case "reinforce":
            return q[t] * advantage
        case "cispo":
            return ratio.detach().clamp(loss.min_ratio, loss.max_ratio) * advantage * q[t]
        case "gspo" | "gmpo":
            return literal_sequence(loss, gaps, advantage)
        case "sapo":
            tau = loss.tau_positive if advantage > 0 else loss.tau_negative
            return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
        case _:
            moved = q[t].exp().item() - math.exp(p[t])
            beyond = moved > loss.delta if advantage > 0 else moved < -loss.delta
            kept = 0.0 * ratio if beyond else ratio * advantage
            return kept - loss.anchor * gaps[t] ** 2


def literal_sequence(loss: Any, gaps: Sequence[Tensor], advantage: float) -> Tensor:  # noqa: ANN401
    if loss.type == "gspo":
        ratio = torch.stack([*gaps]).mean().exp()
        bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        return torch.minimum(ratio * advantage, bounded * advantage)
    low, high = -loss.clip_low, loss.clip_high
    clipped = [gap.clamp(max=high) if advantage > 0 else gap.clamp(min=low) for gap in gaps]
    return torch.stack(clipped).mean().exp() * advantage


def literal_rejections(
    objective: ObjectiveConfig, gaps: Sequence[float], advantage: float, moved: Sequence[float]
) -> list[bool]:
    """Whether each token of a rollout is rejected; ``gaps``: p - mu, ``moved``: mu - q."""
    rules, count = objective.correction, len(gaps)
    whole = False
    if rules.rejection is not None:
        ratio = math.exp(sum(gaps) / count)
        whole = not (rules.rejection.low or 0.0) <= ratio <= rules.rejection.high
    if rules.veto is not None:
        whole = whole or any(math.exp(gap) < rules.veto for gap in gaps)
    if rules.off_policy_mask is not None:
        whole = whole or (advantage < 0 and sum(moved) / count > rules.off_policy_mask)
    found = [whole] * count
    if rules.weight is not None and rules.weight.mode == "mask":
        for t, value in enumerate(literal_weights(objective, gaps)):
            outside = not (rules.weight.low or 0.0) <= value <= rules.weight.high
            found[t] = found[t] or outside
    return found


def literal_weights(objective: ObjectiveConfig, gaps: Sequence[float]) -> list[float]:
    """Unbounded importance weights of a rollout's tokens."""
    rule = objective.correction.weight
    if rule is None:
        return [1.0] * len(gaps)
    total = sum(gaps)
    exponents = {
        "token": gaps,
        "sequence": [total] * len(gaps),
        "geometric": [total / len(gaps)] * len(gaps),
    }[rule.level]
    return [math.exp(exponent) for exponent in exponents]


def bounded_weight(objective: ObjectiveConfig, value: float) -> float:
    rule = objective.correction.weight
    if rule is None or rule.mode == "mask":
        return value
    return max(rule.low or 0.0, min(value, rule.high))


class Literal:
    """The loss of a whole batch of rows, in loops over scalars."""

    def __init__(
        self, objective: ObjectiveConfig, rows: Sequence[TrainingRow], q: Sequence[list[Tensor]]
    ) -> None:
        self.objective, self.rows, self.q = objective, rows, q
        self.mu = [[row.rollout.generator_logprobs[t] for t in row.trained] for row in rows]
        own = [[value.item() for value in values] for values in q]
        self.p = self.mu if objective.proximal == "generator" else own
        self.gaps = [
            [p - mu for p, mu in zip(ps, mus, strict=True)]
            for ps, mus in zip(self.p, self.mu, strict=True)
        ]
        self.rejected = [
            literal_rejections(
                objective,
                gaps,
                row.advantage,
                [mu - value for mu, value in zip(mus, values, strict=True)],
            )
            for row, gaps, mus, values in zip(rows, self.gaps, self.mu, own, strict=True)
        ]

    def loss(
        self, reference: Sequence[list[float]], entropy: Sequence[list[Tensor]], max_tokens: int
    ) -> Tensor:
        objective = self.objective
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(self.rows)):
            kept = [t for t, gone in enumerate(self.rejected[row]) if not gone]
            raw = literal_weights(objective, self.gaps[row])
            for place, t in enumerate(kept):
                q, ref = self.q[row][t], reference[row][t]
                value = bounded_weight(objective, raw[t]) * literal_objective(
                    objective,
                    [self.q[row][k] for k in kept],
                    [self.p[row][k] for k in kept],
                    self.rows[row].advantage,
                    place,
                )
                if objective.kl_in_loss:
                    k2 = (q - ref) ** 2 / 2
                    k3 = (ref - q).exp() - 1 - (ref - q)
                    kl = k2 if objective.kl_estimator == "k2" else k3
                    value = value - objective.kl_coefficient * kl
                value = value + objective.entropy_coefficient * entropy[row][t]
                total = total - value / self.denominator(row, max_tokens)
        return total

    def denominator(self, row: int, max_tokens: int) -> int:
        """What a token of this row is divided by."""
        counts = [len(flags) for flags in self.rejected]
        if not self.objective.correction.count_rejected:
            counts = [sum(not flag for flag in flags) for flags in self.rejected]
        num_rows = sum(count > 0 for count in counts)
        return {
            "token": sum(counts),
            "sequence": num_rows * counts[row],
            "constant": num_rows * max_tokens,
        }[self.objective.aggregation]


COMBINATIONS: list[Settings] = [
    *({LOSS: loss} for loss in ("ppo_clip", "gspo", "gmpo", "sapo", "cispo", "prime")),
    {LOSS: "reinforce", CORRECTION: {"off_policy_mask": 0.02}},
    {CORRECTION: {"off_policy_mask": 0.02, "count_rejected": False}},
    {**RECOMPUTE, CORRECTION: {**weight("token", "mask", 0.9, 1.1), "off_policy_mask": 0.02}},
    *(
        {**RECOMPUTE, LOSS: loss, CORRECTION: correction}
        for loss, correction in itertools.product(
            ("ppo_clip", "gspo", "reinforce"),
            (
                weight(mode="clip", low=0.9, high=1.1),
                weight("geometric", "mask", 0.95, 1.05),
                {**rejection(low=0.97, high=1.02), **weight("sequence"), "veto": 0.8},
                {**weight("token", "mask", 0.9, 1.1), "count_rejected": False},
                {**rejection(low=0.97, high=1.02), "count_rejected": False},
            ),
        )
    ),
]


@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_the_loss_and_its_gradient_are_those_of_the_literal_loop(
    settings: Settings,
    aggregation: str,
    kl: str,
    batch: list[RolloutGroup],
    make_config: Callable[..., RunConfig],
    make_learner: MakeLearner,
) -> None:
    shared = {
        "objective__aggregation": aggregation,
        "objective__kl_coefficient": 0.2,
        "objective__kl_estimator": kl,
        "objective__entropy_coefficient": 0.3,
    }
    learner = make_learner(**shared, **settings)
    objective = make_config(**shared, **settings).objective
    (part,) = learner._plan(learner._score(batch, LossSums())).batches
    draw = torch.Generator().manual_seed(2)
    count = len(part.target_ids)
    noise = [0.08 * torch.randn(count, generator=draw, dtype=torch.float64) for _ in range(2)]
    as_double(part)
    q = (part.generator_logprobs + noise[0]).requires_grad_()
    reference = part.generator_logprobs + noise[1]
    entropy = torch.rand(count, generator=draw, dtype=torch.float64).requires_grad_()

    sizes = [len(row.trained) for row in part.rows]
    literal = Literal(objective, part.rows, [list(v) for v in torch.split(q, sizes)])
    expected = literal.loss(
        [v.tolist() for v in torch.split(reference, sizes)],
        [list(v) for v in torch.split(entropy, sizes)],
        16,
    )
    setting = LossSetting(objective=objective, max_tokens=16, policy_version=0)
    loss, sums = microbatch_loss(part, q, entropy, setting, reference)
    loss = loss / (1.0 - sums["rejected_share"])
    num_rejected = sum(map(sum, literal.rejected))

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    found = torch.autograd.grad(loss, (q, entropy))
    wanted = torch.autograd.grad(expected, (q, entropy))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)
    assert count - sums["tokens"] == num_rejected
    assert bool(num_rejected) == objective.correction.rejects, "or nothing was tried"


def as_double(part: Microbatch) -> None:
    for name in ("generator_logprobs", "advantages", "weights"):
        setattr(part, name, getattr(part, name).double())
    # As in the records, which hold more digits than the packed tensors.
    said = [row.rollout.generator_logprobs[t] for row in part.rows for t in row.trained]
    part.generator_logprobs = torch.tensor(said, dtype=torch.float64)
