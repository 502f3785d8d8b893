"""An adapter's forward pass, gradient and merge against the dense matrix that they stand for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace.models.adapter_files import AdapterShape
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.lora import LoraLinear, MergedWeights, adapted_linears, adapter_of, add_adapter

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
SOME = AdapterShape(rank=3, alpha=4.5, targets=("down_proj", "k_proj", "q_proj"))
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def plain() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig.from_hf(CONFIG)).double()


def adapted(shape: AdapterShape = SOME, *, seed: int = 0, moved: bool = True) -> Decoder:
    decoder = plain()
    add_adapter(decoder, shape, seed=seed)
    if moved:
        for _, linear in adapted_linears(decoder):
            nn.init.normal_(linear.lora_b)
    return decoder


def hidden(decoder: Decoder) -> Tensor:
    attention = PackedCausal([len(IDS)], decoder.config.windows)
    found: Tensor = decoder(IDS, positions_of([len(IDS)]), attention)
    return found


def dense(decoder: Decoder) -> Decoder:
    """Return a decoder without adapters that computes the same."""
    copy = plain()
    copy.load_state_dict(dict(MergedWeights(decoder, torch.float64)), strict=False)
    return copy


def test_a_new_adapter_changes_no_bit() -> None:
    assert torch.equal(hidden(adapted(moved=False)), hidden(plain()))


def test_a_forward_pass_is_that_of_the_dense_matrices() -> None:
    decoder = adapted()
    expected = plain()
    for name, linear in adapted_linears(decoder):
        literal = sum(
            4.5 / 3 * torch.outer(linear.lora_b[:, k], linear.lora_a[k]) for k in range(3)
        )
        expected.get_submodule(name).weight.data += literal.detach()
    torch.testing.assert_close(hidden(decoder), hidden(expected), rtol=1e-12, atol=1e-12)
    assert (hidden(decoder) - hidden(plain())).abs().max() > 1e-3


def test_merged_weights_are_the_model_without_adapters() -> None:
    decoder = adapted()
    merged = MergedWeights(decoder, torch.float64)
    names = dict(plain().named_parameters())
    assert list(merged) == list(names)
    assert {name: tensor.shape for name, tensor in merged.items()} == {
        name: parameter.shape for name, parameter in names.items()
    }
    torch.testing.assert_close(hidden(dense(decoder)), hidden(decoder), rtol=1e-12, atol=1e-12)


def test_the_factors_gradients_are_those_of_the_dense_matrix_by_the_chain_rule() -> None:
    decoder, other = adapted(), dense(adapted())
    # Every matrix as well as the factors: the dense gradient G gives (s Bt G) and (s G At).
    (hidden(decoder) ** 2).sum().backward()
    (hidden(other) ** 2).sum().backward()
    for name, linear in adapted_linears(decoder):
        whole = other.get_submodule(name).weight.grad
        a, b, scale = linear.lora_a, linear.lora_b, 4.5 / 3
        assert linear.weight.grad is None
        torch.testing.assert_close(a.grad, scale * b.T @ whole, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(b.grad, scale * whole @ a.T, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.booleans())
def test_gradients_agree_with_finite_differences(
    rank: int, inputs: int, outputs: int, rows: int, has_bias: bool
) -> None:
    torch.manual_seed(rank * inputs + outputs)
    base = nn.Linear(inputs, outputs, bias=has_bias).double().requires_grad_(requires_grad=False)
    linear = LoraLinear(base, rank, alpha=2.0)

    def product(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        factors = {"lora_a": a, "lora_b": b}
        found: Tensor = torch.func.functional_call(linear, factors, (x,))
        return found

    shapes = ((rank, inputs), (outputs, rank), (rows, inputs))
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(product, values)


def test_nothing_but_the_factors_takes_a_gradient() -> None:
    trained = {name for name, p in adapted().named_parameters() if p.requires_grad}
    assert trained == {
        f"model.layers.{layer}.{module}.{factor}"
        for layer in (0, 1)
        for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
        for factor in ("lora_a", "lora_b")
    }


def test_an_adapter_says_what_it_is() -> None:
    assert adapter_of(adapted()) == SOME
    assert adapter_of(plain()) is None


def test_a_starts_as_the_seed_and_the_place_say_and_b_at_0() -> None:
    def start(seed: int) -> dict[str, Tensor]:
        decoder = adapted(seed=seed, moved=False)
        assert not any(linear.lora_b.any() for _, linear in adapted_linears(decoder))
        return {name: linear.lora_a for name, linear in adapted_linears(decoder)}

    first, again, other = start(1), start(1), start(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    q_projs = [a for name, a in first.items() if name.endswith("q_proj")]
    assert not torch.equal(*q_projs)
    assert all(0.0 < a.abs().max() <= a.shape[1] ** -0.5 for a in first.values())


def test_frozen_weights_are_published_by_reference_and_merged_ones_are_never_kept() -> None:
    decoder = adapted()
    merged = MergedWeights(decoder, torch.float64)
    modules = {f"{name}.weight" for name, _ in adapted_linears(decoder)}
    held = [weakref.ref(merged[name]) for name in modules]
    assert [reference() for reference in held] == [None] * len(modules)
    for name, parameter in plain().named_parameters():
        if name not in modules:
            own = dict(decoder.named_parameters())[name]
            assert merged[name].data_ptr() == own.data_ptr()
            assert merged[name].shape == parameter.shape


def test_a_narrower_dtype_rounds_the_merged_matrix_once() -> None:
    decoder = adapted()
    exact, rounded = MergedWeights(decoder, torch.float64), MergedWeights(decoder, torch.bfloat16)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_merging_is_done_by_whoever_was_named() -> None:
    def compute(merge: Callable[[], Tensor]) -> Tensor:
        calls.append(merge)
        return merge()

    calls: list[Callable[[], Tensor]] = []
    merged = MergedWeights(adapted(), torch.float64, compute)
    count = sum(1 for _ in values(merged))
    assert count == len(merged)
    assert len(calls) == 6


def values(merged: MergedWeights) -> Iterator[Tensor]:
    yield from merged.values()


@pytest.mark.parametrize("targets", [("q_proj",), ("gate_proj", "o_proj", "up_proj", "v_proj")])
def test_targets_are_matrices_by_name(targets: tuple[str, ...]) -> None:
    decoder = adapted(AdapterShape(rank=2, alpha=2.0, targets=targets))
    assert {name.rpartition(".")[2] for name, _ in adapted_linears(decoder)} == set(targets)
