"""Rotary position embeddings (Su et al., arXiv 2104.09864), in Hugging Face's half-split layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.models.decoder_config import DecoderConfig, RopeScaling


def rope_table(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [max_positions, head_dim] in fp32, as `apply_rope` takes them.

    Both halves of a head turn by the same angles; the first half of sin is negated.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``states`` [N, heads, head_dim] by rows of `rope_table` [N, head_dim].

    (a, b) becomes (a cos - b sin, b cos + a sin) for the two halves a and b of a head.
    """
    cos, sin = cos.unsqueeze(1).to(states.dtype), sin.unsqueeze(1).to(states.dtype)
    return states * cos + states.roll(states.shape[-1] // 2, -1) * sin


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    match scaling.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep short wavelengths, divide long ones by ``factor``, blend in between (Llama 3.1)."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return blend * frequencies + (1.0 - blend) * frequencies / scaling.factor
