"""What runs rest on and what shows nowhere else: one rounding, one factor, one pragma."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.data import Ledger
from headrace.generators.torch_engine.rollout_state import sampling_rows
from headrace.generators.torch_engine.sampling import BLOCK, draw
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.checkpoint import load_decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.hf_files import read_hf_config
from headrace.models.rope import rope_table
from headrace.types import SamplingParams

LIKELY = BLOCK + 1


def rounded_up() -> tuple[Tensor, Tensor]:
    """Return logits [1, 2 * BLOCK] and a uniform that lands below the block it is drawn into.

    One token of the first block has a tiny weight w, one of the second nearly all, and all others
    none. In float64 (w + 1) - 1 may come out above w: where the second block seems to begin.
    """
    for step in range(1000):
        logits = torch.full((1, 2 * BLOCK), -1e4)
        logits[0, 0], logits[0, LIKELY] = -20.0 - step / 997, 0.0
        weights = torch.softmax(logits, -1)[0].double()
        tiny, total = float(weights[0]), float(weights[0]) + float(weights[LIKELY])
        uniform = tiny / total
        begins = total - float(weights[LIKELY])
        if tiny <= uniform * total < begins:
            return logits, torch.tensor([uniform], dtype=torch.float64)
    pytest.fail("no such rounding was found")


def test_a_target_below_its_block_by_a_rounding_finds_no_token_of_weight_0() -> None:
    logits, uniform = rounded_up()

    drawn = draw(logits, sampling_rows([SamplingParams()]), uniform)

    assert drawn.ids.tolist() == [LIKELY], "and not the first of its block, which has no weight"
    assert drawn.logprobs.tolist() == pytest.approx([0.0], abs=1e-6)


LINEAR = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
    rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
)


def test_linear_rope_scaling_turns_by_the_angles_of_transformers() -> None:
    config = DecoderConfig.from_hf(LINEAR.to_dict())
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 4.0)

    cos, sin = rope_table(config)

    theirs = LlamaRotaryEmbedding(LINEAR)(torch.zeros(1), torch.arange(64).unsqueeze(0))
    sign = torch.where(torch.arange(config.head_dim) < config.head_dim // 2, -1.0, 1.0)
    torch.testing.assert_close(cos, theirs[0][0])
    torch.testing.assert_close(sin, sign * theirs[1][0])


@torch.no_grad()
def test_a_model_with_linear_rope_scaling_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LINEAR).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(50, (40,))

    ours = load_decoder(tmp_path)

    assert read_hf_config(tmp_path)["rope_parameters"]["rope_type"] == "linear"
    hidden = ours(ids, positions_of([40]), PackedCausal([40], ours.config.windows))
    difference = ours.logits(hidden) - theirs(ids.unsqueeze(0)).logits[0]
    assert difference.abs().max() <= 1e-5


def test_the_ledger_waits_for_the_disk_at_every_commit(tmp_path: Path) -> None:
    full, truncate = 2, "truncate"
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        pragma = ledger._connection.execute
        assert pragma("PRAGMA synchronous").fetchone() == (full,)
        assert pragma("PRAGMA journal_mode").fetchone() == (truncate,)
