"""PEFT's format: what is written, PEFT reads; what PEFT writes, is read; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.errors import ModelError
from headrace.models.adapter_files import (
    AdapterShape,
    base_model,
    check_adapter,
    read_adapter_shape,
)
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.checkpoint import load_decoder
from headrace.models.decoder import Decoder
from headrace.models.lora import (
    adapted_linears,
    add_adapter,
    read_adapter,
    save_adapter,
    set_adapter,
)

SHAPE = AdapterShape(rank=4, alpha=10.0, targets=("down_proj", "q_proj", "v_proj"))
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def moved(model: Path, shape: AdapterShape = SHAPE) -> Decoder:
    decoder = load_decoder(model)
    add_adapter(decoder, shape, seed=0)
    for _, linear in adapted_linears(decoder):
        nn.init.normal_(linear.lora_b)
    return decoder


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    save_adapter(moved(model), tmp_path / "adapter", model)
    return tmp_path / "adapter"


@torch.no_grad()
def logits(decoder: Decoder) -> torch.Tensor:
    attention = PackedCausal([len(IDS)], decoder.config.windows)
    return decoder.logits(decoder(IDS, positions_of([len(IDS)]), attention))


def test_what_was_saved_is_read_back_bit_for_bit(model: Path, adapter: Path) -> None:
    decoder, other = moved(model), load_decoder(model)
    add_adapter(other, SHAPE, seed=7)
    set_adapter(other, read_adapter(other, adapter))
    save_adapter(decoder, adapter, model)
    set_adapter(other, read_adapter(other, adapter))
    assert torch.equal(logits(decoder), logits(other))
    assert read_adapter_shape(adapter) == SHAPE
    assert base_model(adapter) == str(model)


def test_files_have_the_names_and_tensors_that_peft_documents(adapter: Path) -> None:
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 3
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    assert tensors[f"{prefix}.lora_A.weight"].shape == (4, 24)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (16, 4)
    content = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    assert (content["peft_type"], content["r"], content["lora_alpha"]) == ("LORA", 4, 10)


def test_peft_computes_the_same_logits_and_what_it_writes_is_read(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    decoder = moved(model)
    save_adapter(decoder, adapter, model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS[None]).logits[0], logits(decoder))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "peft")
    set_adapter(decoder, read_adapter(decoder, tmp_path / "peft"))
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS[None]).logits[0], logits(decoder))


def test_an_adapter_that_peft_began_is_read(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1
    )
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "peft")
    decoder = load_decoder(model)
    add_adapter(decoder, SHAPE, seed=0)
    set_adapter(decoder, read_adapter(decoder, tmp_path / "peft"))
    assert torch.equal(logits(decoder), logits(load_decoder(model)))


def edit(adapter: Path, **changes: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("init_lora_weights", "pissa"),
        ("fan_in_fan_out", True),
        ("trainable_token_indices", [3]),
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", "4"),
        ("lora_alpha", -1),
        ("target_modules", "all-linear"),
    ],
)
def test_an_adapter_that_is_not_computed_here_is_refused_by_its_key(
    key: str, value: object, adapter: Path
) -> None:
    edit(adapter, **{key: value})
    with pytest.raises(ModelError, match=key):
        read_adapter_shape(adapter)


def drop(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors[min(tensors)]
    save_file(tensors, adapter / "adapter_model.safetensors")


def reshape(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({**tensors, min(tensors): torch.zeros(2, 2)}, adapter / "adapter_model.safetensors")


def cut(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def remove(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, "is missing"),
        (reshape, r"is \(2, 2\), not"),
        (cut, "is not a whole safetensors file"),
        (remove, "has no adapter_model.safetensors"),
    ],
)
def test_files_that_do_not_fit_are_refused_with_what_is_wrong(
    damage: Callable[[Path], None], message: str, model: Path, adapter: Path
) -> None:
    damage(adapter)
    with pytest.raises(ModelError, match=message):
        check_adapter(adapter, SHAPE, load_decoder(model).config.tensor_shapes())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (AdapterShape(rank=8, alpha=10.0, targets=SHAPE.targets), "has rank 4 and alpha 10"),
        (AdapterShape(rank=4, alpha=1.0, targets=SHAPE.targets), "not rank 4 and alpha 1"),
        (AdapterShape(rank=4, alpha=10.0, targets=("q_proj",)), "is unexpected"),
        (AdapterShape(rank=4, alpha=10.0, targets=(*SHAPE.targets, "o_proj")), "is missing"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    shape: AdapterShape, message: str, model: Path, adapter: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        check_adapter(adapter, shape, load_decoder(model).config.tensor_shapes())


def test_a_directory_without_an_adapter_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config.json"):
        read_adapter_shape(tmp_path)


def test_an_adapter_that_names_no_model_asks_for_one(adapter: Path) -> None:
    edit(adapter, base_model_name_or_path=None)
    with pytest.raises(ModelError, match="--base"):
        base_model(adapter)
