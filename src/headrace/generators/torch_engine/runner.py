"""Execution: prefill and decode forward passes over the cache. Decides nothing.

Owns the generator's copy of the weights and the invariant that no forward pass ever sees a mixture
of two versions: `load` replaces all of them between two passes, on the thread that runs the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from headrace.errors import WeightSyncError
from headrace.generators.torch_engine.kv_cache import KVCache
from headrace.generators.torch_engine.paged_attention import (
    BlockTable,
    DecodeAttention,
    PrefillAttention,
)
from headrace.generators.torch_engine.products import FusedProducts
from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.scheduler import Part
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import misfits, same_bits

TURNS = 16
"""Weight updates over which every large weight is read back once: that costs as much as loading."""
LARGE = 1 << 18
"""Numbers of a weight that is read back in turn only."""


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
        with torch.device("meta"):
            decoder = Decoder(config).to(dtype)
        self._decoder = decoder.requires_grad_(requires_grad=False)
        # What the weights must look like; most of them are never stored under these names.
        self._expected = dict(decoder.named_parameters())
        self._products = FusedProducts(decoder, dtype, device, is_quantized=is_quantized)
        for name in self._expected.keys() - self._products.names:
            self._allocate(name)
        self._cache = self._prepare(config, block_size, dtype)
        self._table: tuple[int, BlockTable] | None = None
        self._turn = 0
        """Of the weights that are held: the loads that went well, one after another, before."""
        self._num_verified = 0
        self._logits = torch.empty(0, config.vocab_size, device=device)
        self.config = config

    def _prepare(self, config: DecoderConfig, block_size: int, dtype: torch.dtype) -> KVCache:
        """Make what the passes need beside weights, and return the cache as they read it."""
        self._decoder.model.fill_rope(config)
        return KVCache(config, block_size, dtype, self._device)

    @property
    def device(self) -> torch.device:
        """Where passes are computed, and where logits are."""
        return self._device

    def _allocate(self, name: str) -> None:
        """Give a parameter memory, not content: the generator samples after the first weights."""
        module, _, leaf = name.rpartition(".")
        empty = torch.empty_like(self._expected[name], device=self._device)
        parameter = nn.Parameter(empty, requires_grad=False)
        setattr(self._decoder.get_submodule(module), leaf, parameter)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise WeightSyncError when a name, a shape or a dtype of ``tensors`` does not fit.

        A cast would leave weights that nobody published.
        """
        if wrong := misfits(self._expected, tensors):
            raise WeightSyncError(wrong)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace every weight by the one of the same name in ``tensors``, which fit."""
        # Until `verify` has seen them, these weights are as unknown as the first ones.
        self._turn, self._num_verified = self._num_verified, 0
        self._products.load(tensors)
        for name, weight in self._own_weights():
            weight.copy_(tensors[name])

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        """Read weights back and raise WeightSyncError when one is not as ``tensors`` has it.

        All of them the first time, and after a load that failed; else every small one, and of the
        products and the other large ones one in `TURNS`, in turn.
        """
        turns = TURNS if self._turn else 1
        own = (
            name
            for number, (name, weight) in enumerate(self._own_weights())
            if (weight.numel() < LARGE or number % turns == self._turn % turns)
            and not same_bits(weight, tensors[name])
        )
        products = self._products.differing(tensors, turn=self._turn, turns=turns)
        if wrong := list(chain(own, products)):
            msg = f"{wrong[0]} is not held as it was published"
            raise WeightSyncError(msg)
        self._num_verified = self._turn + 1

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._decoder.named_parameters():
            if not weight.is_meta:
                yield name, weight

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
