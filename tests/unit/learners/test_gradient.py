"""The learner's gradient against plain torch on transformers' own model, one sequence at a time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.config import PpoClipLoss, RunConfig
from headrace.learners import TorchLearner
from headrace.learners.loss import LossSetting, microbatch_loss, token_logprobs
from headrace.learners.metrics import LossSums
from headrace.learners.minibatch import Minibatch, plan_minibatch
from headrace.learners.packing import LEAST_SHARED, microbatches
from headrace.learners.selection import score, select, trained_rewards
from headrace.learners.shared_prefix import SharedPrefix
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.checkpoint import load_decoder
from headrace.models.decoder import Decoder
from headrace.types import Rollout, RolloutGroup

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TEMPERATURES = (1.0, 0.7)

if TYPE_CHECKING:
    from tests.unit.learners.conftest import PackedOrder


# --- the literal version ----------------------------------------------------------------------


def planned(learner: TorchLearner, groups: Sequence[RolloutGroup]) -> Minibatch:
    return learner._plan(learner._score(groups, LossSums()))


def literal_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], rollout: Rollout, temperature: float
) -> Tensor:
    """log-softmax(logits / temperature) of each token of one unpadded sequence."""
    ids = torch.tensor([[*prompt, *rollout.completion_ids]])
    logits = model(ids).logits[0] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    first = len(prompt)
    return torch.stack(
        [logprobs[first + t - 1, token] for t, token in enumerate(rollout.completion_ids)]
    )


def literal_advantages(rewards: Sequence[float], estimator: str) -> list[float]:
    count = len(rewards)
    if max(rewards) - min(rewards) < 1e-6:
        return [0.0] * count
    mean = sum(rewards) / count
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(count - 1, 1))
    match estimator:
        case "grpo":
            return [(reward - mean) / std for reward in rewards]
        case "dr_grpo":
            return [reward - mean for reward in rewards]
        case _:
            others = [(sum(rewards) - reward) / (count - 1) for reward in rewards]
            return [reward - other for reward, other in zip(rewards, others, strict=True)]


Logprobs = Mapping[tuple[str, int], Tensor]
"""Group id and rollout index -> log-probs [T] of its tokens."""


def all_logprobs(
    model: PreTrainedModel, groups: Sequence[RolloutGroup], temperature: float
) -> Logprobs:
    return {
        (group.group_id, rollout.rollout_index): literal_logprobs(
            model, group.prompt.token_ids, rollout, temperature
        )
        for group in groups
        for rollout in group.rollouts
        if rollout.completion_ids
    }


def literal_loss(
    policy: Logprobs, reference: Logprobs, groups: Sequence[RolloutGroup], config: RunConfig
) -> Tensor:
    objective, clip = config.objective, config.objective.loss
    assert isinstance(clip, PpoClipLoss)
    rows: list[tuple[RolloutGroup, Rollout, float]] = []
    for group in groups:
        scored = [
            (rollout, reward)
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
            if reward is not None and sum(rollout.loss_mask) > 0
        ]
        if scored:
            advantages = literal_advantages([r for _, r in scored], objective.advantage)
            rows += [(group, row, a) for (row, _), a in zip(scored, advantages, strict=True)]
    num_tokens = sum(sum(rollout.loss_mask) for _, rollout, _ in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for group, rollout, advantage in rows:
        q = policy[group.group_id, rollout.rollout_index]
        ref = reference[group.group_id, rollout.rollout_index].detach()
        mu = torch.tensor(rollout.generator_logprobs, dtype=q.dtype)
        p = mu if objective.proximal == "generator" else q.detach()
        for t, is_trained in enumerate(rollout.loss_mask):
            if not is_trained:
                continue
            ratio = torch.exp(q[t] - p[t])
            clipped = ratio.clamp(1 - clip.clip_low, 1 + clip.clip_high)
            value = torch.minimum(ratio * advantage, clipped * advantage)
            if objective.correction.weight is not None:
                weight = math.exp(float(p[t]) - float(mu[t]))
                value = min(weight, objective.correction.weight.high) * value
            kl = torch.exp(ref[t] - q[t]) - 1 - (ref[t] - q[t])
            value = value - objective.kl_coefficient * kl
            share = {
                "token": num_tokens,
                "sequence": len(rows) * sum(rollout.loss_mask),
                "constant": len(rows) * config.sampling.max_tokens,
            }[objective.aggregation]
            loss = loss - value / share
    return loss


class LiteralGradient:
    """In float64; the policy is ``factor`` times the start's matrices."""

    def __init__(self, directory: Path, groups: Sequence[RolloutGroup], factor: float) -> None:
        start = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        scale_matrices(self.model, factor)
        self.groups = groups
        # One forward pass for all the objectives of a temperature.
        with torch.no_grad():
            self.reference = {t: all_logprobs(start, groups, t) for t in TEMPERATURES}
        self.policy = {t: all_logprobs(self.model, groups, t) for t in TEMPERATURES}

    def of(self, config: RunConfig) -> dict[str, Tensor]:
        at = config.sampling.temperature
        loss = literal_loss(self.policy[at], self.reference[at], self.groups, config)
        loss.backward(retain_graph=True)
        gradient = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        return gradient


