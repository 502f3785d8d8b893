from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from headrace.config import OptimizerConfig
from headrace.learners.optimizer import apply_update, build_optimizer, learning_rate


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))


def set_gradients(parameters: list[Parameter], value: float) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)


def literal_adamw(
    start: float, gradients: list[float], config: OptimizerConfig, decay: float
) -> float:
    value, first, second = start, 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        value -= config.learning_rate * decay * value
        first = config.betas[0] * first + (1 - config.betas[0]) * gradient
        second = config.betas[1] * second + (1 - config.betas[1]) * gradient**2
        corrected = second / (1 - config.betas[1] ** step)
        moved = first / (1 - config.betas[0] ** step) / (math.sqrt(corrected) + config.epsilon)
        value -= config.learning_rate * moved
    return value


@pytest.mark.parametrize("shape", [(1, 1), (1,)])
def test_updates_are_the_literal_adamw_and_vectors_are_not_decayed(shape: tuple[int, ...]) -> None:
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.5)
    parameter = Parameter(torch.full(shape, 2.0))
    optimizer = build_optimizer([("weight", parameter)], config)
    gradients = [0.3, -0.2, 0.7]
    for gradient in gradients:
        set_gradients([parameter], gradient)
        apply_update(optimizer, [parameter], max_norm=1e9, learning_rate=0.01)
    decay = config.weight_decay if len(shape) > 1 else 0.0
    expected = literal_adamw(2.0, gradients, config, decay)
    assert parameter.item() == pytest.approx(expected, rel=1e-6)


def test_frozen_parameters_are_left_out_and_nothing_trainable_is_an_error() -> None:
    frozen = Parameter(torch.ones(2, 2), requires_grad=False)
    live = Parameter(torch.ones(2, 2))
    optimizer = build_optimizer([("a", frozen), ("b", live)], OptimizerConfig())
    assert [group["params"] for group in optimizer.param_groups] == [[live]]
    with pytest.raises(ValueError, match="nothing to optimize"):
        build_optimizer([("a", frozen)], OptimizerConfig())


def test_the_global_norm_is_clipped_and_reported_before_clipping() -> None:
    parameters = [Parameter(torch.zeros(1, 1)), Parameter(torch.zeros(1, 1))]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    parameters[0].grad, parameters[1].grad = torch.tensor([[3.0]]), torch.tensor([[4.0]])
    outcome = apply_update(optimizer, parameters, max_norm=1.0, learning_rate=1.0)
    assert outcome.gradient_norm == pytest.approx(5.0)
    assert [parameter.item() for parameter in parameters] == pytest.approx([-0.6, -0.8])


def test_a_gradient_below_the_bound_is_not_touched() -> None:
    parameter = Parameter(torch.zeros(1, 1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    parameter.grad = torch.tensor([[0.1]])
    apply_update(optimizer, [parameter], max_norm=1.0, learning_rate=1.0)
    assert torch.equal(parameter.detach(), -torch.tensor([[0.1]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_non_finite_gradient_changes_no_weight_and_no_optimizer_state(bad: float) -> None:
    model = small_model()
    parameters = list(model.parameters())
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(learning_rate=0.1))
    set_gradients(parameters, 0.5)
    assert apply_update(optimizer, parameters, max_norm=1.0, learning_rate=0.1).applied
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = model(torch.ones(2, 3)).sum(dim=-1)
    (losses * torch.tensor([1.0, bad])).sum().backward()
    outcome = apply_update(optimizer, parameters, max_norm=1.0, learning_rate=0.2)
    assert not outcome.applied
    assert not math.isfinite(outcome.gradient_norm)
    assert all(parameter.grad is None for parameter in parameters)
    weights, state = model.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(weights, before[0], rtol=0, atol=0)
    torch.testing.assert_close(state["state"], before[1]["state"], rtol=0, atol=0)
    assert state["param_groups"] == before[1]["param_groups"]


def test_a_finite_update_after_a_skipped_one_is_as_if_it_had_not_been() -> None:
    results = []
    for skipped in (False, True):
        model = small_model()
        parameters = list(model.parameters())
        optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
        for value in [0.5, math.nan, 0.25] if skipped else [0.5, 0.25]:
            set_gradients(parameters, value)
            apply_update(optimizer, parameters, max_norm=1.0, learning_rate=0.1)
        results.append(model.state_dict())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_gradients_are_cleared_after_an_update_and_none_at_all_is_no_fault() -> None:
    model = small_model()
    parameters = list(model.parameters())
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
    outcome = apply_update(optimizer, parameters, max_norm=1.0, learning_rate=0.1)
    assert outcome.gradient_norm == 0.0
    set_gradients(parameters, 0.5)
    apply_update(optimizer, parameters, max_norm=1.0, learning_rate=0.1)
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_ten_steps_of_four_minibatches_reach_zero_exactly_after_update_forty(
    schedule: str,
) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 1e-3, "schedule": schedule})
    rates = [learning_rate(config, update, 40) for update in range(41)]
    assert rates[0] == 1e-3
    assert rates[40] == 0.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


def test_warm_up_rises_linearly_and_ends_at_the_peak() -> None:
    config = OptimizerConfig(learning_rate=1.0, num_warmup_updates=4)
    rates = [learning_rate(config, update, 8) for update in range(8)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


@settings(deadline=None)
@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    num_updates=st.integers(1, 30),
)
def test_the_rate_stays_between_zero_and_the_peak_and_never_rises_after_warm_up(
    schedule: str, warmup: int, num_updates: int
) -> None:
    config = OptimizerConfig.model_validate(
        {"learning_rate": 2.0, "schedule": schedule, "num_warmup_updates": warmup}
    )
    rates = [learning_rate(config, update, num_updates) for update in range(num_updates + 1)]
    assert all(0.0 <= rate <= 2.0 for rate in rates)
    assert all(rate > 0.0 for rate in rates[:-1])
    falling = rates[max(warmup - 1, 0) :]
    assert all(later <= earlier for earlier, later in itertools.pairwise(falling))
    assert schedule == "constant" or rates[-1] == 0.0
