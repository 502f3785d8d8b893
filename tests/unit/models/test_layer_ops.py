from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headrace.models import layer_ops
from headrace.models.layer_ops import add_and_norm, gated, rotated
from headrace.models.rope import apply_rope

EPSILON = 1e-5
ROWS = 77
"""Neither a multiple of the rows that are taken at a time, nor of those that are summed."""

Found = tuple[list[Tensor], list[Tensor]]


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def evaluated(function: Callable[..., object], *inputs: Tensor) -> Found:
    """Return the outputs and the gradients of a random mixture of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = function(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    mixture = [numbers(*y.shape, seed=7 + place) for place, y in enumerate(outputs)]
    loss = sum((y.double() * m).sum() for y, m in zip(outputs, mixture, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    return [y.detach() for y in outputs], [x.grad for x in leaves if x.grad is not None]


def agree(found: Found, expected: Found, tolerance: float) -> None:
    for ours, plain in zip(found, expected, strict=True):
        assert len(ours) == len(plain)
        for one, other in zip(ours, plain, strict=True):
            difference = (one.double() - other.double()).abs().max()
            assert difference <= tolerance * other.double().abs().max()


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def angles(rows: int, size: int) -> tuple[Tensor, Tensor]:
    turned = numbers(rows, size // 2, seed=3)
    cos, sin = turned.cos(), turned.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every kernel that is run."""
    ran: list[int] = []
    own = layer_ops._run

    def counted(*arguments: object) -> None:
        ran.append(1)
        own(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_ops, "_run", counted)
    return ran


@pytest.mark.parametrize("size", [16, 576])
def test_the_norm_of_a_sum_has_the_values_and_gradients_of_plain_float64(
    size: int, kernels_run: list[int]
) -> None:
    inputs = numbers(ROWS, size), numbers(ROWS, size, seed=1), numbers(size, seed=2)

    def ours(hidden: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_and_norm(hidden, delta, weight, EPSILON)

    def plain(hidden: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = hidden + delta
        return total, total / (total.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight

    agree(evaluated(ours, *inputs), evaluated(plain, *wide(*inputs)), 1e-6)
    assert len(kernels_run) == 2


def test_a_norm_alone_passes_the_residuals_gradient_on() -> None:
    inputs = numbers(ROWS, 48), numbers(48, seed=2)

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_and_norm(hidden, None, weight, EPSILON)

    def plain(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 1, functional.rms_norm(hidden, weight.shape, weight, EPSILON)

    agree(evaluated(ours, *inputs), evaluated(plain, *wide(*inputs)), 1e-6)


@pytest.mark.parametrize("output", [0, 1])
def test_an_output_of_a_norm_that_nothing_reads_has_no_gradient(output: int) -> None:
    inputs = numbers(ROWS, 48), numbers(ROWS, 48, seed=1), numbers(48, seed=2)

    def ours(hidden: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return add_and_norm(hidden, delta, weight, EPSILON)[output]

    def plain(hidden: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        total = hidden + delta
        return (total, functional.rms_norm(total, weight.shape, weight, EPSILON))[output]

    agree(evaluated(ours, *inputs), evaluated(plain, *wide(*inputs)), 1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=["fp32", "bf16"]
)
def test_a_gate_has_the_values_and_gradients_of_plain_float64(
    dtype: torch.dtype, tolerance: float, kernels_run: list[int]
) -> None:
    gate, up = numbers(ROWS, 96, scale=5.0).to(dtype), numbers(ROWS, 96, seed=1).to(dtype)

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return gate / (1 + (-gate).exp()) * up

    agree(evaluated(gated, gate, up), evaluated(plain, *wide(gate, up)), tolerance)
    assert len(kernels_run) == 2


def test_gates_far_out_are_shut_or_open_and_their_gradients_finite() -> None:
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, *[1.0] * 11]])
    (out,), gradients = evaluated(gated, gate, torch.ones_like(gate))

    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 1e4])
    torch.testing.assert_close(out[0, :5], expected, atol=1e-30, rtol=1e-6)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=["fp32", "bf16"]
)
def test_a_rotation_has_the_values_and_gradients_of_plain_float64(
    dtype: torch.dtype, tolerance: float, kernels_run: list[int]
) -> None:
    states = numbers(ROWS, 3, 64).to(dtype)
    cos, sin = angles(ROWS, 64)

    def ours(states: Tensor) -> Tensor:
        return rotated(states, cos, sin)

    def plain(states: Tensor) -> Tensor:
        return apply_rope(states, cos.double(), sin.double())

    agree(evaluated(ours, states), evaluated(plain, states.double()), tolerance)
    assert len(kernels_run) == 2


def test_under_autocast_a_norm_is_rounded_once_to_what_products_read() -> None:
    inputs = numbers(ROWS, 48), numbers(ROWS, 48, seed=1).bfloat16(), numbers(48, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        residual, normed = add_and_norm(*inputs, EPSILON)

    hidden, delta, weight = inputs
    total = hidden + delta
    expected = functional.rms_norm(total.double(), weight.shape, weight.double(), EPSILON)
    assert residual.dtype == torch.float32
    assert torch.equal(residual, total)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), expected, rtol=2**-8, atol=1e-6)


def test_under_autocast_gradients_keep_the_dtypes_of_what_they_are_of() -> None:
    leaves = [numbers(ROWS, 48), numbers(ROWS, 48, seed=1).bfloat16(), numbers(48, seed=2)]
    hidden, delta, weight = (leaf.requires_grad_() for leaf in leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        residual, normed = add_and_norm(hidden, delta, weight, EPSILON)
        (residual.sum() + normed.float().sum()).backward()

    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
    assert hidden.grad is not None
    assert delta.grad is not None
    assert torch.equal(delta.grad, hidden.grad.bfloat16())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_any_number_of_threads_gives_the_same_bits(num_threads: int) -> None:
    inputs = numbers(ROWS * 40, 576), numbers(ROWS * 40, 576, seed=1), numbers(576, seed=2)

    def norm(hidden: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_and_norm(hidden, delta, weight, EPSILON)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        found = evaluated(norm, *inputs)
        torch.set_num_threads(1)
        alone = evaluated(norm, *inputs)
    finally:
        torch.set_num_threads(before)
    for ours, expected in zip(found, alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.parametrize("case", ["float64", "size", "strides", "empty", "inference"])
def test_what_kernels_do_not_take_is_computed_by_torch(case: str, kernels_run: list[int]) -> None:
    gate, up = numbers(ROWS, 32), numbers(ROWS, 32, seed=1)
    match case:
        case "float64":
            gate, up = gate.double(), up.double()
        case "size":
            gate, up = gate[:, :31].contiguous(), up[:, :31].contiguous()
        case "strides":
            gate, up = gate.T.contiguous().T, up.T.contiguous().T
        case "empty":
            gate, up = gate[:0], up[:0]

    with torch.inference_mode(case == "inference"):
        assert torch.equal(gated(gate, up), functional.silu(gate) * up)
    assert not kernels_run


def test_gradients_of_gradients_are_refused() -> None:
    gate = numbers(ROWS, 32).requires_grad_()
    (first,) = torch.autograd.grad(gated(gate, gate * 2).square().sum(), gate, create_graph=True)

    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
