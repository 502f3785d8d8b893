"""What a config.json must say, and the weights that follow from it; all of it without torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.errors import ModelError
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral", "head_dim": 6},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 6, "num_key_value_heads": None},
    ],
)
def test_the_shapes_said_beforehand_are_those_of_the_decoder(changes: dict[str, Any]) -> None:
    config = DecoderConfig.from_hf(CONFIG | changes)
    with torch.device("meta"):
        decoder = Decoder(config)
    expected = {name: tuple(tensor.shape) for name, tensor in decoder.named_parameters()}
    assert config.tensor_shapes() == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": "linear"}, r"rope_scaling = 'linear' must be an object"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor = None must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor = 0 must be a number above 0"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": "x"}}, r"low_freq_factor = 'x'"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, r"high_freq_factor = 1 must be above"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
            r"original_max_position_embeddings = None must be a positive whole",
        ),
        ({"rope_scaling": {"partial_rotary_factor": "half"}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope type \['linear'\] is not one of"),
        ({"rms_norm_eps": None}, r"rms_norm_eps = None must be a number above 0"),
        ({"rms_norm_eps": True}, r"rms_norm_eps = True must be a number above 0"),
        ({"rope_theta": "x"}, r"rope_theta = 'x' must be a number above 0"),
        ({"rope_theta": float("inf")}, r"rope_theta = inf must be a number above 0"),
        ({"vocab_size": True}, r"vocab_size = True must be a positive whole number"),
        ({"num_key_value_heads": "2"}, r"num_key_value_heads = '2' must be a positive whole"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, r"num_key_value_heads = 3 .*4"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, r"hidden_size = 8 .*head_dim"),
        ({"head_dim": 3}, r"head_dim = 3 must be even"),
        ({"head_dim": "x"}, r"head_dim = 'x' must be a positive whole number"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings = 'false' must be true or false"),
        ({"model_type": "mistral", "sliding_window": "x"}, r"sliding_window = 'x'"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            r"layer_types = .* must be a list of 2",
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4,
                "use_sliding_window": True,
                "max_window_layers": None,
            },
            r"max_window_layers = None must be a whole number",
        ),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named_with_what_it_must_be(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=rf"somewhere/config\.json: .*{told}"):
        DecoderConfig.from_hf(CONFIG | changes, origin="somewhere/config.json")


def test_settings_left_out_take_the_values_transformers_gives_them() -> None:
    config = DecoderConfig.from_hf(CONFIG | {"rope_scaling": None, "rope_theta": None})
    assert (config.rope_theta, config.rms_norm_eps, config.rope_scaling.factor) == (1e4, 1e-6, 1.0)
    windows = DecoderConfig.from_hf(
        CONFIG | {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True}
    ).windows
    assert windows == (None, None)