@torch.no_grad()
def scale_matrices(model: torch.nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(factor)


def learner_gradient(learner: TorchLearner, groups: Sequence[RolloutGroup]) -> dict[str, Tensor]:
    learner._accumulate(planned(learner, groups))
    gradient = {}
    for name, parameter in learner._decoder.named_parameters():
        assert parameter.grad is not None, name
        gradient[name], parameter.grad = parameter.grad, None
    return gradient


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """L2 distance over L2 norm, all parameters together."""
    assert found.keys() == expected.keys()
    squares = [(found[n].double() - expected[n].double()).square().sum() for n in expected]
    return math.sqrt(sum(squares) / sum(expected[n].double().square().sum() for n in expected))


# --- against it -------------------------------------------------------------------------------

TIS = {"weight": {"level": "token", "mode": "truncate", "high": 1.5}}
OBJECTIVES = list(
    itertools.product(
        ("grpo", "dr_grpo", "rloo"),
        ("token", "sequence", "constant"),
        (("generator", "none"), ("recompute", "none"), ("recompute", TIS)),
        (0.0, 0.1),
        TEMPERATURES,
    )
)
random.Random(0).shuffle(OBJECTIVES)  # noqa: S311 - so that every family sees every setting


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_formula_on_single_sequences_for_every_objective(
    family: str,
    batch: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
    model_directory: Callable[[str], Path],
) -> None:
    literal = LiteralGradient(model_directory(family), batch, 1.05)
    # A quarter of the objectives for each family, all of them over the four.
    for advantage, aggregation, (proximal, correction), kl, temperature in OBJECTIVES[
        FAMILIES.index(family) :: 4
    ]:
        learner = make_learner(
            family,
            objective__advantage=advantage,
            objective__aggregation=aggregation,
            objective__proximal=proximal,
            objective__correction=correction,
            objective__kl_coefficient=kl,
            sampling__temperature=temperature,
            learner__max_tokens_per_microbatch=40,
        )
        # Away from the start, or the KL term and its gradient would be 0.
        scale_matrices(learner._decoder, 1.05)
        found, expected = learner_gradient(learner, batch), literal.of(learner._config)
        assert difference(found, expected) < 1e-5, learner._config.objective


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_budget_gives_the_same_gradient(
    family: str, kl: float, batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    gradients = []
    for budget in (1, 12, 25, 60, 10_000):
        learner = make_learner(
            family, objective__kl_coefficient=kl, learner__max_tokens_per_microbatch=budget
        )
        scale_matrices(learner._decoder, 1.05)
        gradients.append(learner_gradient(learner, batch))
    assert all(difference(gradient, gradients[0]) < 2e-6 for gradient in gradients)


# --- splits in float64 ------------------------------------------------------------------------


def loss_gradient(
    decoder: Decoder, groups: Sequence[RolloutGroup], config: RunConfig, budget: int
) -> dict[str, Tensor]:
    """What the learner does, on a decoder of any dtype."""
    selection = select(
        score(groups, trained_rewards(groups), estimator=config.objective.advantage),
        aggregation=config.objective.aggregation,
        max_tokens=config.sampling.max_tokens,
        keep_no_spread=False,
    )
    for part in microbatches(selection.groups, max_tokens=budget, device=torch.device("cpu")):
        logprobs, entropy = token_logprobs(decoder, part, 0.7, torch.float64)
        setting = LossSetting(
            objective=config.objective, max_tokens=config.sampling.max_tokens, policy_version=0
        )
        loss, _ = microbatch_loss(part, logprobs, entropy, setting, None)
        loss.backward()
    gradient = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad(set_to_none=True)
    return gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_every_split_and_order_of_the_batch_gives_the_gradient_to_ten_digits(
    family: str,
    batch: list[RolloutGroup],
    model_directory: Callable[[str], Path],
    make_config: Callable[..., RunConfig],
) -> None:
    decoder = load_decoder(model_directory(family), dtype=torch.float64)
    tis = {"objective__proximal": "recompute", "objective__correction": "tis"}
    for aggregation, correction in itertools.product(("token", "sequence", "constant"), ({}, tis)):
        config = make_config(objective__aggregation=aggregation, **correction)
        whole = loss_gradient(decoder, batch, config, 10_000)
        for budget in (1, 12, 25, 60):
            assert difference(loss_gradient(decoder, batch, config, budget), whole) < 1e-10
        assert difference(loss_gradient(decoder, batch[::-1], config, 25), whole) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_what_all_prompts_begin_with_is_computed_once_and_the_gradient_is_that_of_each_group_alone(
    family: str,
    make_group: Callable[..., RolloutGroup],
    model_directory: Callable[[str], Path],
    make_config: Callable[..., RunConfig],
) -> None:
    decoder = load_decoder(model_directory(family), dtype=torch.float64)
    draw = random.Random(0)  # noqa: S311 - test tokens, not secrets
    shared = draw.choices(range(1, 60), k=LEAST_SHARED + 3)
    rests = [[first, *draw.choices(range(1, 60), k=k)] for first, k in ((1, 0), (2, 2), (3, 30))]
    completions = [draw.choices(range(1, 60), k=k) for k in (1, 4, 5, 12)]
    groups = [
        make_group([*shared, *rest], completions[: 2 + number], [1.0, 0.0, 0.5, 0.2][: 2 + number])
        for number, rest in enumerate(rests)
    ]
    config = make_config()
    (together,) = plan_minibatch(
        score(groups, trained_rewards(groups), estimator="grpo"), config, device=CPU
    ).batches
    assert together.num_shared == len(shared)
    assert len(together.input_ids) == len(shared) + sum(map(len, rests)) + sum(
        together.completion_lengths
    )
    whole = loss_gradient(decoder, groups, config, 10_000)
    for budget in (1, 60):
        assert difference(loss_gradient(decoder, groups, config, budget), whole) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_gives_the_logprobs_of_the_prompt_repeated_for_each_rollout(
    family: str,
    batch: list[RolloutGroup],
    model_directory: Callable[[str], Path],
    packed_order: PackedOrder,
) -> None:
    decoder = load_decoder(model_directory(family), dtype=torch.float64)
    selection = select(
        score(batch, trained_rewards(batch), estimator="grpo"),
        aggregation="token",
        max_tokens=16,
        keep_no_spread=True,
    )
    (part,) = microbatches(selection.groups, max_tokens=10_000, device=torch.device("cpu"))
    shared, _ = token_logprobs(decoder, part, 1.0, torch.float64)
    unshared = []
    for group, row in packed_order(selection.groups):
        ids = torch.tensor([*group.prompt_ids, *row.rollout.completion_ids])
        attention = PackedCausal([len(ids)], decoder.config.windows)
        logits = decoder.logits(decoder(ids, positions_of([len(ids)]), attention))
        for t in row.trained:
            place = len(group.prompt_ids) + t
            unshared.append(torch.log_softmax(logits[place - 1], dim=-1)[ids[place]])
    torch.testing.assert_close(shared, torch.stack(unshared), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 0.5), (1.5, 1.5), (3.0, 2.0)])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_weights_change_no_denominator(
    aggregation: str,
    factor: float,
    expected: float,
    make_group: Callable[..., RolloutGroup],
    make_learner: Callable[..., TorchLearner],
) -> None:
    settings = {"objective__aggregation": aggregation, "objective__proximal": "recompute"}
    prompt, completions, rewards = [5, 6, 7], [[1, 2, 3], [4], [2, 1]], [1.0, 0.0, 0.5]
    plain = make_learner(**settings)
    group = make_group(prompt, completions, rewards)
    (part,) = planned(plain, [group]).batches
    with torch.no_grad():
        logprobs = plain._logprobs(plain._decoder, part)
    # Packed by length; what the generator says is ``factor`` times less likely than it is.
    rows = [row.tolist() for row in (logprobs - math.log(factor)).split([3, 2, 1])]
    said = make_group(prompt, completions, rewards, logprobs=[rows[0], rows[2], rows[1]])

    found = learner_gradient(make_learner(**settings, objective__correction="tis"), [said])
    scaled = {name: expected * grad for name, grad in learner_gradient(plain, [group]).items()}
    assert difference(found, scaled) < 2e-6


