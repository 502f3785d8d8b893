"""The learner's metrics, worked out by hand for a batch whose log-probs are made up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from headrace.learners import TorchLearner
from headrace.learners.loss import Readings
from headrace.learners.packing import Microbatch
from headrace.models.decoder import Decoder
from headrace.types import RolloutGroup


@dataclass(frozen=True)
class Token:
    """What learner and generator say of one token."""

    token_id: int
    ratio: float
    """Learner's probability over the generator's."""
    generator_logprob: float
    entropy: float

    @property
    def logprob(self) -> float:
        return self.generator_logprob + math.log(self.ratio)


# Of the rollout that was better than the other one, and of that other one.
BETTER = (Token(10, 1.5, -1.0, 0.1), Token(11, 0.5, -2.0, 0.2))
WORSE = (Token(12, 2.0, -0.5, 0.4), Token(13, 0.5, -3.0, 0.8), Token(14, 0.9, -0.7, 1.6))
# In the worse rollout too, but not the policy's own: a ratio of e^9 that must count nowhere.
FOREIGN = Token(15, math.exp(9.0), -9.5, 50.0)

MEAN_RATIO = (1.5 + 0.5 + 2.0 + 0.5 + 0.9) / 5
MEAN_ENTROPY = (0.1 + 0.2 + 0.4 + 0.8 + 1.6) / 5
# The generator sampled: E[log mu - log q] and E[q/mu - 1 - log q/mu] are its KL from the learner.
K1 = -math.log(1.5 * 0.5 * 2.0 * 0.5 * 0.9) / 5
K3 = MEAN_RATIO - 1 + K1


def say(learner: TorchLearner) -> Callable[[Decoder, Microbatch], Readings]:
    """Return a stand-in for the forward pass that says what the tokens above say.

    The log-probs hang on the weights by a zero, so that there is something to differentiate.
    """
    known = {token.token_id: token for token in (*BETTER, *WORSE, FOREIGN)}

    def read(decoder: Decoder, batch: Microbatch) -> Readings:
        assert decoder is learner._decoder
        tokens = [known[token_id] for token_id in batch.target_ids.tolist()]
        said = torch.tensor([token.logprob for token in tokens])
        zero = 0.0 * decoder.output_weight.sum()
        entropy = torch.tensor([token.entropy for token in tokens])
        return Readings(logprobs=said + zero, entropy=entropy, values=None)

    return read


@pytest.fixture
def groups(make_group: Callable[..., RolloutGroup]) -> list[RolloutGroup]:
    """One group with something to learn, its third rollout not scored, and one without."""
    worse = (WORSE[0], FOREIGN, *WORSE[1:])
    rollouts = (BETTER, worse, (FOREIGN,))
    taught = make_group(
        [1, 2],
        [[token.token_id for token in tokens] for tokens in rollouts],
        [1.0, 0.25, None],
        masks=[[True, True], [True, False, True, True], [True]],
        logprobs=[[token.generator_logprob for token in tokens] for tokens in rollouts],
        group_id="0/taught",
    )
    flat = make_group([1, 2, 3], [[15], [15]], [0.9, 0.9], group_id="0/flat")
    return [taught, flat]


@pytest.fixture
def measure(
    groups: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., dict[str, float]]:
    """Settings -> the metrics of one step on ``groups``."""

    def make(**settings: object) -> dict[str, float]:
        learner = make_learner(objective__advantage="dr_grpo", **settings)
        monkeypatch.setattr(learner, "_read", say(learner))
        return dict(asyncio.run(learner.step(groups)).metrics)

    return make


BUDGETS = pytest.mark.parametrize("budget", [1, 16384], ids=["split", "whole"])


@BUDGETS
def test_the_mismatch_is_the_generators_divergence_from_the_learner(
    measure: Callable[..., dict[str, float]], budget: int
) -> None:
    metrics = measure(learner__max_tokens_per_microbatch=budget)

    assert K1 > 0.05, "or a sign would not show"
    assert metrics["learner/mismatch/k1"] == pytest.approx(K1, abs=1e-6)
    assert metrics["learner/mismatch/k3"] == pytest.approx(K3, abs=1e-6)


@BUDGETS
def test_ratio_clip_and_entropy_are_over_the_trained_tokens_alone(
    measure: Callable[..., dict[str, float]], budget: int
) -> None:
    metrics = measure(learner__max_tokens_per_microbatch=budget)

    assert metrics["learner/tokens/num_trained"] == 5
    assert metrics["learner/entropy/mean"] == pytest.approx(MEAN_ENTROPY, abs=1e-6)
    assert metrics["learner/importance_ratio/mean"] == pytest.approx(MEAN_RATIO, abs=1e-6)
    assert metrics["learner/importance_ratio/max"] == pytest.approx(2.0, abs=1e-6)
    # The better rollout's 1.5 is too high and the worse one's 0.5 too low; 2.0 and the other 0.5
    # go against their advantage and are not clipped.
    assert metrics["learner/clip/share"] == pytest.approx(2 / 5, abs=1e-6)


def test_the_bounds_of_the_clip_are_each_its_own(
    measure: Callable[..., dict[str, float]],
) -> None:
    wide_above = measure(objective__loss={"type": "ppo_clip", "clip_low": 0.05, "clip_high": 0.6})
    wide_below = measure(objective__loss={"type": "ppo_clip", "clip_low": 0.6, "clip_high": 0.2})

    assert wide_above["learner/clip/share"] == pytest.approx(2 / 5), "0.5 and 0.9 of the worse one"
    assert wide_below["learner/clip/share"] == pytest.approx(1 / 5), "1.5 of the better one"


def test_with_recompute_the_ratio_is_1_and_the_mismatch_is_still_the_generators(
    measure: Callable[..., dict[str, float]],
) -> None:
    metrics = measure(objective__proximal="recompute")

    assert metrics["learner/importance_ratio/mean"] == 1.0
    assert metrics["learner/importance_ratio/max"] == 1.0
    assert metrics["learner/clip/share"] == 0.0
    assert metrics["learner/mismatch/k1"] == pytest.approx(K1, abs=1e-6)
    assert metrics["learner/mismatch/k3"] == pytest.approx(K3, abs=1e-6)


@BUDGETS
def test_the_weights_are_described_as_they_were_applied_to_the_trained_tokens(
    measure: Callable[..., dict[str, float]], budget: int
) -> None:
    metrics = measure(
        objective__proximal="recompute",
        objective__correction={"weight": {"level": "token", "mode": "truncate", "high": 1.75}},
        learner__max_tokens_per_microbatch=budget,
    )

    # 2.0 is above the bound. It is in the first micro-batch; the last one's largest is 1.5.
    weights = (1.5, 0.5, 1.75, 0.5, 0.9)
    effective = sum(weights) ** 2 / (5 * sum(weight**2 for weight in weights))
    assert metrics["learner/importance_weight/mean"] == pytest.approx(sum(weights) / 5, abs=1e-6)
    assert metrics["learner/importance_weight/max"] == 1.75
    assert metrics["learner/importance_weight/truncated_share"] == pytest.approx(1 / 5)
    assert metrics["learner/importance_weight/ess"] == pytest.approx(effective, abs=1e-6)
    assert metrics["learner/importance_ratio/max"] == 1.0, "the ratio is to the learner's own"


def test_without_a_correction_there_are_no_weights_to_describe(
    measure: Callable[..., dict[str, float]],
) -> None:
    metrics = measure(objective__proximal="recompute")

    assert not [name for name in metrics if "importance_weight" in name]


def test_the_trained_reward_is_the_mean_of_the_rollouts_that_were_trained_on(
    measure: Callable[..., dict[str, float]],
) -> None:
    metrics = measure()

    # Neither the rollout without a verdict nor the group without a spread.
    assert metrics["learner/reward/trained_mean"] == pytest.approx((1.0 + 0.25) / 2)
    assert metrics["learner/groups/num_trained"] == 1
    assert metrics["learner/groups/num_no_spread"] == 1
