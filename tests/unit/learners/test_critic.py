"""The value head: its targets, its gradient, and what a step and a checkpoint make of it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_lab import (
    Gradient,
    MakeGroup,
    MakeLearner,
    difference,
    outcome,
    prepared,
    taught,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.errors import CheckpointError, NoSignalError
from headrace.learners import TorchLearner
from headrace.learners.critic import Critic
from headrace.learners.metrics import LossSums
from headrace.learners.value_head import CRITIC_FILE
from headrace.types import Rollout, RolloutGroup

GAE = {"objective__advantage": "gae"}
IMPALA = {"objective__advantage": "vtrace", "objective__loss": "reinforce"}


def head_of(learner: TorchLearner) -> Critic:
    assert learner._critic is not None
    return learner._critic


def head_gradient(learner: TorchLearner, groups: Sequence[RolloutGroup]) -> Gradient:
    """Return the gradient of policy and head of a step that moves nothing."""
    kept: dict[str, Tensor] = {}
    update = learner._update

    gradient, _ = {}, None
    original = learner._accumulate

    def keep(part: Any) -> Any:  # noqa: ANN401 - a stand-in for the same signature
        sums = original(part)
        for name, parameter in head_of(learner).head.named_parameters():
            assert parameter.grad is not None
            kept[f"head.{name}"] = kept.get(f"head.{name}", torch.zeros(())) + parameter.grad
            parameter.grad = None
        return sums

    learner._accumulate = keep  # type: ignore[method-assign] - nothing may move
    gradient, _ = outcome(learner, groups)
    learner._accumulate, learner._update = original, update  # type: ignore[method-assign]
    return {**gradient, **kept}


# --- the literal version ------------------------------------------------------------------------


@dataclasses.dataclass
class Literal:
    """One rollout, token by token, in plain Python over transformers' model."""

    logprobs: Tensor
    """[T] of all tokens, differentiable."""
    values: Tensor
    """[T] of the state before each token, differentiable."""


def literal(
    model: Any,  # noqa: ANN401 - transformers has no better type
    head: Mapping[str, Tensor],
    prompt: Sequence[int],
    rollout: Rollout,
) -> Literal:
    ids = torch.tensor([[*prompt, *rollout.completion_ids]])
    hidden = model.model(ids).last_hidden_state[0]
    logprobs = torch.log_softmax(model.lm_head(hidden), dim=-1)
    states = [len(prompt) + t - 1 for t in range(len(rollout.completion_ids))]
    return Literal(
        logprobs=torch.stack(
            [logprobs[s, i] for s, i in zip(states, rollout.completion_ids, strict=True)]
        ),
        values=torch.stack([hidden[s] @ head["weight"] + head["bias"] for s in states]),
    )


def trained(rollout: Rollout) -> list[int]:
    return [t for t, is_trained in enumerate(rollout.loss_mask) if is_trained]


def literal_gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lambda_: float
) -> list[float]:
    found = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            after = values[k + 1] if k + 1 < len(values) else 0.0
            delta = rewards[k] + gamma * after - values[k]
            total += (gamma * lambda_) ** (k - t) * delta
        found.append(total)
    return found


def literal_vtrace(
    weights: Sequence[float], rewards: Sequence[float], values: Sequence[float], gamma: float
) -> tuple[list[float], list[float]]:
    """Return targets and advantages with every bar at 1, by the sum of IMPALA's equation 1."""
    last = len(rewards)
    after = [*values[1:], 0.0]
    delta = [
        min(1.0, weights[t]) * (rewards[t] + gamma * after[t] - values[t]) for t in range(last)
    ]
    targets = [
        values[s]
        + sum(
            gamma ** (t - s) * math.prod(min(1.0, weights[i]) for i in range(s, t)) * delta[t]
            for t in range(s, last)
        )
        for s in range(last)
    ]
    later = [*targets[1:], 0.0]
    return targets, [
        min(1.0, weights[t]) * (rewards[t] + gamma * later[t] - values[t]) for t in range(last)
    ]