def test_very_different_lengths_in_one_batch_give_the_gradient_of_each_alone(
    make_group: Callable[..., RolloutGroup],
    model_directory: Callable[[str], Path],
    make_config: Callable[..., RunConfig],
) -> None:
    def tokens(length: int, start: int) -> list[int]:
        return [2 + (start + 3 * index) % 7 for index in range(length)]

    batch = [
        make_group(tokens(12, 0), [tokens(n, n) for n in (25, 1, 2, 3)], [1.0, 0.0, 0.5, 0.0]),
        make_group(tokens(1, 1), [tokens(n, n + 1) for n in (2, 30, 1, 1)], [0.0, 1.0, 0.0, 0.0]),
        make_group(tokens(2, 2), [tokens(n, n + 2) for n in (4, 4, 4, 28)], [0.0, 0.0, 1.0, 0.0]),
    ]
    decoder = load_decoder(model_directory("llama"), dtype=torch.float64)
    config = make_config()
    selection = select(
        score(batch, trained_rewards(batch), estimator="grpo"),
        aggregation="token",
        max_tokens=32,
        keep_no_spread=True,
    )
    (part,) = microbatches(selection.groups, max_tokens=10_000, device=torch.device("cpu"))
    assert len(SharedPrefix(part, [None])._runs) >= 3
    whole = loss_gradient(decoder, batch, config, 10_000)
    assert difference(loss_gradient(decoder, batch, config, 1), whole) < 1e-10


