"""What the weight files of a model directory say of themselves, before torch is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.errors import ModelError
from headrace.models.decoder_config import DecoderConfig
from headrace.models.hf_files import check_weights, read_hf_config

CONFIG = DecoderConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
)
INDEX = "model.safetensors.index.json"


def weights(**changes: tuple[int, ...] | None) -> dict[str, Any]:
    shapes = CONFIG.tensor_shapes() | {name.replace("__", "."): s for name, s in changes.items()}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if shape}


def write(directory: Path, **changes: tuple[int, ...] | None) -> Path:
    save_file(weights(**changes), directory / "model.safetensors")
    return directory


def fault(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_weights(directory, CONFIG)
    return str(caught.value)


def test_weights_that_fit_pass_with_what_old_checkpoints_store_beside_them(tmp_path: Path) -> None:
    check_weights(write(tmp_path), CONFIG)
    more = {"lm_head.weight": (16, 8), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    check_weights(write(tmp_path, **more), CONFIG)


def test_every_tensor_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    changes: dict[str, tuple[int, ...] | None] = {
        "model.norm.weight": (3,),
        "model.layers.0.mlp.up_proj.weight": None,
        "model.layers.7.mlp.up_proj.weight": (1,),
    }
    told = fault(write(tmp_path, **changes))
    assert f"{tmp_path}: the weights do not fit config.json" in told
    assert "model.safetensors: model.norm.weight is (3,), not (8,)" in told
    assert "model.safetensors: model.layers.7.mlp.up_proj.weight is unexpected" in told
    assert "model.layers.0.mlp.up_proj.weight is missing" in told


def test_a_long_list_of_misfits_is_cut_with_a_count(tmp_path: Path) -> None:
    assert "and 5 more" in fault(write(tmp_path, **{f"extra.{n}": (1,) for n in range(25)}))


def test_no_weights_at_all_names_the_files_looked_for(tmp_path: Path) -> None:
    assert "no weights: model.safetensors or model.safetensors.index.json" in fault(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin but no safetensors" in fault(tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert f"{path} is not a whole safetensors file" in fault(tmp_path)


def test_shards_count_together_and_a_missing_one_is_named(tmp_path: Path) -> None:
    tensors = weights()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    check_weights(tmp_path, CONFIG)
    assert load_file(tmp_path / "a.safetensors").keys() == set(names[:3])
    (tmp_path / "b.safetensors").unlink()
    assert "names files that are not there: b.safetensors" in fault(tmp_path)


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {"a": 3}}])
def test_an_index_of_another_form_is_named(tmp_path: Path, content: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps(content), encoding="utf-8")
    assert f"{tmp_path / INDEX}: weight_map must be" in fault(tmp_path)


def test_reading_the_headers_takes_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from headrace.errors import ModelError\n"
        "from headrace.models.decoder_config import DecoderConfig\n"
        "from headrace.models.hf_files import check_weights\n"
        "config = DecoderConfig.from_hf(dict(model_type='llama', vocab_size=8, hidden_size=4,\n"
        "    intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,\n"
        "    max_position_embeddings=8))\n"
        f"try: check_weights(Path({str(write(tmp_path))!r}), config)\n"
        "except ModelError: sys.exit('torch' in sys.modules)\n"
        "sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_config_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ModelError, match=r"config\.json cannot be read: .*Permission denied"):
        read_hf_config(tmp_path)


def test_a_config_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_hf_config(tmp_path)
