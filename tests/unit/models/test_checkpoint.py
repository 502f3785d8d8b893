from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, ModelError
from headrace.models.checkpoint import (
    load_decoder,
    save_decoder,
)
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.hf_files import ignored_sampling_options, read_hf_config

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "a_key_of_somebody_else": {"kept": True},
}


def _decoder(**changes: object) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig.from_hf({**CONFIG, **changes}))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_()
    return decoder


def _save(directory: Path, decoder: Decoder | None = None, **options: Any) -> Path:  # noqa: ANN401 - of save_decoder
    hf_config = options.pop("hf_config", CONFIG)
    save_decoder(decoder or _decoder(), directory, hf_config, directory, **options)
    return directory


def _edit_weights(directory: Path, edit: Mapping[str, torch.Tensor | None]) -> None:
    """Replace, add, or with None remove tensors in ``directory``."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.update({name: tensor for name, tensor in edit.items() if tensor is not None})
    for name in (name for name, tensor in edit.items() if tensor is None):
        del tensors[name]
    save_file(tensors, path)


def _assert_same_weights(left: Decoder, right: Decoder) -> None:
    expected, found = dict(left.named_parameters()), dict(right.named_parameters())
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def _logits(decoder: Decoder) -> torch.Tensor:
    """Uniform attention over the values: enough to depend on every weight but q and k."""
    heads = decoder.config.num_heads

    def attention(
        _layer: int, _query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return value.mean(0, keepdim=True).expand(len(value), heads, -1)

    ids = torch.arange(4)
    return decoder.logits(decoder(ids, ids, attention))


def test_a_saved_decoder_loads_bit_for_bit(tmp_path: Path) -> None:
    decoder = _decoder()
    loaded = load_decoder(_save(tmp_path, decoder))
    _assert_same_weights(decoder, loaded)
    assert torch.equal(_logits(decoder), _logits(loaded))


def test_rotary_tables_are_there_after_loading(tmp_path: Path) -> None:
    decoder = _decoder()
    loaded = load_decoder(_save(tmp_path, decoder))
    assert torch.equal(loaded.model.rope_cos, decoder.model.rope_cos)
    assert torch.equal(loaded.model.rope_sin, decoder.model.rope_sin)


def test_loading_does_not_import_the_kernels_of_the_meta_device(
    tmp_path: Path,
) -> None:
    # 800 modules and several seconds between the command and the first rollout.
    program = (
        "import sys; from pathlib import Path; from headrace.models.checkpoint import load_decoder;"
        f"load_decoder(Path({str(_save(tmp_path))!r})); sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    decoder = _decoder()
    loaded = load_decoder(_save(tmp_path, decoder), dtype=torch.bfloat16)
    expected = decoder.model.norm.weight.bfloat16()
    assert torch.equal(loaded.model.norm.weight, expected)


def test_a_tied_head_follows_its_embedding(tmp_path: Path) -> None:
    loaded = load_decoder(_save(tmp_path))
    with torch.no_grad():
        loaded.model.embed_tokens.weight.zero_()
    assert not load_file(tmp_path / "model.safetensors").keys() & {"lm_head.weight"}
    assert _logits(loaded).abs().max() == 0


@pytest.mark.parametrize("max_shard_bytes", [1, 700, 2000])
def test_shards_load_as_one_model_and_the_index_accounts_for_every_byte(
    tmp_path: Path, max_shard_bytes: int
) -> None:
    decoder = _decoder()
    _save(tmp_path, decoder, max_shard_bytes=max_shard_bytes)
    _assert_same_weights(decoder, load_decoder(tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert not (tmp_path / "model.safetensors").exists()
    assert all(name in shards[place] for name, place in index["weight_map"].items())
    sizes = [sum(t.numel() * 4 for t in shard.values()) for shard in shards.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    for size, shard in zip(sizes, shards.values(), strict=True):
        assert size <= max_shard_bytes or len(shard) == 1


def test_the_config_is_kept_but_for_the_dtype(tmp_path: Path) -> None:
    _save(tmp_path)
    assert read_hf_config(tmp_path) == {**CONFIG, "torch_dtype": "float32"}


def test_a_new_style_config_gets_its_dtype_under_the_new_name(tmp_path: Path) -> None:
    hf_config = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    _save(tmp_path, hf_config=hf_config, dtype=torch.bfloat16)
    assert read_hf_config(tmp_path)["dtype"] == "bfloat16"


def test_tokenizer_template_and_generation_config_come_from_the_source(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "chat_templates").mkdir(parents=True)
    names = ["tokenizer.json", "chat_template.jinja", "generation_config.json"]
    for name in [*names, "chat_templates/tool.jinja", "training_args.bin"]:
        (source / name).write_text(name)
    save_decoder(_decoder(), target, CONFIG, source)
    assert all((target / name).read_text() == name for name in names)
    assert (target / "chat_templates" / "tool.jinja").exists()
    assert not (target / "training_args.bin").exists()


def test_saving_over_other_weights_is_refused(tmp_path: Path) -> None:
    _save(tmp_path)
    with pytest.raises(ModelError, match="already holds weights"):
        _save(tmp_path)


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model\.safetensors could not be written"):
            _save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_tensor_that_does_not_fit_is_listed_in_one_error(tmp_path: Path) -> None:
    _save(tmp_path)
    strange = {"model.layers.7.mlp.up_proj.weight": torch.zeros(1)}
    wrong = {"model.norm.weight": torch.zeros(3)}
    gone = {"model.layers.1.mlp.up_proj.weight": None}
    _edit_weights(tmp_path, {**strange, **wrong, **gone})
    with pytest.raises(ModelError) as caught:
        load_decoder(tmp_path)
    text = str(caught.value)
    assert "model.safetensors: model.norm.weight is (3,), not (8,)" in text
    assert "model.safetensors: model.layers.7.mlp.up_proj.weight is unexpected" in text
    assert "model.layers.1.mlp.up_proj.weight is missing" in text


def test_a_long_list_of_faults_is_cut_with_a_count(tmp_path: Path) -> None:
    _save(tmp_path)
    _edit_weights(tmp_path, {f"extra.{index}": torch.zeros(1) for index in range(25)})
    with pytest.raises(ModelError, match="and 5 more"):
        load_decoder(tmp_path)


def test_an_untied_model_without_its_head_is_not_given_a_random_one(tmp_path: Path) -> None:
    _save(tmp_path, hf_config={**CONFIG, "tie_word_embeddings": False})
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load_decoder(tmp_path)


def test_a_stored_copy_of_a_tied_head_is_accepted(tmp_path: Path) -> None:
    decoder = _decoder()
    _save(tmp_path, decoder)
    head = decoder.model.embed_tokens.weight.detach().clone()
    old_table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    _edit_weights(tmp_path, {"lm_head.weight": head, **old_table})
    _assert_same_weights(decoder, load_decoder(tmp_path))


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    _save(tmp_path)
    _edit_weights(tmp_path, {"lm_head.weight": torch.ones(16, 8)})
    with pytest.raises(ModelError, match="set tie_word_embeddings = false"):
        load_decoder(tmp_path)


def test_an_unknown_family_is_named_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    with pytest.raises(ModelError, match=r"model_type 'mamba'.*llama, mistral, qwen2, qwen3"):
        load_decoder(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"no model directory {tmp_path}/gone"):
        load_decoder(tmp_path / "gone")


def test_a_directory_without_a_config_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(("content", "fault"), [("{", "not valid JSON"), ("[]", "JSON object")])
def test_a_damaged_config_is_named(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json .*{fault}"):
        read_hf_config(tmp_path)


def test_a_directory_without_weights_names_the_files_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"no weights: model\.safetensors or"):
        load_decoder(tmp_path)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin but no safetensors.*save_pretrained"):
        load_decoder(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    _save(tmp_path, max_shard_bytes=2000)
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelError, match=f"not there: {shard.name}"):
        load_decoder(tmp_path)


def test_a_cut_weight_file_is_named(tmp_path: Path) -> None:
    path = _save(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        load_decoder(tmp_path)


def test_sampling_options_that_change_something_are_reported(tmp_path: Path) -> None:
    options = {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "repetition_penalty": 1.05}
    others = {"eos_token_id": 2, "do_sample": True, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps({**options, **others}))
    expected = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert ignored_sampling_options(tmp_path) == expected


def test_without_a_generation_config_nothing_is_ignored(tmp_path: Path) -> None:
    assert ignored_sampling_options(tmp_path) == {}
