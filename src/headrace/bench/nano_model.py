"""A Llama of 3.2 million parameters with random weights, as a checkpoint that every engine loads.

At that size a decode step is little arithmetic and much else: what an engine does around it shows.
"""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_nano_model(directory: Path) -> Path:
    """Write the checkpoint into ``directory``, which is made, and return it."""
    import torch
    from safetensors.torch import save_file

    from headrace.models.decoder import Decoder
    from headrace.models.decoder_config import DecoderConfig

    directory.mkdir()
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(weight.shape) if weight.dim() == 1 else torch.randn(weight.shape) * 0.05
        for name, weight in Decoder(DecoderConfig.from_hf(CONFIG)).named_parameters()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return directory