def literal_loss(
    model: Any,  # noqa: ANN401 - transformers has no better type
    reference: Any,  # noqa: ANN401 - as above
    head: Mapping[str, Tensor],
    groups: Sequence[RolloutGroup],
    settings: Mapping[str, Any],
) -> Tensor:
    """- sum of weight * (objective - value loss) over trained tokens, one sequence at a time."""
    scored = [
        (group.prompt.token_ids, rollout, reward)
        for group in groups
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        if reward is not None and any(rollout.loss_mask)
    ]
    count = sum(len(trained(rollout)) for _, rollout, _ in scored)
    critic = {"gamma": 1.0, "gae_lambda": 0.95, "value_coefficient": 0.5}
    critic |= settings.get("objective__critic", {})
    beta = settings.get("objective__kl_coefficient", 0.0)
    loss = torch.zeros(())
    for prompt, rollout, reward in scored:
        found, start = literal(model, head, prompt, rollout), None
        if beta:
            start = literal(reference, head, prompt, rollout).logprobs.detach()
        places = trained(rollout)
        mu = [rollout.generator_logprobs[t] for t in places]
        q, values = found.logprobs[places], found.values[places]
        rewards = [0.0] * len(places)
        rewards[-1] = reward
        if start is not None:
            rewards = [
                r - beta * (m - s)
                for r, m, s in zip(rewards, mu, start[places].tolist(), strict=True)
            ]
        numbers = values.tolist()
        if settings["objective__advantage"] == "gae":
            advantages = literal_gae(rewards, numbers, critic["gamma"], critic["gae_lambda"])
            targets = [a + v for a, v in zip(advantages, numbers, strict=True)]
        else:
            w = [math.exp(a - b) for a, b in zip(q.tolist(), mu, strict=True)]
            targets, advantages = literal_vtrace(w, rewards, numbers, critic["gamma"])
        for t in range(len(places)):
            if settings["objective__advantage"] == "gae":
                ratio = (q[t] - mu[t]).exp()
                bounded = ratio.clamp(0.8, 1.2)
                gain = torch.minimum(ratio * advantages[t], bounded * advantages[t])
            else:
                gain = advantages[t] * q[t]
            error = (values[t] - targets[t]).square() / 2
            loss = loss + (critic["value_coefficient"] * error - gain) / count
    return loss


CASES = {
    "gae": GAE,
    "gae, discounted": {
        **GAE,
        "objective__critic": {"gamma": 0.9, "gae_lambda": 0.5, "value_coefficient": 2.0},
    },
    "gae, KL in the reward": {
        **GAE,
        "objective__kl_coefficient": 0.3,
        "objective__kl_estimator": "k1_reward",
    },
    "impala": IMPALA,
    "impala, discounted": {**IMPALA, "objective__critic": {"gamma": 0.8}},
    "impala, KL in the reward": {
        **IMPALA,
        "objective__kl_coefficient": 0.3,
        "objective__kl_estimator": "k1_reward",
    },
}


@pytest.mark.parametrize("budget", [1, 20, 10_000])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_gradient_is_that_of_the_formula_on_single_sequences(
    settings: dict[str, Any],
    budget: int,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
    model_directory: Callable[[str], Path],
) -> None:
    learner = taught(prepared(make_learner, **settings, learner__max_tokens_per_microbatch=budget))
    found = head_gradient(learner, batch)

    directory = model_directory("llama")
    model, reference = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) for _ in range(2)
    )
    held = {n: p.detach().clone() for n, p in learner._decoder.named_parameters()}
    model.load_state_dict(held, strict=False)
    head = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in head_of(learner).head.named_parameters()
    }
    literal_loss(model, reference, head, batch, settings).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if name in held}
    expected |= {f"head.{name}": tensor.grad for name, tensor in head.items()}
    assert found.keys() == expected.keys()
    # Both sides in fp32, and the two terms of the loss partly cancel.
    assert difference(found, expected) < 5e-5
    of_head = {name: gradient for name, gradient in found.items() if name.startswith("head.")}
    assert difference(of_head, {name: expected[name] for name in of_head}) < 5e-5


