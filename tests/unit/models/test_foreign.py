"""A model that transformers computes, in halves and padded rows, against its own forward."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from foreign_lab import CONFIGS, PLAIN, VOCABULARY, alone, write_foreign
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.decoder import Decoder
from headrace.models.foreign import ForeignDecoder, load_foreign, load_policy, save_foreign
from headrace.models.foreign_config import UNBOUNDED_POSITIONS, ForeignConfig

ROWS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 5], [8, 9, 7, 9])


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    return {family: write_foreign(folder / family, family) for family in CONFIGS}


def padded() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.full((len(ROWS), max(map(len, ROWS))), VOCABULARY - 1)
    for row, own in enumerate(ROWS):
        ids[row, : len(own)] = torch.tensor(own)
    places = [(row, column) for row, own in enumerate(ROWS) for column in range(len(own))]
    rows, columns = torch.tensor(places).T
    return ids, rows, columns


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_logits_of_padded_rows_are_those_of_each_row_alone(
    family: str, directories: dict[str, Path]
) -> None:
    decoder, theirs = load_foreign(directories[family]), alone(directories[family])
    found = decoder.logits(decoder.hidden(*padded()))
    expected = torch.cat([theirs(torch.tensor([row])).logits[0] for row in ROWS])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("family", CONFIGS)
def test_a_plain_output_layer_is_told_from_one_with_more_behind_it(
    family: str, directories: dict[str, Path]
) -> None:
    assert load_foreign(directories[family]).has_plain_head == (family in PLAIN)


@torch.no_grad()
def test_small_logits_do_not_hide_a_cap(directories: dict[str, Path], tmp_path: Path) -> None:
    save_foreign(load_foreign(directories["gemma2"]), tmp_path, directories["gemma2"])
    tensors = load_file(tmp_path / "model.safetensors")
    tiny = {name: tensor * 1e-6 for name, tensor in tensors.items()}
    save_file(tiny, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # By a power of two, which no rounding gives away: 4 tanh(x / 4) is x itself where x is small.
    content = json.loads((tmp_path / "config.json").read_text("utf-8"))
    capped = content | {"final_logit_softcapping": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(capped), encoding="utf-8")
    assert not load_foreign(tmp_path).has_plain_head


def test_dropout_is_never_on(directories: dict[str, Path]) -> None:
    decoder = load_foreign(directories["gpt2"]).train()
    assert not any(module.training for module in decoder.model.modules())
    assert torch.equal(decoder.hidden(*padded()), decoder.hidden(*padded()))


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_saved_transformers_loads_with_the_same_logits(
    family: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    decoder = load_foreign(directories[family])
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)
    save_foreign(decoder, tmp_path / "saved", directories[family])
    theirs, again = alone(tmp_path / "saved"), load_foreign(tmp_path / "saved")
    ids = torch.tensor([ROWS[0]])
    places = torch.zeros(len(ROWS[0]), dtype=torch.int64), torch.arange(len(ROWS[0]))
    with torch.no_grad():
        found = decoder.logits(decoder.hidden(ids, *places))
        torch.testing.assert_close(found, theirs(ids).logits[0], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(),
                                                 strict=True))  # fmt: skip


def test_a_copy_is_a_model_of_its_own(directories: dict[str, Path]) -> None:
    decoder = load_foreign(directories["gpt2"])
    copied = copy.deepcopy(decoder)
    expected = decoder.hidden(*padded())
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
    assert torch.equal(copied.hidden(*padded()), expected)


def test_a_narrower_dtype_is_of_the_weights_and_not_of_the_rotary_table(
    directories: dict[str, Path],
) -> None:
    decoder = load_foreign(directories["olmo2"], torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in decoder.buffers()} == {torch.float32}
    assert decoder.logits(decoder.hidden(*padded())).isfinite().all()


# --- which way a model takes, and what is refused ---------------------------------------------


def test_the_family_decides_who_computes(directories: dict[str, Path], tmp_path: Path) -> None:
    assert isinstance(load_policy(directories["gpt2"]), ForeignDecoder)
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - of this test

    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24}
    config = LlamaConfig(**shape, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert isinstance(load_policy(tmp_path), Decoder)


def test_limits_come_from_the_config(directories: dict[str, Path]) -> None:
    config = ForeignConfig.read(directories["gpt2"])
    assert (config.family, config.vocab_size, config.max_positions) == ("gpt2", VOCABULARY, 64)
    decoder = load_foreign(directories["gpt2"])
    assert config.num_parameters == sum(p.numel() for p in decoder.parameters())


def test_a_model_without_a_limit_has_none(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BloomConfig  # noqa: PLC0415 - of this test

    config = BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert ForeignConfig.read(tmp_path).max_positions == UNBOUNDED_POSITIONS


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BertConfig  # noqa: PLC0415 - of this test

    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24}
    config = BertConfig(**shape, num_hidden_layers=2, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not causal or mixes rows"):
        load_foreign(tmp_path)


@pytest.fixture
def gpt2(directories: dict[str, Path], tmp_path: Path) -> Path:
    save_foreign(load_foreign(directories["gpt2"]), tmp_path / "gpt2", directories["gpt2"])
    return tmp_path / "gpt2"


def test_weights_that_do_not_fit_are_refused_by_name(gpt2: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing keys: transformer.h.1.mlp.c_fc.weight"):
        load_foreign(gpt2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_family"}, "nor one that transformers knows"),
        ({"model_type": "vit"}, "no causal language model to transformers"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized weights"),
    ],
)
def test_what_transformers_cannot_train_is_refused_with_the_reason(
    change: dict[str, object], message: str, gpt2: Path
) -> None:
    content = json.loads((gpt2 / "config.json").read_text("utf-8")) | change
    (gpt2 / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        ForeignConfig.read(gpt2)
