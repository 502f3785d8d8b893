"""The torch engine in a member's process, with weights that both sides know without sending any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from headrace.compute import ComputeThread
from headrace.generators import TorchGenerator
from headrace.generators.pool.proxy import Hosted
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import weight_update
from headrace.types import WeightNotice, WeightUpdate

CONFIG = DecoderConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    }
)


def weights(version: int) -> WeightUpdate:
    """Those of a version, large enough that no distribution is flat."""
    decoder = Decoder(CONFIG).requires_grad_(requires_grad=False)
    dice = torch.Generator().manual_seed(version)
    for parameter in decoder.parameters():
        noise = torch.randn(parameter.shape, generator=dice)
        parameter.copy_(noise * 0.3 + (parameter.dim() == 1))
    return weight_update(version, dict(decoder.named_parameters()))


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(64 + token) for token in ids)


class SeededReader:
    def open(self, notice: WeightNotice) -> AbstractContextManager[WeightUpdate]:
        return nullcontext(weights(notice.policy_version))

    def close(self) -> None:
        pass


def generator() -> tuple[TorchGenerator, ComputeThread]:
    compute = ComputeThread("generator", 1)
    made = TorchGenerator(CONFIG, decode=decode, compute=compute, batch_invariant=True)
    return made, compute


@dataclass(frozen=True)
class TorchSpec:
    """Builds it in a child process."""

    def build(self) -> Hosted:
        made, _ = generator()
        return Hosted(generator=made, weights=SeededReader())
