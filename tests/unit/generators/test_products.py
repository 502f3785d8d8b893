"""The generator's own form of the weight matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.generators.torch_engine import products as module
from headrace.generators.torch_engine.products import PackedProducts, can_pack, rounded_rows

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

CPU = torch.device("cpu")
SHAPES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"model_type": "qwen2"},
    {"attention_bias": True, "mlp_bias": True},
]


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not can_pack(torch.float32):
        pytest.skip("this machine's oneDNN does not pack fp32")
    monkeypatch.setattr(module, "can_pack", lambda _: request.param)
    return bool(request.param)


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 70])
def test_products_are_those_of_the_decoders_own_modules(
    lab: Lab, shape: dict[str, Any], num_rows: int
) -> None:
    decoder = lab.decoder(**shape)
    own = PackedProducts(decoder, torch.float32, CPU)
    own.load(lab.update(decoder).tensors)
    for linears in decoder.linears():
        hidden = torch.randn(num_rows, linears[0].in_features)
        for found, linear in zip(own(hidden, linears), linears, strict=True):
            torch.testing.assert_close(found, linear(hidden))
    hidden = torch.randn(num_rows, decoder.config.hidden_size)
    torch.testing.assert_close(own.logits(hidden), decoder.logits(hidden))


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_can_be_read_back_exactly(lab: Lab, shape: dict[str, Any]) -> None:
    decoder = lab.decoder(**shape)
    own = PackedProducts(decoder, torch.float32, CPU)
    tensors = lab.update(decoder).tensors
    own.load(tensors)
    found = dict(own.read())
    assert own.names <= found.keys()
    for name, content in found.items():
        assert torch.equal(content, tensors[name]), name


@pytest.mark.usefixtures("packs")
def test_what_was_loaded_does_not_change_with_the_learners_tensors(lab: Lab) -> None:
    decoder = lab.decoder()
    own = PackedProducts(decoder, torch.float32, CPU)
    own.load(lab.update(decoder).tensors)
    before = {name: content.clone() for name, content in own.read()}
    for parameter in decoder.parameters():
        parameter.zero_()
    assert all(torch.equal(content, before[name]) for name, content in own.read())


def test_few_numbers_of_rows_are_multiplied_however_many_rollouts_run() -> None:
    made = [rounded_rows(num_rows) for num_rows in range(1, 1025)]
    assert len(set(made)) == 5 + 8 + 8 + 8 + 7
    for num_rows, rounded in enumerate(made, start=1):
        assert num_rows <= rounded
        assert rounded - num_rows < max(16, num_rows / 8)


def test_a_type_that_cannot_be_packed_is_found_out_by_trying() -> None:
    assert not can_pack(torch.float64)
