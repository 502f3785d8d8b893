from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.errors import ModelError
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.decoder import Decoder, RMSNorm
from headrace.models.decoder_config import DecoderConfig
from headrace.models.rope import apply_rope, rope_table

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def config(**changes: object) -> DecoderConfig:
    return DecoderConfig.from_hf({**SHAPE, **changes})


@torch.no_grad()
def forward(decoder: Decoder, *sequences: list[int]) -> torch.Tensor:
    lengths = [len(ids) for ids in sequences]
    ids = torch.tensor([token for ids in sequences for token in ids])
    attention = PackedCausal(lengths, decoder.config.windows)
    return decoder.logits(decoder(ids, positions_of(lengths), attention))


def test_packed_together_is_the_same_as_alone() -> None:
    torch.manual_seed(0)
    decoder = Decoder(config())
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    together = forward(decoder, *sequences)
    alone = torch.cat([forward(decoder, ids) for ids in sequences])
    assert torch.allclose(together, alone, atol=1e-5)


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    decoder = Decoder(config())
    assert torch.allclose(
        forward(decoder, [1, 2, 3, 4])[:3], forward(decoder, [1, 2, 3, 9])[:3], atol=1e-6
    )


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied, untied = Decoder(config(tie_word_embeddings=True)), Decoder(config())
    assert tied.output_weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert untied.output_weight is untied.lm_head.weight


def test_rotation_depends_on_the_distance_alone_and_keeps_length() -> None:
    cos, sin = rope_table(config())
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 4), torch.randn(1, 1, 4)

    def score(i: int, j: int) -> float:
        turned = apply_rope(query, cos[i : i + 1], sin[i : i + 1])
        return float((turned * apply_rope(key, cos[j : j + 1], sin[j : j + 1])).sum())

    assert score(7, 4) == pytest.approx(score(20, 17), abs=1e-5)
    assert score(7, 4) != pytest.approx(score(20, 16), abs=1e-3)
    assert score(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-6)


def test_the_norm_is_taken_in_fp32() -> None:
    norm = RMSNorm(4, 0.0).to(torch.float16)
    out = norm(torch.full((1, 4), 300.0, dtype=torch.float16))  # 300 squared overflows fp16
    assert out.tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 5}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 5}, (5, 5)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        # What transformers takes where the key is absent.
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
        ({"model_type": "qwen2", "sliding_window": 5}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True}, (None, None)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 5),
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (5, None),
        ),
    ],
)
def test_windows_are_read_as_each_family_means_them(
    changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert config(**changes).windows == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma' is not one of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_config_the_decoder_cannot_compute_is_refused_by_its_key(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        config(**changes)