def test_changing_one_group_leaves_the_logprobs_of_all_others_bit_for_bit(
    batch: list[RolloutGroup],
    make_group: Callable[..., RolloutGroup],
    model_directory: Callable[[str], Path],
    packed_order: PackedOrder,
) -> None:
    decoder = load_decoder(model_directory("qwen3"))
    other = make_group(
        [9] * 5,
        [[8] * len(rollout.completion_ids) for rollout in batch[0].rollouts],
        batch[0].rewards,
        masks=[rollout.loss_mask for rollout in batch[0].rollouts],
    )
    found = []
    for first in (batch[0], other):
        chosen = [first, batch[1], batch[4]]
        selection = select(
            score(chosen, trained_rewards(chosen), estimator="grpo"),
            aggregation="token",
            max_tokens=16,
            keep_no_spread=True,
        )
        (part,) = microbatches(selection.groups, max_tokens=10_000, device=torch.device("cpu"))
        logprobs, _ = token_logprobs(decoder, part, 1.0)
        order = packed_order(selection.groups)
        pieces = logprobs.split([len(row.trained) for _, row in order])
        others = [
            (group.prompt_ids, row.rollout.completion_ids, piece)
            for (group, row), piece in zip(order, pieces, strict=True)
            if group.prompt_ids != first.prompt.token_ids
        ]
        found.append(sorted(others, key=lambda item: item[:2]))
    for one, other_one in zip(*found, strict=True):
        assert one[:2] == other_one[:2]
        assert torch.equal(one[2], other_one[2])


def test_a_forced_prefix_is_trained_on_as_a_prompt_that_ends_with_it(
    make_group: Callable[..., RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    prompt, prefix, chosen = [5, 6, 7], [8, 9], [[1, 2, 3], [4], [2, 1]]
    logprobs = [[-1.0 - 0.1 * token for token in ids] for ids in chosen]
    forced = make_group(
        prompt,
        [prefix + ids for ids in chosen],
        [1.0, 0.0, 0.5],
        masks=[[False] * 2 + [True] * len(ids) for ids in chosen],
        logprobs=[[0.0, 0.0, *row] for row in logprobs],
    )
    prompted = make_group(prompt + prefix, chosen, [1.0, 0.0, 0.5], logprobs=logprobs)
    one, other = (learner_gradient(make_learner(), [group]) for group in (forced, prompted))
    assert difference(one, other) < 2e-6


def test_leaving_out_groups_without_spread_changes_nothing(
    batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    learner = make_learner()
    left_out = learner_gradient(learner, batch)
    selection = planned(learner, batch).selection
    kept = select(
        score(batch, trained_rewards(batch), estimator="grpo"),
        aggregation="token",
        max_tokens=16,
        keep_no_spread=True,
    )
    assert len(kept.groups) > len(selection.groups)
    parts = microbatches(kept.groups, max_tokens=10_000, device=torch.device("cpu"))
    learner._accumulate(Minibatch(selection=kept, batches=parts))
    computed = {name: p.grad for name, p in learner._decoder.named_parameters()}
    assert difference(left_out, computed) < 2e-6
