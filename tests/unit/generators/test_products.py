"""The generator's own form of the weight matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.errors import ConfigError
from headrace.generators.torch_engine import products as module
from headrace.generators.torch_engine.forms import (
    can_multiply_int8,
    rounded_rows,
    takes_eight_bits,
)
from headrace.generators.torch_engine.products import FusedProducts, Unit
from headrace.models.weights import content

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

CPU = torch.device("cpu")
SHAPES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"model_type": "qwen2"},
    {"attention_bias": True, "mlp_bias": True},
]


@pytest.fixture(autouse=True)
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have eight bits held on every processor; only products ask whether those are exact."""
    monkeypatch.setattr(module, "can_multiply_int8", lambda _: True)


@pytest.fixture(params=[True, False], ids=["panels", "torch"])
def panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        without_panels(monkeypatch)
    return bool(request.param)


def without_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_hold", lambda *_: False)
    monkeypatch.setattr(module, "can_hold_int8", lambda *_: False)


@pytest.mark.usefixtures("panels")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 70])
def test_products_are_those_of_the_decoders_own_modules(
    lab: Lab, shape: dict[str, Any], num_rows: int
) -> None:
    decoder = lab.decoder(**shape)
    own = FusedProducts(decoder, torch.float32, CPU)
    own.load(lab.update(decoder).tensors)
    for linears in decoder.linears():
        hidden = torch.randn(num_rows, linears[0].in_features)
        for found, linear in zip(own(hidden, linears), linears, strict=True):
            torch.testing.assert_close(found, linear(hidden))
    hidden = torch.randn(num_rows, decoder.config.hidden_size)
    logits = torch.empty(num_rows, decoder.config.vocab_size)
    torch.testing.assert_close(own.logits(hidden, logits), decoder.logits(hidden))
    torch.testing.assert_close(logits, decoder.logits(hidden))


def loaded(
    lab: Lab, *, is_quantized: bool, **shape: object
) -> tuple[FusedProducts, dict[str, torch.Tensor]]:
    decoder = lab.decoder(**shape)
    own = FusedProducts(decoder, torch.float32, CPU, is_quantized=is_quantized)
    tensors = dict(lab.update(decoder).tensors)
    own.load(tensors)
    return own, tensors


def differing(own: FusedProducts, tensors: Mapping[str, torch.Tensor]) -> list[Unit]:
    return [unit for unit in own.units if not unit.holds(tensors)]


@pytest.mark.usefixtures("panels")
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_that_is_held_otherwise_than_it_was_published_is_named(
    lab: Lab, shape: dict[str, Any], *, is_quantized: bool
) -> None:
    own, tensors = loaded(lab, is_quantized=is_quantized, **shape)
    assert not differing(own, tensors)
    held = lab.decoder(**shape).output_name
    for name in own.names | {held}:
        changed = tensors[name].clone()
        changed.view(-1)[3] += 0.05 if is_quantized else 1e-6
        (wrong,) = differing(own, {**tensors, name: changed})
        assert name in wrong.names


@pytest.mark.usefixtures("panels")
@pytest.mark.parametrize("shape", SHAPES)
def test_contents_are_those_of_the_weights_and_biases_that_were_loaded(
    lab: Lab, shape: dict[str, Any]
) -> None:
    own, tensors = loaded(lab, is_quantized=False, **shape)
    held: dict[str, int] = {}
    for unit in own.units:
        found = unit.contents()
        assert found is not None
        held |= found
    assert held == {name: content(tensors[name]) for name in held}
    assert own.names <= held.keys()


@pytest.mark.usefixtures("panels")
@pytest.mark.parametrize("is_quantized", [False, True])
def test_what_was_loaded_does_not_change_with_the_learners_tensors(
    lab: Lab, *, is_quantized: bool
) -> None:
    own, tensors = loaded(lab, is_quantized=is_quantized, mlp_bias=True)
    published = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    assert not differing(own, published)


