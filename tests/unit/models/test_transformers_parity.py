from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from headrace.models.attention import PackedCausal, positions_of
from headrace.models.checkpoint import load_decoder, save_decoder
from headrace.models.decoder import Decoder
from headrace.models.hf_files import read_hf_config
from headrace.models.tokenizer import Tokenizer
from headrace.types import Message

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
TEMPLATE = (
    "{% for m in messages %}{{ bos_token + m['role'] + ': ' + m['content'] + eos_token }}"
    "\n{% endfor %}{% if add_generation_prompt %}{{ bos_token }}policy: {% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama-scaled-rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral-sliding": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-sliding": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-tied": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}
LENGTH = 24
TOLERANCE = 2e-5
"""Of logits that reach 6: some units in the last place, after sums in another order."""


def _theirs(name: str) -> PreTrainedModel:
    """Random weights everywhere, biases and norms included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def _difference(ours: Decoder, theirs: PreTrainedModel) -> float:
    """Largest absolute difference of the logits over two sequences."""
    ids = torch.randint(300, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = [LENGTH, LENGTH]
    attention = PackedCausal(lengths, ours.config.windows)
    logits = ours.logits(ours(ids.flatten(), positions_of(lengths), attention))
    return float((theirs(ids).logits.flatten(0, 1) - logits).abs().max())


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_of_transformers_gives_the_same_logits_here(
    name: str, max_shard_size: str, tmp_path: Path
) -> None:
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    assert _difference(load_decoder(tmp_path), theirs) <= TOLERANCE


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_written_here_gives_the_same_logits_in_transformers(
    name: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    _theirs(name).save_pretrained(source)
    ours = load_decoder(source)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.01)
    hf_config = read_hf_config(source)
    save_decoder(ours, target, hf_config, source, max_shard_bytes=max_shard_bytes)
    assert (target / "generation_config.json").exists()
    reloaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values())
    assert reloaded.dtype == torch.float32
    assert _difference(ours, reloaded.eval()) <= TOLERANCE


def test_ids_and_text_are_those_of_transformers_also_after_saving(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    _write_tokenizer(source)
    target.mkdir()
    ours = Tokenizer.load(source)
    ours.save(target)
    theirs = AutoTokenizer.from_pretrained(target)
    turns = [("system", "Add."), ("user", " 12+7 é\n\n<|im_end|>"), ("user", "{{ 'x' }}")]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        return_dict=False,
    )
    ids = ours.render([Message(role=role, content=content) for role, content in turns])
    assert list(ids) == expected
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_transformers_reads_the_dtype_that_was_written(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    _theirs("llama").save_pretrained(source)
    save_decoder(load_decoder(source), target, read_hf_config(source), source, dtype=torch.bfloat16)
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(target, dtype="auto").dtype == torch.bfloat16
