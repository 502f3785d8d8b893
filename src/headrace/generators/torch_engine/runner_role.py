"""What the engine asks of a runner, whoever computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.scheduler import Part


class Runner(Protocol):
    """Owns one copy of the weights, and whatever it keeps of the tokens it has seen."""

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        ...

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise WeightSyncError when a name, a shape or a dtype of ``tensors`` does not fit."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace every weight by the one of the same name in ``tensors``, which fit."""
        ...

    def verify(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """Read all weights back; raise WeightSyncError unless their checksum is ``published``.

        ``tensors``: what was loaded.
        """
        ...

    def stage(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """Make a second copy of all weights out of ``tensors``, which fit, for `swap`; verify it.

        May run on another thread beside passes, of which it changes nothing. Raises as `verify`
        does, and whatever ``tensors`` raise; then what is staged is a copy of nothing.
        """
        ...

    def swap(self) -> None:
        """Let passes read what was staged from now on."""
        ...

    def reserve(self, num_blocks: int, at_most: int) -> None:
        """Make room in the cache for ``num_blocks`` blocks, of which there are ``at_most``."""
        ...

    def clear_cache(self) -> None:
        """Forget every block."""
        ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks ``sources`` over ``targets``."""
        ...

    def wipe_blocks(self, blocks: Sequence[int]) -> None:
        """Forget what whole ``blocks`` hold."""
        ...

    def prefill(self, parts: Sequence[Part]) -> Tensor:
        """Return next-token logits [m, vocab] of the m parts that complete their branch."""
        ...

    def decode(self, running: RunningRollouts) -> Tensor:
        """Return next-token logits [n, vocab] of every running rollout."""
        ...
