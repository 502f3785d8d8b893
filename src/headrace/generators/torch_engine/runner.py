"""Execution: prefill and decode forward passes over the cache. Decides nothing.

Owns the generator's copy of the weights and the invariant that no forward pass ever sees a mixture
of two versions: `load` replaces all of them between two passes, on the thread that runs the passes,
and what `stage` prepares on another one takes their place as a whole, by `swap` on this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.generators.torch_engine.paged_attention import (
    BlockTable,
    DecodeAttention,
    PrefillAttention,
)
from headrace.generators.torch_engine.products import FusedProducts
from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.scheduler import Part
from headrace.generators.torch_engine.weight_set import WeightSet
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParts:
    """The tokens of several parts, one after another."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)
    """The number of each token's part."""
    last: list[int] = field(default_factory=list)
    """Rows of the last tokens of those parts that complete their branch."""


def pack(parts: Sequence[Part]) -> PackedParts:
    """Return the tokens of ``parts``."""
    packed = PackedParts()
    for number, part in enumerate(parts):
        start, end = part.branch.num_cached, part.branch.num_cached + part.num_tokens
        packed.ids.extend(part.branch.token_ids[start:end])
        packed.positions.extend(range(start, end))
        packed.part.extend([number] * part.num_tokens)
        if part.num_tokens == part.branch.num_left:
            packed.last.append(len(packed.ids) - 1)
    return packed


class ModelRunner:
    """A decoder with its cache."""

    def __init__(
        self,
        config: DecoderConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_quantized: bool = False,
    ) -> None:
        """``is_quantized``: multiply by matrices in eight bits, with all the rest in ``dtype``."""
        self._device = device
        self.config = config
        self._make_weights = partial(WeightSet, config, dtype, device, is_quantized=is_quantized)
        self._weights = self._new_weights()
        self._staged: WeightSet | None = None
        """Beside those that passes read: what is to take their place."""
        self._cache = self._new_cache(block_size, dtype)
        self._table: tuple[int, BlockTable] | None = None
        self._logits = torch.empty(0, config.vocab_size, device=device)

    def _new_weights(self) -> WeightSet:
        """Return a set without content, with what passes need beside weights."""
        weights = self._make_weights()
        weights.decoder.model.fill_rope(self.config)
        return weights

    def _new_cache(self, block_size: int, dtype: torch.dtype) -> KVCache:
        """Return the cache as passes read it."""
        return KVCache(self.config, block_size, dtype, self._device)

    @property
    def _decoder(self) -> Decoder:
        return self._weights.decoder

    @property
    def _products(self) -> FusedProducts:
        return self._weights.products

    @property
    def device(self) -> torch.device:
        """Where passes are computed, and where logits are."""
        return self._device

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Runner`."""
        self._weights.check(tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Runner`."""
        self._weights.load(tensors)

    def verify(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """See `Runner`."""
        self._weights.verify(tensors, published)

    def stage(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """See `Runner`."""
        if self._staged is None:
            self._staged = self._new_weights()
        self._staged.load(tensors)
        self._staged.verify(tensors, published)

    def swap(self) -> None:
        """See `Runner`."""
        assert self._staged is not None, "nothing was staged"
        self._weights, self._staged = self._staged, self._weights

    def reserve(self, num_blocks: int, at_most: int) -> None:
        """Make room in the cache for ``num_blocks`` blocks, of which there are ``at_most``."""
        self._cache.ensure(num_blocks, at_most)

    def clear_cache(self) -> None:
        """Forget every block."""
        self._cache.clear()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks ``sources`` over ``targets``."""
        pair = torch.tensor([sources, targets], device=self._device)
        self._cache.copy(*pair)

    def wipe_blocks(self, blocks: Sequence[int]) -> None:
        """Forget what whole ``blocks`` hold."""
        self._cache.wipe(self._tensor(blocks))

    def prefill(self, parts: Sequence[Part]) -> Tensor:
        """Compute ``parts`` and keep their keys and values.

        Returns next-token logits [m, vocab] of the m parts that complete their branch.
        """
        packed = pack(parts)
        attention = PrefillAttention(
            self._cache,
            self.config,
            tables=[part.branch.blocks for part in parts],
            starts=[part.branch.num_cached for part in parts],
            lengths=[part.num_tokens for part in parts],
        )
        hidden = self._decoder(
            self._tensor(packed.ids), self._tensor(packed.positions), attention, self._products
        )
        return self._next_logits(hidden[self._tensor(packed.last)])

    def decode(self, running: RunningRollouts) -> Tensor:
        """Feed every running rollout its last token; return next-token logits [n, vocab]."""
        positions = running.cached_length.to(self._device)
        attention = DecodeAttention(
            self._cache,
            self.config,
            self._table_of(running),
            positions,
            running.next_block.to(self._device),
        )
        ids = running.last_token.to(self._device)
        hidden = self._decoder(ids, positions, attention, self._products)
        return self._next_logits(hidden)

    def _next_logits(self, hidden: Tensor) -> Tensor:
        """Return [n, vocab] in fp32, valid until the next pass: memory that is used again.

        Fresh memory of that size costs more in page faults than the arithmetic on it.
        """
        if len(self._logits) < len(hidden):
            self._logits = torch.empty(len(hidden), self.config.vocab_size, device=self._device)
        return self._products.logits(hidden, self._logits[: len(hidden)])

    def _table_of(self, running: RunningRollouts) -> BlockTable:
        """Return the table of ``running``, made again only when a row or a block has changed."""
        if self._table is None or self._table[0] != running.layout:
            table = BlockTable(
                running.blocks.to(self._device),
                running.num_blocks.to(self._device),
                self._cache.block_size,
            )
            self._table = (running.layout, table)
        return self._table[1]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
