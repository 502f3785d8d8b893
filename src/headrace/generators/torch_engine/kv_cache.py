"""Keys and values in fixed blocks of tokens, shared between rollouts that begin alike.

Owns the invariant that a block holds exactly the keys and values of its tokens, under the weights
that computed them. Which block belongs to whom is the block manager's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign_config import ForeignConfig

GROWTH = 1.25
"""Memory of blocks, and of rows, grows by this factor, so that it costs little however often."""


def block_bytes(config: DecoderConfig | ForeignConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the memory of one block: keys and values of every layer, and of one layer's copy.

    Of a model that is sampled without a cache, that of the tokens' ids.
    """
    if isinstance(config, ForeignConfig):
        return block_size * torch.int64.itemsize
    values = (config.num_layers + 1) * config.num_kv_heads * block_size * config.head_dim
    return 2 * values * dtype.itemsize


class KVCache:
    """[blocks, kv_heads, block_size, head_dim] per layer, growing when asked.

    With ``has_transposed_keys`` keys lie as [blocks, kv_heads, head_dim, block_size], and are read
    and written by whoever asked for that.
    """

    def __init__(
        self,
        config: DecoderConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_transposed_keys: bool = False,
    ) -> None:
        self.block_size = block_size
        self.device, self.dtype = device, dtype
        shape = (0, config.num_kv_heads, block_size, config.head_dim)
        turned = (*shape[:2], shape[3], shape[2]) if has_transposed_keys else shape
        self._keys = [self._zeros(turned, dtype) for _ in range(config.num_layers)]
        self._values = [self._zeros(shape, dtype) for _ in range(config.num_layers)]
        self._gathered = (self._zeros(shape, dtype), self._zeros(shape, dtype))
        """Memory for copies of scattered blocks: fresh memory would cost more than copying."""

    @property
    def num_blocks(self) -> int:
        """Blocks there is memory for."""
        return len(self._keys[0])

    def ensure(self, num_blocks: int, at_most: int) -> None:
        """Make room for ``num_blocks`` blocks, keeping what is there; for ``at_most`` ever."""
        if num_blocks <= self.num_blocks:
            return
        num_blocks = max(num_blocks, min(at_most, int(GROWTH * self.num_blocks)))
        # One by one, so that old and new stand side by side for a single layer only.
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = self._zeros((num_blocks, *old.shape[1:]), old.dtype)
                new[: len(old)] = old
                tensors[layer] = new

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all blocks, as they lie; valid until the cache grows."""
        return self._keys[layer], self._values[layer]

    def clear(self) -> None:
        """Give everything back."""
        self._gathered = (self._gathered[0].new_zeros(0), self._gathered[1].new_zeros(0))
        self._keys = [keys.new_zeros(0, *keys.shape[1:]) for keys in self._keys]
        self._values = [values.new_zeros(0, *values.shape[1:]) for values in self._values]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros, not empty: a masked cell must be finite, or 0 * NaN would leak."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Store ``key`` and ``value`` [N, kv_heads, head_dim] at ``offsets`` [N] of ``blocks``."""
        self._keys[layer][blocks, :, offsets] = key
        self._values[layer][blocks, :, offsets] = value

    def read(self, layer: int, blocks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, block_size, head_dim], valid until the next read.

        A slice is not copied.
        """
        keys, values = self._keys[layer], self._values[layer]
        if isinstance(blocks, slice):
            return keys[blocks], values[blocks]
        if len(self._gathered[0]) < len(blocks):
            num_blocks = max(len(blocks), min(len(keys), int(GROWTH * len(blocks))))
            shape = (num_blocks, *keys.shape[1:])
            self._gathered = (self._zeros(shape, self.dtype), self._zeros(shape, self.dtype))
        places = [room[: len(blocks)] for room in self._gathered]
        torch.index_select(keys, 0, blocks, out=places[0])
        torch.index_select(values, 0, blocks, out=places[1])
        return places[0], places[1]

    def keys(self, layer: int, blocks: Tensor) -> Tensor:
        """Return a copy of the keys [n, kv_heads, block_size, head_dim] of ``blocks`` [n]."""
        return self._keys[layer].index_select(0, blocks)

    def values(self, layer: int, blocks: Tensor) -> Tensor:
        """Return a copy of the values [n, kv_heads, block_size, head_dim] of ``blocks`` [n]."""
        return self._values[layer].index_select(0, blocks)

    def read_runs(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [S, kv_heads, T * block_size, D] of runs of ``blocks`` [S, T]."""
        keys, values = (
            part.index_select(0, blocks.flatten())
            .view(*blocks.shape, *part.shape[1:])
            .transpose(1, 2)
            .flatten(2, 3)
            for part in (self._keys[layer], self._values[layer])
        )
        return keys, values

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks ``sources`` [n] over ``targets`` [n]."""
        for tensor in (*self._keys, *self._values):
            tensor[targets] = tensor.index_select(0, sources)

    def wipe(self, blocks: Tensor) -> None:
        """Set whole ``blocks`` [n] to 0, where something not finite was computed."""
        for tensor in (*self._keys, *self._values):
            tensor[blocks] = 0

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values, *self._gathered))
