"""One decoder for the Llama-shaped families, in plain torch.

Generator and learner run this same code. It works on packed tokens ``[N, ...]``: no batch axis, no
padding, every token with its own position. How tokens see each other is not its business: an
`Attention` is handed in, and the generator's cache, the learner's shared prefixes and a plain
causal sequence are three of them. Nor is how a weight matrix is stored: the generator hands in
`Products` over matrices of its own. Parameters are named as in Hugging Face checkpoints.

Left out on purpose: dropout, sampling, caches, anything that depends on a batch layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headrace.models.decoder_config import DecoderConfig
from headrace.models.layer_ops import add_and_norm, gated, rotated
from headrace.models.rope import rope_table


class Attention(Protocol):
    """Mixes the tokens of one forward pass, layer by layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [N, heads, head_dim] for ``query`` of that shape.

        ``key`` and ``value`` are [N, kv_heads, head_dim] of the same N tokens, rotated already.
        """
        ...


class Products(Protocol):
    """Multiplies by weight matrices."""

    def __call__(self, hidden: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """Return ``linear(hidden)`` for each of ``linears``, which read the same input."""
        ...


def plain_products(hidden: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Multiply by the modules' own weights: the differentiable `Products`."""
    return [linear(hidden) for linear in linears]


class Decoder(nn.Module):
    """A causal language model over packed tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden] of the output projection: the embedding itself when tied."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    @property
    def output_name(self) -> str:
        """Name of the parameter that is `output_weight`."""
        tied = self.config.tie_word_embeddings
        return "model.embed_tokens.weight" if tied else "lm_head.weight"

    def linears(self) -> Iterator[tuple[nn.Linear, ...]]:
        """Yield the matrices of each product of a forward pass, as `Products` gets them."""
        for layer in self.model.layers:
            assert isinstance(layer, _Layer)
            yield layer.self_attn.inputs()
            yield (layer.self_attn.o_proj,)
            yield layer.mlp.inputs()
            yield (layer.mlp.down_proj,)

    def recompute_layers(self) -> None:
        """Keep only each layer's input for the backward pass, which computes the layer again."""
        for layer in self.model.layers:
            assert isinstance(layer, _Layer)
            layer.is_recomputed = True

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        products: Products = plain_products,
    ) -> Tensor:
        """Return the final hidden states [N, hidden] of ``input_ids`` [N] at ``positions`` [N]."""
        hidden: Tensor = self.model(input_ids, positions, attention, products)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [N, vocab] for ``hidden`` [N, hidden]; ask for the rows that matter only."""
        return functional.linear(hidden, self.output_weight)


class _Body(nn.Module):
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("rope_cos", torch.empty(0), persistent=False)
        self.register_buffer("rope_sin", torch.empty(0), persistent=False)
        self.fill_rope(config)

    def fill_rope(self, config: DecoderConfig) -> None:
        """Compute the rotary tables; `to_empty` loses them, since no checkpoint holds them."""
        device, dtype = self.embed_tokens.weight.device, self.embed_tokens.weight.dtype
        cos, sin = rope_table(config)
        self.rope_cos, self.rope_sin = cos.to(device, dtype), sin.to(device, dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, products: Products
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rope_cos[positions], self.rope_sin[positions]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attention, products)
        normed: Tensor = self.norm(hidden)
        return normed


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _SelfAttention(config, index)
        self.mlp = _Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_recomputed = False

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention, products: Products
    ) -> Tensor:
        if not (self.is_recomputed and torch.is_grad_enabled()):
            return self._transform(hidden, cos, sin, attention, products)
        # Nothing here draws a random number, so there is no state of one to put back.
        out: Tensor = checkpoint(
            self._transform,
            hidden,
            cos,
            sin,
            attention,
            products,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return out

    def _transform(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention, products: Products
    ) -> Tensor:
        hidden, normed = self.input_layernorm.with_residual(hidden)
        mixed = self.self_attn(normed, cos, sin, attention, products)
        hidden, normed = self.post_attention_layernorm.with_residual(hidden, mixed)
        out: Tensor = hidden + self.mlp(normed, products)
        return out


class _SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def inputs(self) -> tuple[nn.Linear, ...]:
        """The matrices that read the layer's input."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention, products: Products
    ) -> Tensor:
        query, key, value = (
            states.reshape(len(hidden), -1, self.head_dim)
            for states in products(hidden, self.inputs())
        )
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = attention(self.index, query, key, value)
        (out,) = products(mixed.flatten(-2), (self.o_proj,))
        return out


class _Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def inputs(self) -> tuple[nn.Linear, ...]:
        """The matrices that read the layer's input."""
        return self.gate_proj, self.up_proj

    def forward(self, hidden: Tensor, products: Products) -> Tensor:
        gate, up = products(hidden, self.inputs())
        (out,) = products(gated(gate, up), (self.down_proj,))
        return out


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the mean square is taken in fp32 or wider."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the shape of ``hidden`` [..., size]."""
        return self.with_residual(hidden)[1]

    def with_residual(self, hidden: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``hidden`` + ``delta``, and its norm; see `add_and_norm`."""
        return add_and_norm(hidden, delta, self.weight, self.epsilon)