@pytest.mark.usefixtures("panels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_eight_bit_products_are_those_of_rounded_rows_and_rounded_weights(
    lab: Lab, shape: dict[str, Any], num_rows: int, dtype: torch.dtype
) -> None:
    if not can_multiply_int8(CPU):
        pytest.skip("this processor has no exact products of eight bits")

    def literal(hidden: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
        rows = [[round(x * 127 / max(map(abs, row))) for x in row] for row in hidden.tolist()]
        weights = linear.weight.tolist()
        columns = [[round(w * 127 / max(map(abs, row))) for w in row] for row in weights]
        sums = torch.tensor(
            [[sum(x * w for x, w in zip(a, b, strict=True)) for b in columns] for a in rows]
        )
        steps = hidden.abs().amax(1, keepdim=True).double() / 127
        product = sums * steps * (linear.weight.abs().amax(1).double() / 127)
        return product if linear.bias is None else product + linear.bias

    decoder = lab.decoder(**shape)
    own = FusedProducts(decoder, dtype, CPU, is_quantized=True)
    own.load(lab.update(decoder).tensors)
    for linears in list(decoder.linears())[:4]:
        hidden = torch.randn(num_rows, linears[0].in_features).to(dtype)
        for found, linear in zip(own(hidden, linears), linears, strict=True):
            assert found.dtype == dtype
            expected = literal(hidden, linear).to(dtype)
            # A value that lies between two steps may be rounded either way in fp32.
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=4e-2)


@pytest.mark.usefixtures("panels")
def test_a_row_of_zeros_stays_one_in_eight_bits(lab: Lab) -> None:
    own, _ = loaded(lab, is_quantized=True)
    hidden = torch.zeros(2, 16)
    hidden[1] = 1.0
    logits = own.logits(hidden, torch.empty(2, 50))
    assert not logits[0].any()
    assert logits[1].isfinite().all()


def test_few_numbers_of_rows_are_multiplied_however_many_rollouts_run() -> None:
    made = [rounded_rows(num_rows) for num_rows in range(1, 1025)]
    assert len(set(made)) == 5 + 8 + 8 + 8 + 7
    for num_rows, rounded in enumerate(made, start=1):
        assert num_rows <= rounded
        assert rounded - num_rows < max(16, num_rows / 8)


def test_weights_that_an_optimizer_has_hardly_moved_are_told_apart_in_eight_bits(lab: Lab) -> None:
    own, tensors = loaded(lab, is_quantized=True)
    moved = {name: tensor + 1e-5 for name, tensor in tensors.items()}
    assert len(differing(own, moved)) == len(list(lab.decoder().linears())) + 1


def test_products_of_eight_bits_are_refused_where_they_saturate(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saturating(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        # As without VNNI: unsigned by signed, pairs in 16 bits, the offset taken out at the end.
        shifted, signed = rows.int() + 128, columns.int()
        pairs = shifted.view(len(rows), -1, 2, 1) * signed.view(-1, 2, columns.shape[1])
        return pairs.sum(2).clamp(-(2**15), 2**15 - 1).sum(1) - 128 * signed.sum(0)

    without_panels(monkeypatch)
    monkeypatch.setattr(module, "can_multiply_int8", can_multiply_int8)
    can_multiply_int8.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    with pytest.raises(ConfigError, match="not exact"):
        FusedProducts(lab.decoder(), torch.float32, CPU, is_quantized=True)
    can_multiply_int8.cache_clear()


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_is_held_once_unless_it_is_the_embedding(lab: Lab, *, is_tied: bool) -> None:
    own, _ = loaded(lab, is_quantized=False, tie_word_embeddings=is_tied)
    assert ("lm_head.weight" in own.names) == (not is_tied)
    assert "model.embed_tokens.weight" not in own.names


@pytest.mark.parametrize(
    ("device", "outputs", "inputs", "expected"),
    [
        ("cuda", 49152, 576, True),
        ("cuda", 50257, 768, False),
        ("cuda", 768, 30, False),
        ("cpu", 50257, 30, True),
    ],
)
def test_a_device_multiplies_in_eight_bits_where_both_sides_are_multiples_of_eight(
    device: str, outputs: int, inputs: int, *, expected: bool
) -> None:
    assert takes_eight_bits(torch.device(device), outputs, inputs) == expected
