from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.objectives import logprobs as module
from headrace.objectives.logprobs import Support, linear_logprobs, selected_logprobs


def literal_logprob(logits: list[float], chosen: int, temperature: float) -> tuple[float, float]:
    scaled = [value / temperature for value in logits]
    normaliser = math.log(sum(math.exp(value - max(scaled)) for value in scaled)) + max(scaled)
    probabilities = [math.exp(value - normaliser) for value in scaled]
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return scaled[chosen] - normaliser, entropy


def problem(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids


@pytest.fixture(autouse=True)
def _narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VOCABULARY_TILE", 7)


@pytest.mark.parametrize("fused", [False, True])
def test_temperature_divides_logits_and_not_logprobs(*, fused: bool) -> None:
    logits, ids = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    if fused:
        logprobs, _ = linear_logprobs(logits, torch.eye(3), ids, temperature=0.6)
    else:
        logprobs, _ = selected_logprobs(logits, ids, temperature=0.6)
    assert logprobs.item() == pytest.approx(-0.2026, abs=5e-5)


@given(
    logits=st.lists(st.floats(-30, 30), min_size=1, max_size=20),
    temperature=st.floats(0.2, 3.0),
    data=st.data(),
)
@settings(deadline=None)
def test_both_ways_are_the_literal_formula(
    logits: list[float], temperature: float, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(logits) - 1))
    expected = pytest.approx(literal_logprob(logits, chosen, temperature), abs=1e-9)
    row, ids = torch.tensor([logits], dtype=torch.float64), torch.tensor([chosen])
    direct = selected_logprobs(row, ids, temperature=temperature)
    identity = torch.eye(len(logits), dtype=torch.float64)
    fused = linear_logprobs(row, identity, ids, temperature=temperature)
    assert tuple(value.item() for value in direct) == expected
    assert tuple(value.item() for value in fused) == expected


@pytest.mark.parametrize(("vocabulary", "chunk_tokens"), [(5, 9), (7, 4), (16, 1), (20, 3)])
def test_every_tiling_passes_gradcheck_in_float64(vocabulary: int, chunk_tokens: int) -> None:
    hidden, weight, ids = problem(5, 3, vocabulary, torch.float64)

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, ids, temperature=0.7, chunk_tokens=chunk_tokens)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_values_and_gradients_are_those_of_autograd(dtype: torch.dtype) -> None:
    hidden, weight, ids = problem(23, 8, 40, dtype)
    upstream = torch.linspace(-1, 1, 23)
    fused, fused_entropy = linear_logprobs(hidden, weight, ids, temperature=1.3, chunk_tokens=10)
    plain, plain_entropy = selected_logprobs(hidden @ weight.T, ids, temperature=1.3)
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    )
    torch.testing.assert_close(fused, plain, **tolerance)
    torch.testing.assert_close(fused_entropy, plain_entropy, **tolerance)
    found = torch.autograd.grad(fused @ upstream, (hidden, weight))
    expected = torch.autograd.grad(plain @ upstream, (hidden, weight))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, **tolerance)


def test_a_nearly_certain_token_keeps_its_small_gradient_in_bfloat16() -> None:
    # p = 0.9991; bf16 knows no number between 0.996 and 1, so p - 1 must be formed before.
    hidden = torch.tensor([[7.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    logprobs, _ = linear_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(1 - 1 / (1 + math.exp(-7.0)), rel=0.01)


def test_fp32_weights_under_bf16_activations_get_fp32_gradients() -> None:
    hidden, weight, ids = problem(6, 4, 11)
    activations = hidden.detach().bfloat16().requires_grad_()
    logprobs, _ = linear_logprobs(activations, weight, ids, temperature=1.0)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert activations.grad is not None
    assert logprobs.dtype == weight.grad.dtype == torch.float32
    assert activations.grad.dtype == torch.bfloat16


def test_entropy_has_no_gradient_and_frozen_inputs_get_none() -> None:
    hidden, weight, ids = problem(6, 4, 11)
    logprobs, entropy = linear_logprobs(hidden.detach(), weight, ids, temperature=1.0)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None


def test_logits_too_large_for_a_plain_exponential_are_fine() -> None:
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 0.0]] * 8 + [[1.0, 0.0], [1.0, 0.0]])
    logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([9]), temperature=1.0)
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, ids = problem(0, 4, 11)
    logprobs, entropy = linear_logprobs(hidden, weight, ids, temperature=1.0)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_an_impossible_token_leaves_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    logprobs, entropy = selected_logprobs(logits, torch.tensor([0]), temperature=1.0)
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        del types
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    hidden, weight, ids = problem(40, 4, 70)
    with LargestTensor() as largest:
        linear_logprobs(hidden, weight, ids, temperature=1.0, chunk_tokens=10)[0].sum().backward()
    assert largest.numel == weight.numel() < 40 * 70


# --- a part of the vocabulary -------------------------------------------------------------------


