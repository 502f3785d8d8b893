"""Greedy rollouts against transformers.generate, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-mqa": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "llama-mha": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "mistral-sliding": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-sliding": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3-tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
}
LENGTHS = (1, 9, 4)
NEW = 20


@pytest.mark.parametrize("head_dim", [8, 32], ids=["operators", "kernels"])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_rollouts_are_the_tokens_of_transformers(lab: Lab, name: str, head_dim: int) -> None:
    torch.manual_seed(0)
    config = type(CONFIGS[name])(**{**CONFIGS[name].to_dict(), "head_dim": head_dim})
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ours = Decoder(DecoderConfig.from_hf(config.to_dict())).requires_grad_(requires_grad=False)
    ours.load_state_dict(dict(theirs.named_parameters()))
    prompts = [torch.randint(60, (length,)).tolist() for length in LENGTHS]
    requests = [
        lab.request(str(i), ids, size=2, temperature=0.0, max_tokens=NEW)
        for i, ids in enumerate(prompts)
    ]
    groups = lab.run(ours, requests)
    for index, ids in enumerate(prompts):
        expected = theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
        )[0, len(ids) :].tolist()
        for rollout in groups[str(index)].rollouts:
            assert list(rollout.completion_ids) == expected