def test_a_rejected_token_has_no_part_in_the_values_loss_either(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    settings = {
        "objective__proximal": "recompute",
        "objective__correction": {"weight": {"level": "token", "mode": "mask", "high": 1.2}},
    }
    learner = prepared(make_learner, **GAE, **settings)
    (part,) = learner._plan(learner._score(batch, LossSums())).batches
    with torch.no_grad():
        found = learner._read(learner._decoder, part)
    critique, _ = head_of(learner).judge(part, found.logprobs, found.values, None)
    kept = (found.logprobs - part.generator_logprobs).exp() <= 1.2
    assert 0 < kept.sum() < len(kept)
    errors = part.weights * (found.values - critique.targets)
    expected = 0.5 * errors[kept].sum().item()

    gradient = head_gradient(learner, batch)

    assert gradient["head.bias"].item() == pytest.approx(expected, rel=1e-4)


# --- several updates of one batch ---------------------------------------------------------------


SEVERAL = {
    "learner__num_minibatches": 2,
    "max_staleness": 1,
    "learner__optimizer__learning_rate": 0.02,
}


def test_advantages_and_targets_are_from_before_the_first_update(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner = taught(make_learner(**GAE, **SEVERAL))
    parts = [learner._plan(part) for part in _halves(learner._score(batch, LossSums()))]
    expected = []
    for part in parts:
        learner._judge_ahead(part, head_of(learner))
        expected += [batch.critique.targets for batch in part.batches if batch.critique]
    mean = float(torch.cat(expected).mean())
    metrics = asyncio.run(learner.step(batch)).metrics
    assert metrics["learner/value/target_mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["learner/importance_ratio/max"] > 1.0


def _halves(groups: Sequence[Any]) -> list[Sequence[Any]]:
    middle = len(groups) // 2
    return [groups[:middle], groups[middle:]]


def test_a_value_that_has_left_its_range_is_pulled_no_further(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    free = taught(make_learner(**GAE, **SEVERAL))
    held = taught(make_learner(**GAE, **SEVERAL, objective__critic={"value_clip": 1e-6}))
    loose = taught(make_learner(**GAE, **SEVERAL, objective__critic={"value_clip": 1e6}))
    found = [asyncio.run(learner.step(batch)).metrics for learner in (free, held, loose)]
    shares = [metrics["learner/value/clip_share"] for metrics in found]
    assert shares[0] == shares[2] == 0.0
    assert shares[1] > 0.0
    weights = [head_of(learner).head.weight.detach() for learner in (free, held, loose)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


# --- a step -------------------------------------------------------------------------------------


def test_the_head_learns_what_its_groups_are_worth(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    good = make_group([3, 1, 4], [[5, 9], [6, 2]], [1.0, 1.0], group_id="0/good")
    bad = make_group([8, 7, 2], [[5, 9], [6, 2]], [0.0, 0.0], group_id="0/bad")
    learner = make_learner(
        **GAE,
        objective__critic={"gae_lambda": 1.0, "learning_rate_factor": 1000.0},
        learner__optimizer__learning_rate=1e-4,
    )
    errors = []
    for _ in range(60):
        metrics = asyncio.run(learner.step([good, bad])).metrics
        errors.append(metrics["learner/value/squared_error"])
    assert metrics["learner/groups/num_trained"] == 2.0
    assert errors[0] == pytest.approx(0.5)
    assert errors[-1] < 0.05
    assert metrics["learner/value/explained_variance"] > 0.8


def test_groups_of_one_rollout_are_learned_from(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    groups = [
        make_group([1], [[2, 3]], [1.0], group_id="0/a"),
        make_group([2], [[4]], [0.0], group_id="0/b"),
    ]
    for settings in (GAE, IMPALA):
        result = asyncio.run(make_learner(**settings, group_size=1).step(groups))
        assert result.num_updates == 1
        assert result.metrics["learner/step/num_no_signal"] == 0.0


def test_rewards_that_never_differ_in_a_batch_are_no_signal_for_a_critic_either(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    groups = [make_group([1], [[2, 3], [4]], [1.0, 1.0])]
    learner = make_learner(**GAE, learner__max_no_signal_steps=2)
    metrics = asyncio.run(learner.step(groups)).metrics
    assert metrics["learner/step/num_no_signal"] == 1.0
    with pytest.raises(NoSignalError, match="all equal 1"):
        asyncio.run(learner.step(groups))


def test_a_masked_batch_moves_neither_policy_nor_head(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    groups = [make_group([1], [[2, 3], [4]], [1.0, 0.0], masks=[[False] * 2, [False]])]
    learner = taught(make_learner(**GAE))
    before = head_of(learner).head.weight.detach().clone()
    result = asyncio.run(learner.step(groups))
    assert result.num_updates == 0
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert torch.equal(head_of(learner).head.weight, before)


@pytest.mark.parametrize("settings", [GAE, IMPALA])
def test_a_logprob_that_is_no_number_moves_neither_policy_nor_head(
    settings: dict[str, Any], make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    poisoned = make_group([1], [[4, 5], [6]], [1.0, 0.0], logprobs=[[-1.0, math.nan], [-1.0]])
    learner = taught(make_learner(**settings))
    before = head_of(learner).head.weight.detach().clone()
    result = asyncio.run(learner.step([poisoned]))
    assert (result.num_updates, result.metrics["learner/step/num_skipped"]) == (0, 1.0)
    assert torch.equal(head_of(learner).head.weight, before)


def test_the_heads_rate_is_the_policys_times_its_factor(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    rate = 1e-4
    learner = make_learner(
        **GAE,
        objective__critic={"learning_rate_factor": 7.0},
        learner__optimizer__learning_rate=rate,
    )
    before = learner._decoder.output_weight.detach().clone()
    asyncio.run(learner.step(batch))
    # Adam's first update is the rate itself, whatever the gradient.
    assert head_of(learner).head.bias.abs().item() == pytest.approx(7 * rate, rel=1e-3)
    moved = (learner._decoder.output_weight - before).abs().max().item()
    assert moved == pytest.approx(rate, rel=1e-2)


def test_the_head_is_not_exported(batch: list[RolloutGroup], make_learner: MakeLearner) -> None:
    learner, plain = make_learner(**GAE), make_learner()
    asyncio.run(learner.step(batch))
    names = asyncio.run(learner.export()).tensors.keys()
    assert names == asyncio.run(plain.export()).tensors.keys()


# --- checkpoints --------------------------------------------------------------------------------


def saved_in(learner: TorchLearner, directory: Path) -> Path:
    directory.mkdir()
    asyncio.run(learner.save(directory))
    return directory


def state(learner: TorchLearner) -> dict[str, Tensor]:
    head = head_of(learner).head
    found = {**learner._decoder.state_dict(), **head.state_dict(prefix="head.")}
    for name, parameter in head.named_parameters():
        for key, value in learner._optimizer.state.get(parameter, {}).items():
            found[f"head.{name}:{key}"] = value
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("settings", [GAE, IMPALA, {**GAE, **SEVERAL}])
def test_a_step_a_new_learner_and_another_step_are_two_bit_for_bit(
    settings: dict[str, Any],
    tmp_path: Path,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
) -> None:
    through, first, second = (make_learner(**settings) for _ in range(3))
    for _ in range(2):
        asyncio.run(through.step(batch))
    asyncio.run(first.step(batch))
    asyncio.run(second.load(saved_in(first, tmp_path / "c")))
    asyncio.run(second.step(batch))
    one, other = state(through), state(second)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_policys_directory_does_not_know_the_head(
    tmp_path: Path, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner = make_learner(**GAE)
    asyncio.run(learner.step(batch))
    directory = saved_in(learner, tmp_path / "c")
    _, report = AutoModelForCausalLM.from_pretrained(directory / "hf", output_loading_info=True)
    assert not any(report.values())
    assert "weight" in load_file(directory / CRITIC_FILE)


def drop(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def widen(path: Path) -> None:
    save_file({**load_file(path), "weight": torch.zeros(3)}, path)


def forget_moments(path: Path) -> None:
    beside = path.with_name("optimizer.safetensors")
    save_file({n: t for n, t in load_file(beside).items() if "value_head" not in n}, beside)


@pytest.mark.parametrize("damage", [drop, cut, widen, forget_moments])
def test_a_checkpoint_whose_head_is_missing_or_damaged_is_refused_and_replaces_nothing(
    damage: Callable[[Path], None],
    tmp_path: Path,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
) -> None:
    learner = make_learner(**GAE)
    asyncio.run(learner.step(batch))
    directory = saved_in(learner, tmp_path / "c")
    damage(directory / CRITIC_FILE)
    asyncio.run(learner.step(batch))
    before = state(learner)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        asyncio.run(learner.load(directory))
    after = state(learner)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_with_an_adapter_the_head_is_trained_and_kept_beside_it(
    tmp_path: Path, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    settings = {**GAE, "learner__lora": {"rank": 2, "alpha": 4.0}}
    through, first, second = (make_learner(**settings) for _ in range(3))
    for _ in range(2):
        asyncio.run(through.step(batch))
    asyncio.run(first.step(batch))
    directory = saved_in(first, tmp_path / "c")
    assert (directory / "adapter").is_dir()
    asyncio.run(second.load(directory))
    asyncio.run(second.step(batch))
    one, other = state(through), state(second)
    assert one["head.bias"] != 0.0
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
