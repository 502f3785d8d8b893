"""Keys and values of the running rollouts, one slot each.

Slots 0 .. n-1 are the running ones, always without a gap, so a decode step reads one contiguous
view and no slot is ever gathered. Owns the invariant that a slot holds exactly the keys and values
of its rollout's tokens, under the weights that computed them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.models.decoder_config import DecoderConfig


class KVCache:
    """[slots, kv_heads, length, head_dim] per layer, growing in both directions when asked."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self.device = device
        self._dtype = dtype
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.num_slots = 0
        self.length = 0

    def ensure(self, num_slots: int, length: int) -> None:
        """Make room for ``num_slots`` slots of ``length`` tokens, keeping what is there."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        slots, width = max(num_slots, self.num_slots), max(length, self.length)
        config = self._config
        shape = (slots, config.num_kv_heads, width, config.head_dim)
        if not self._keys:
            empty = (0, config.num_kv_heads, 0, config.head_dim)
            self._keys = [self._zeros(empty) for _ in range(config.num_layers)]
            self._values = [self._zeros(empty) for _ in range(config.num_layers)]
        # One by one, so that old and new stand side by side for a single layer only.
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = self._zeros(shape)
                new[: self.num_slots, :, : self.length] = old
                tensors[layer] = new
        self.num_slots, self.length = slots, width

    def clear(self) -> None:
        """Give everything back."""
        self._keys, self._values = [], []
        self.num_slots = self.length = 0

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros, not empty: a masked cell must be finite, or 0 * NaN would leak."""
        return torch.zeros(shape, dtype=self._dtype, device=self.device)

    def view(self, layer: int, num_slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [num_slots, kv_heads, length, head_dim], not copied."""
        return (
            self._keys[layer][:num_slots, :, :length],
            self._values[layer][:num_slots, :, :length],
        )

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of slot ``source`` over slot ``target``."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))
