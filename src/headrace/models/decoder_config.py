"""The shape of a decoder, read from a Hugging Face ``config.json``.

Knows how each family spells its differences and refuses what the decoder does not compute, so that
a model either runs with the right mathematics or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

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
        read = _Reader(config, origin)
        num_layers, hidden_size = read.whole("num_hidden_layers"), read.whole("hidden_size")
        num_heads = read.whole("num_attention_heads")
        attention_bias = read.flag("attention_bias")
        return cls(
            family=family,
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.whole("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(read, num_heads),
            head_dim=_head_dim(read, hidden_size, num_heads),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            max_positions=read.whole("max_position_embeddings"),
            rope_theta=_rope_theta(read),
            rope_scaling=_rope_scaling(read),
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=read.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            windows=_windows(read, family, num_layers),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every weight, named as in Hugging Face checkpoints."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        for layer in range(self.num_layers):
            shapes |= {
                f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes()
            }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = (
            ("self_attn.q_proj", width, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv_width, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv_width, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, width, self.output_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        )
        for name, rows, columns, has_bias in linears:
            yield f"{name}.weight", (rows, columns)
            if has_bias:
                yield f"{name}.bias", (rows,)
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Values of one JSON object, each of the kind it must have, or a ModelError."""

    values: Mapping[str, Any]
    origin: str
    above: str = ""
    """Keys that lead to the object, each with a dot behind it."""

    def get(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - whatever JSON can hold
        return self.values.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "must be a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            self.refuse(key, "must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return bool(value)

    def refuse(self, key: str, rule: str) -> NoReturn:
        msg = f"{self.origin}: {self.above}{key} = {self.get(key)!r} {rule}"
        raise ModelError(msg)


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


def _num_kv_heads(read: _Reader, num_heads: int) -> int:
    if read.get("num_key_value_heads") is None:
        return num_heads
    num_kv_heads = read.whole("num_key_value_heads")
    if num_heads % num_kv_heads:
        read.refuse("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    return num_kv_heads


def _head_dim(read: _Reader, hidden_size: int, num_heads: int) -> int:
    if read.get("head_dim") is None:
        if hidden_size % (2 * num_heads):
            rule = (
                f"must be a multiple of 2 * num_attention_heads = {2 * num_heads}, or give head_dim"
            )
            read.refuse("hidden_size", rule)
        return hidden_size // num_heads
    head_dim = read.whole("head_dim")
    if head_dim % 2:
        read.refuse("head_dim", "must be even: rotary embeddings turn pairs")
    return head_dim


def _rope_reader(read: _Reader) -> _Reader:
    """Return what transformers 5 calls ``rope_parameters`` and earlier ones ``rope_scaling``."""
    name = "rope_parameters" if read.get("rope_parameters") else "rope_scaling"
    section = read.get(name) or {}
    if not isinstance(section, Mapping):
        read.refuse(name, 'must be an object such as {"rope_type": "linear", "factor": 2.0}')
    return _Reader(section, read.origin, above=f"{name}.")


def _rope_theta(read: _Reader) -> float:
    for reader in (_rope_reader(read), read):
        if reader.get("rope_theta") is not None:
            return reader.number("rope_theta")
    return 10000.0


def _rope_scaling(read: _Reader) -> RopeScaling:
    section = _rope_reader(read)
    kind = section.get("rope_type") or section.get("type") or "default"
    if (section.get("partial_rotary_factor") or 1.0) != 1.0:
        section.refuse("partial_rotary_factor", "is not supported; only 1.0 is")
    match kind:
        case "default":
            return RopeScaling()
        case "linear":
            return RopeScaling(kind="linear", factor=section.number("factor"))
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if high <= low:
                section.refuse("high_freq_factor", f"must be above low_freq_factor = {low:g}")
            return RopeScaling(
                kind="llama3",
                factor=section.number("factor"),
                low_frequency_factor=low,
                high_frequency_factor=high,
                original_max_positions=section.whole("original_max_position_embeddings"),
            )
        case _:
            msg = f"{read.origin}: rope type {kind!r} is not one of default, linear, llama3"
            raise ModelError(msg)


SLIDING_WINDOW = 4096
"""Of Mistral, Qwen2 and Qwen3 where config.json does not say."""


def _windows(read: _Reader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    # Null means none; a key that is absent, what transformers' classes of these families take.
    if family == "llama" or read.get("sliding_window", SLIDING_WINDOW) is None:
        return (None,) * num_layers
    window = read.whole("sliding_window", SLIDING_WINDOW)
    if family == "mistral":
        return (window,) * num_layers
    if not read.flag("use_sliding_window"):
        return (None,) * num_layers
    slides = _sliding_layers(read, num_layers)
    return tuple(window if slides[layer] else None for layer in range(num_layers))


def _sliding_layers(read: _Reader, num_layers: int) -> list[bool]:
    kinds = read.get("layer_types")
    if kinds:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            read.refuse("layer_types", f"must be a list of {num_layers}, one for each layer")
        return [kind == "sliding_attention" for kind in kinds]
    first = read.get("max_window_layers", 28)
    if not isinstance(first, int):
        read.refuse("max_window_layers", "must be a whole number")
    return [layer >= first for layer in range(num_layers)]
