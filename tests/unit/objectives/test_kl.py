from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.objectives.kl import k1, k2, k3

POLICY = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
MASK = torch.ones(3, dtype=torch.bool)


def expected_value(estimator: Callable[..., Tensor]) -> float:
    return float((POLICY * estimator(POLICY.log(), REFERENCE.log(), loss_mask=MASK)).sum())


def expected_gradient(estimator: Callable[..., Tensor]) -> Tensor:
    """E_q[grad of the estimate] over the logits of a tabular policy: what a loss would follow."""
    logits = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    estimate = estimator(logprobs, REFERENCE.log(), loss_mask=MASK)
    return torch.autograd.grad((POLICY * estimate).sum(), logits)[0]


def finite_differences(kl: Callable[[Tensor], Tensor]) -> Tensor:
    step = 1e-6
    moves = torch.eye(3, dtype=torch.float64) * step
    logits = POLICY.log()
    return torch.stack([(kl(logits + move) - kl(logits - move)) / (2 * step) for move in moves])


def forward_kl(logits: Tensor) -> Tensor:
    logprobs = torch.log_softmax(logits, -1)
    return (logprobs.exp() * (logprobs - REFERENCE.log())).sum()


def reverse_kl(logits: Tensor) -> Tensor:
    return (REFERENCE * (REFERENCE.log() - torch.log_softmax(logits, -1))).sum()


@pytest.mark.parametrize("estimator", [k1, k3])
def test_the_enumerated_value_is_the_exact_kl(estimator: Callable[..., Tensor]) -> None:
    assert expected_value(estimator) == pytest.approx(0.0851, abs=5e-5)
    assert expected_value(estimator) == pytest.approx(float(forward_kl(POLICY.log())))


def test_estimators_are_their_literal_formulas() -> None:
    for q, ref in zip(POLICY.log(), REFERENCE.log(), strict=True):
        row = (q[None], ref[None])
        mask = MASK[:1]
        assert k1(*row, loss_mask=mask).item() == pytest.approx(float(q - ref))
        assert k2(*row, loss_mask=mask).item() == pytest.approx(float((q - ref) ** 2 / 2))
        literal = float((ref - q).exp() - 1 - (ref - q))
        assert k3(*row, loss_mask=mask).item() == pytest.approx(literal)


def test_k1_as_a_loss_has_no_gradient_in_expectation() -> None:
    torch.testing.assert_close(expected_gradient(k1), torch.zeros(3, dtype=torch.float64))


def test_k2_follows_the_exact_kl_to_the_reference() -> None:
    torch.testing.assert_close(expected_gradient(k2), finite_differences(forward_kl))


def test_k3_follows_the_kl_from_the_reference() -> None:
    torch.testing.assert_close(expected_gradient(k3), finite_differences(reverse_kl))


def test_k3_is_never_negative_near_zero() -> None:
    q = torch.zeros(3)
    ref = torch.tensor([1e-6, -1e-6, 3e-8])
    assert (k3(q, ref, loss_mask=MASK) >= 0).all()
