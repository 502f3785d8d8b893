"""Execution on a processor: one kernel for all that lies between two matrix products.

The same passes as those of `ModelRunner`, which asks torch for some forty operators a layer.
Residuals stay in fp32 from layer to layer, as they do in a learner under autocast. A row's bits
depend on its own tokens and on nothing else that is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.generators.torch_engine.cpu.layer_kernels import (
    attention_kernel,
    norm_kernel,
    rotate_kernel,
    silu_kernel,
)
from headrace.generators.torch_engine.cpu.panels import STORAGE, can_hold
from headrace.generators.torch_engine.forms import Form
from headrace.generators.torch_engine.kv_cache import GROWTH, KVCache
from headrace.generators.torch_engine.paged_attention import filled_table
from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.runner import ModelRunner, pack
from headrace.generators.torch_engine.scheduler import Part
from headrace.generators.torch_engine.weight_set import WeightSet
from headrace.kernels.calls import Call
from headrace.kernels.vectors import LANES
from headrace.models.decoder_config import DecoderConfig
from headrace.models.rope import rope_table

NO_WINDOW = 1 << 40
"""Tokens that a query without a window looks back on, itself included."""


def can_run(
    config: DecoderConfig, block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether `FusedRunner` can: its kernels take whole vectors."""
    sizes = (config.hidden_size, config.intermediate_size)
    is_whole = all(size % LANES == 0 for size in sizes) and config.head_dim % (2 * LANES) == 0
    return can_hold(dtype, device, config.hidden_size) and is_whole and block_size == LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """What one layer multiplies by, and where its small weights lie, which never move in a set."""

    inputs: Form
    output: Form
    gates: Form
    down: Form
    input_norm: int
    mlp_norm: int
    query_norm: int
    key_norm: int
    window: int


