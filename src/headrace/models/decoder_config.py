"""The shape of a decoder, read from a Hugging Face ``config.json``.

Knows how each family spells its differences and refuses what the decoder does not compute, so that
a model either runs with the right mathematics or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headrace.errors import ModelError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
"""``model_type`` of config.json; SmolLM2 is a ``llama``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts."""

    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything the decoder's mathematics depends on."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: a query at position i sees keys j with i - j < window; None sees all."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, origin: str = "config.json") -> DecoderConfig:
        """Read the dictionary of a ``config.json``. Raises ModelError naming ``origin``."""
        family = _family(config, origin)
        _refuse_unsupported(config, origin)
        num_layers, num_heads = (
            _int(config, "num_hidden_layers", origin),
            _int(config, "num_attention_heads", origin),
        )
        hidden_size = _int(config, "hidden_size", origin)
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=_int(config, "vocab_size", origin),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size", origin),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=_int(config, "max_position_embeddings", origin),
            rope_theta=_rope_theta(config),
            rope_scaling=_rope_scaling(config, origin),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            windows=_windows(config, family, num_layers),
        )


def _family(config: Mapping[str, Any], origin: str) -> Family:
    model_type = config.get("model_type")
    for family in get_args(Family):
        if model_type == family:
            return family  # type: ignore[no-any-return]
    supported = ", ".join(get_args(Family))
    msg = (
        f"{origin}: model_type {model_type!r} is not one of the families headrace computes: "
        f"{supported} (SmolLM2 is a llama)"
    )
    raise ModelError(msg)


def _refuse_unsupported(config: Mapping[str, Any], origin: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        msg = f"{origin}: hidden_act {activation!r} is not supported; the decoder computes silu"
        raise ModelError(msg)
    if config.get("quantization_config"):
        msg = f"{origin}: quantized weights cannot be trained; use the unquantized checkpoint"
        raise ModelError(msg)


def _int(config: Mapping[str, Any], key: str, origin: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        msg = f"{origin}: {key} = {value!r} must be a positive whole number"
        raise ModelError(msg)
    return value


def _rope_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what transformers 5 calls ``rope_parameters`` and earlier ones ``rope_scaling``."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert isinstance(section, Mapping)
    return section


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float(_rope_section(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _rope_scaling(config: Mapping[str, Any], origin: str) -> RopeScaling:
    section = _rope_section(config)
    kind = section.get("rope_type") or section.get("type") or "default"
    if float(section.get("partial_rotary_factor") or 1.0) != 1.0:
        msg = f"{origin}: partial_rotary_factor is not supported"
        raise ModelError(msg)
    match kind:
        case "default":
            return RopeScaling()
        case "linear":
            return RopeScaling(kind="linear", factor=float(section["factor"]))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(section["factor"]),
                low_frequency_factor=float(section["low_freq_factor"]),
                high_frequency_factor=float(section["high_freq_factor"]),
                original_max_positions=int(section["original_max_position_embeddings"]),
            )
        case _:
            msg = f"{origin}: rope type {kind!r} is not one of default, linear, llama3"
            raise ModelError(msg)


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * num_layers
    if family == "mistral":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= config.get("max_window_layers", 28) else "full_attention"
        for layer in range(num_layers)
    ]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