def support_of(ids: Tensor, vocabulary: int, seed: int = 0) -> tuple[Support, Tensor]:
    """Return a random support that holds ``ids``, in no order, and the same as a mask [N, V]."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(len(ids), vocabulary, generator=generator) < 0.3
    kept[torch.arange(len(ids)), ids] = True
    rows, columns = kept.nonzero().unbind(1)
    order = torch.randperm(len(rows), generator=generator)
    return Support(rows=rows[order], ids=columns[order]), kept


@pytest.mark.parametrize(("vocabulary", "chunk_tokens"), [(5, 9), (7, 4), (16, 1), (20, 3)])
def test_over_a_support_values_and_gradients_are_those_of_the_other_logits_left_out(
    vocabulary: int, chunk_tokens: int
) -> None:
    hidden, weight, ids = problem(8, 3, vocabulary, torch.float64)
    support, kept = support_of(ids, vocabulary)
    fused = linear_logprobs(
        hidden,
        weight,
        ids,
        temperature=0.7,
        chunk_tokens=chunk_tokens,
        support=support,
        entropy_gradient=True,
    )
    scaled = (hidden @ weight.T) / 0.7
    for row in range(8):
        left = torch.log_softmax(scaled[row][kept[row]], dim=0)
        place = int(kept[row, : int(ids[row])].sum())
        assert fused[0][row].item() == pytest.approx(left[place].item(), abs=1e-12)
        assert fused[1][row].item() == pytest.approx(-(left.exp() * left).sum().item(), abs=1e-12)
    plain = torch.log_softmax(scaled.masked_fill(~kept, -1e30), dim=-1)
    chosen = plain.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    entropy = -(plain.exp() * plain).sum(-1)
    upstream = torch.linspace(-1, 2, 8, dtype=torch.float64)
    found = torch.autograd.grad(
        fused[0] @ upstream - fused[1] @ upstream.square(), (hidden, weight)
    )
    expected = torch.autograd.grad(
        chosen @ upstream - entropy @ upstream.square(), (hidden, weight)
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_top_p_leaves_a_renormalised_support_that_is_replayed() -> None:
    probabilities = torch.tensor([0.665, 0.245, 0.090], dtype=torch.float64)
    row, ids = probabilities.log().unsqueeze(0), torch.tensor([0])
    identity = torch.eye(3, dtype=torch.float64)
    # top_p = 0.9 keeps the first two, which hold 0.91.
    kept = Support(rows=torch.tensor([0, 0]), ids=torch.tensor([0, 1]))
    whole, _ = linear_logprobs(row, identity, ids, temperature=1.0)
    replayed, _ = linear_logprobs(row, identity, ids, temperature=1.0, support=kept)
    assert (replayed - whole).item() == pytest.approx(0.094, abs=5e-4)
    assert replayed.item() == pytest.approx(math.log(0.665 / 0.910))


def test_a_support_of_all_tokens_is_no_support() -> None:
    hidden, weight, ids = problem(9, 4, 20)
    rows, columns = torch.ones(9, 20).nonzero().unbind(1)
    support = Support(rows=rows, ids=columns)
    plain = linear_logprobs(hidden, weight, ids, temperature=1.0, chunk_tokens=4)
    kept = linear_logprobs(hidden, weight, ids, temperature=1.0, chunk_tokens=4, support=support)
    assert all(map(torch.equal, kept, plain))


def test_a_lone_kept_token_is_certain_and_has_no_gradient() -> None:
    hidden, weight, ids = problem(6, 4, 20)
    lone = Support(rows=torch.arange(6), ids=ids)
    logprobs, entropy = linear_logprobs(
        hidden, weight, ids, temperature=1.0, support=lone, entropy_gradient=True
    )
    found = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert logprobs.abs().max() < 1e-6
    assert entropy.abs().max() < 1e-6
    assert all(gradient.abs().max() < 1e-6 for gradient in found)


# --- the entropy's gradient ---------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "chunk_tokens"), [(5, 9), (7, 4), (16, 1), (20, 3)])
def test_every_tiling_of_the_entropy_passes_gradcheck_in_float64(
    vocabulary: int, chunk_tokens: int
) -> None:
    hidden, weight, ids = problem(5, 3, vocabulary, torch.float64)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(
            hidden,
            weight,
            ids,
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            entropy_gradient=True,
        )

    assert torch.autograd.gradcheck(both, (hidden, weight))
    assert torch.autograd.gradcheck(lambda *pair: both(*pair)[1], (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_entropys_gradient_is_autograds_on_full_logits(dtype: torch.dtype) -> None:
    hidden, weight, ids = problem(23, 8, 40, dtype)
    upstream = torch.linspace(-1, 1, 23)
    _, entropy = linear_logprobs(
        hidden, weight, ids, temperature=1.3, chunk_tokens=10, entropy_gradient=True
    )
    logprobs = torch.log_softmax((hidden @ weight.T).float() / 1.3, dim=-1)
    plain = -(logprobs.exp() * logprobs).sum(-1)
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    )
    found = torch.autograd.grad(entropy @ upstream, (hidden, weight))
    expected = torch.autograd.grad(plain @ upstream, (hidden, weight))
    torch.testing.assert_close(found, expected, **tolerance)


def test_no_tensor_of_all_logits_is_made_for_the_entropy_or_a_support() -> None:
    hidden, weight, ids = problem(40, 4, 70)
    lone = Support(rows=torch.arange(40), ids=ids)
    with LargestTensor() as largest:
        outputs = linear_logprobs(
            hidden,
            weight,
            ids,
            temperature=1.0,
            chunk_tokens=10,
            support=lone,
            entropy_gradient=True,
        )
        (outputs[0] + outputs[1]).sum().backward()
    assert largest.numel == weight.numel() < 40 * 70