class _Rows:
    """Working memory of a pass over at most ``size`` rows; zeros, so that no row is ever NaN."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, size: int) -> None:
        width, kv_width = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        self.size = size
        self.residual = torch.zeros(size, config.hidden_size)
        self.queries = torch.zeros(size, width)
        self.normed = torch.zeros(size, config.hidden_size, dtype=dtype)
        self.inputs = torch.zeros(size, width + 2 * kv_width, dtype=dtype)
        self.mixed = torch.zeros(size, width, dtype=dtype)
        self.added = torch.zeros(size, config.hidden_size, dtype=dtype)
        self.gates = torch.zeros(size, 2 * config.intermediate_size, dtype=dtype)
        self.active = torch.zeros(size, config.intermediate_size, dtype=dtype)


class FusedRunner(ModelRunner):
    """A `ModelRunner` by kernels, for what `can_run` says."""

    def __init__(
        self,
        config: DecoderConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_quantized: bool = False,
    ) -> None:
        super().__init__(config, block_size, dtype, device, is_quantized=is_quantized)
        self._dtype = dtype
        self._rows = _Rows(config, dtype, 1)
        self._cos, self._sin = rope_table(config)
        self._layers = self._layers_of_weights()
        self._make_calls(STORAGE[dtype])

    def _new_weights(self) -> WeightSet:
        """See `ModelRunner`: rotary tables are in fp32, and no part of the decoder."""
        return self._make_weights()

    def _new_cache(self, block_size: int, dtype: torch.dtype) -> KVCache:
        """See `ModelRunner`: keys as `attention_kernel` reads them."""
        return KVCache(self.config, block_size, dtype, self._device, has_transposed_keys=True)

    def swap(self) -> None:
        """See `ModelRunner`."""
        super().swap()
        self._layers = self._layers_of_weights()

    def _layers_of_weights(self) -> list[_Layer]:
        linears = list(self._decoder.linears())
        return [
            self._layer(index, linears[4 * index : 4 * index + 4])
            for index in range(self.config.num_layers)
        ]

    def _layer(self, index: int, linears: Sequence[Sequence[nn.Linear]]) -> _Layer:
        """``linears``: the layer's part of `Decoder.linears`."""
        inputs, output, gates, down = (self._products.form(parts[0]) for parts in linears)
        window, has_norm = self.config.windows[index], self.config.qk_norm

        def weight(name: str) -> Tensor:
            return self._decoder.get_parameter(f"model.layers.{index}.{name}.weight")

        return _Layer(
            inputs=inputs,
            output=output,
            gates=gates,
            down=down,
            input_norm=weight("input_layernorm").data_ptr(),
            mlp_norm=weight("post_attention_layernorm").data_ptr(),
            query_norm=weight("self_attn.q_norm").data_ptr() if has_norm else 0,
            key_norm=weight("self_attn.k_norm").data_ptr() if has_norm else 0,
            window=NO_WINDOW if window is None else window,
        )

    def _make_calls(self, storage: int) -> None:
        """Prepare the kernels, with what is the same in every pass."""
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._numbers = np.array([head_dim**-0.5, config.rms_norm_eps], dtype=np.float32)
        scale, epsilon = self._numbers.ctypes.data, self._numbers.ctypes.data + 4
        self._norm = Call(norm_kernel(config.hidden_size, storage=storage), 7)
        self._norm[6] = epsilon
        self._silu = Call(silu_kernel(storage=storage), 5)
        self._silu[2] = config.intermediate_size
        rotate = rotate_kernel(head_dim, has_norm=config.qk_norm, storage=storage)
        self._rotate = Call(rotate, 18)
        self._rotate[2], self._rotate[3] = heads, kv_heads
        self._rotate[9], self._rotate[10] = self._cos.data_ptr(), self._sin.data_ptr()
        self._rotate[14], self._rotate[15] = scale, epsilon
        attention = attention_kernel(head_dim, heads // kv_heads, storage=storage)
        self._attention = Call(attention, 12)
        self._attention[2] = kv_heads

    def prefill(self, parts: Sequence[Part]) -> Tensor:
        """See `ModelRunner`."""
        packed = pack(parts)
        tables = [part.branch.blocks for part in parts]
        hidden = self._forward(
            self._tensor(packed.ids),
            self._tensor(packed.positions),
            self._tensor(packed.part),
            filled_table(tables, max(map(len, tables)), self._device),
        )
        return self._next_logits(hidden[self._tensor(packed.last)])

    def decode(self, running: RunningRollouts) -> Tensor:
        """See `ModelRunner`."""
        hidden = self._forward(
            running.last_token,
            running.cached_length,
            torch.arange(len(running)),
            running.blocks.contiguous(),
        )
        return self._next_logits(hidden)

    def _forward(self, ids: Tensor, positions: Tensor, sequences: Tensor, table: Tensor) -> Tensor:
        """Return final hidden states [n, hidden] of ``ids`` [n], valid until the next pass.

        Token i is at ``positions[i]`` of the sequence whose cache blocks are row ``sequences[i]``
        of ``table`` [m, width]; all int64.
        """
        size, threads = len(ids), torch.get_num_threads()
        # Vector operations for a number of a row: a few, and tens where there is an exponential.
        few, many = 4 * size // LANES, 32 * size // LANES
        config = self.config
        for_norm, for_silu = few * config.hidden_size, many * config.intermediate_size
        for_heads = many * config.num_heads * config.head_dim
        self._place_calls(size, positions, sequences, table)
        rows, body = self._rows, self._decoder.model
        rows.residual[:size] = functional.embedding(ids, body.embed_tokens.weight)
        normed, inputs, mixed, added, gates, active = (
            memory[:size]
            for memory in (
                rows.normed,
                rows.inputs,
                rows.mixed,
                rows.added,
                rows.gates,
                rows.active,
            )
        )
        norm, rotate, attention, silu = self._norm, self._rotate, self._attention, self._silu
        norm[3] = 0  # nothing is added to the embedding before the first layer
        for index, layer in enumerate(self._layers):
            norm[4] = layer.input_norm
            norm.run(threads, for_norm)
            norm[3] = rows.added.data_ptr()
            layer.inputs.multiply(normed, inputs)
            keys, values = self._cache.layer(index)
            rotate[12] = attention[8] = keys.data_ptr()
            rotate[13] = attention[9] = values.data_ptr()
            rotate[16], rotate[17] = layer.query_norm, layer.key_norm
            attention[11] = layer.window
            rotate.run(threads, few * rows.inputs.shape[1])
            attention.run(threads, for_heads)
            layer.output.multiply(mixed, added)
            norm[4] = layer.mlp_norm
            norm.run(threads, for_norm)
            layer.gates.multiply(normed, gates)
            silu.run(threads, for_silu)
            layer.down.multiply(active, added)
        norm[4] = body.norm.weight.data_ptr()
        norm.run(threads, for_norm)
        return normed

    def _place_calls(self, size: int, positions: Tensor, sequences: Tensor, table: Tensor) -> None:
        """Tell the kernels where this pass's rows lie."""
        if size > self._rows.size:
            self._rows = _Rows(self.config, self._dtype, max(size, int(GROWTH * self._rows.size)))
        rows, norm, rotate = self._rows, self._norm, self._rotate
        attention, silu = self._attention, self._silu
        norm[1] = silu[1] = rotate[1] = attention[1] = size
        norm[2], norm[5] = rows.residual.data_ptr(), rows.normed.data_ptr()
        silu[3], silu[4] = rows.gates.data_ptr(), rows.active.data_ptr()
        rotate[4] = rows.inputs.data_ptr()
        rotate[5] = attention[4] = positions.data_ptr()
        rotate[6] = attention[5] = sequences.data_ptr()
        rotate[7] = attention[6] = table.data_ptr()
        rotate[8] = attention[7] = table.shape[1]
        rotate[11] = attention[3] = rows.queries.data_ptr()
        attention[10] = rows.mixed.data_ptr()
