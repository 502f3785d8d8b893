"""Small random models of families that the decoder does not compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    # Dropout is in the config on purpose: log-probs must be those without it.
    "attn_pdrop": 0.5,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 8}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE,
        **GROUPED,
        sliding_window=4,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=3.0,
    ),
    "phi": lambda: transformers.PhiConfig(**SHAPE, resid_pdrop=0.5),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE),
    "granite": lambda: transformers.GraniteConfig(**SHAPE, logits_scaling=3.0),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, **GROUPED, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
    ),
}
PLAIN = {"gpt2", "olmo2", "qwen3_moe"}
"""Those whose logits are hidden states times a matrix and nothing else."""


def write_foreign(directory: Path, family: str) -> Path:
    """Write a random model, biases and norms included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def alone(directory: Path) -> Any:  # noqa: ANN401 - transformers has no types
    """Return transformers' own model of a directory, for computing one row at a time."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
